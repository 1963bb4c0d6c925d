"""Engines that die while they are being replaced: tried again up to the ceiling, then the run ends with its type."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import ray

from mempo_ray.actors.agent_loop import RemoteAgentLoopWorker
from mempo_ray.actors.rollout import RemoteRolloutActor
from mempo_ray.actors.rollout_pool import RayRollouts
from mempo_ray.config.load import load_file
from mempo_ray.config.models import model_folder
from mempo_ray.contracts import EpisodeRequest, Task
from mempo_ray.errors import EngineFailed
from mempo_ray.generation.engine import unproven

pytestmark = pytest.mark.slow

MODEL = str(model_folder("builtin:tiny"))
DEADLINE_S = 120


@pytest.fixture(scope="module", autouse=True)
def _ray():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


class Pool:
    """One engine; the lives of it that are numbered in `stillborn` are killed as soon as they are made."""

    def __init__(self, stillborn: Sequence[int], max_restarts: int, tmp_path) -> None:
        words = ["rollout.engine=fake", f"rollout.max_restarts={max_restarts}"]
        self._config, self._stillborn, self._logs = load_file(None, words), stillborn, str(tmp_path)
        self.lives: list = []
        worker = RemoteAgentLoopWorker.options(num_cpus=0, max_concurrency=8).remote(
            0, self._config.agent, self._config.rollout, MODEL
        )
        self.rollouts = RayRollouts(self._config, self._make, workers=[worker])

    def _make(self, index: int):
        config = self._config
        arguments = (f"rollout-{index}", MODEL, config.rollout, config.weight_sync, 2, self._logs)
        handle = RemoteRolloutActor.options(num_cpus=0, max_concurrency=8).remote(*arguments)
        if len(self.lives) in self._stillborn:
            ray.kill(handle)
        self.lives.append(handle)
        return handle

    async def serve_and_die(self) -> None:
        """Version 0 is proven, then the engine dies. Returns when the pool has dealt with it."""
        self.rollouts.start()
        await self.rollouts.sync(unproven(MODEL))
        (watcher,) = self.rollouts._watchers
        ray.kill(self.lives[0])
        await asyncio.wait([watcher], timeout=DEADLINE_S)


async def test_an_engine_that_dies_while_it_starts_is_replaced_too(tmp_path):
    pool = Pool(stillborn=(1, 2), max_restarts=5, tmp_path=tmp_path)
    await pool.serve_and_die()

    (status,) = pool.rollouts.engines()
    assert (status.state, status.weight_version, status.num_restarts) == ("serving", 0, 3)
    assert len(pool.lives) == 4
    assert pool.rollouts.counters.engine_restarts == 3
    assert pool.rollouts.counters.recovery_s > 0
    await pool.rollouts.close()


async def test_above_the_ceiling_the_run_ends_and_says_where_to_look(tmp_path):
    pool = Pool(stillborn=range(1, 9), max_restarts=2, tmp_path=tmp_path)
    await pool.serve_and_die()

    request = EpisodeRequest(Task("q", "?", (("a",),), "test"), 0, 0)
    with pytest.raises(EngineFailed, match=r"rollout\.max_restarts=2.*engine logs"):
        await asyncio.wait_for(anext(aiter(pool.rollouts.run([request]))), DEADLINE_S)
    assert len(pool.lives) == 3
    await pool.rollouts.close()
