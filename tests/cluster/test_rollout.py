"""RolloutActor on real Ray and real vLLM: what callers see when it dies, and how its successor joins."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
import ray

from mempo_ray.actors.calls import answer
from mempo_ray.actors.rollout import RemoteRolloutActor
from mempo_ray.config.schema import Rollout, WeightSync
from mempo_ray.contracts import WeightManifest
from mempo_ray.errors import EngineFailed
from mempo_ray.ports import GenerateRequest, Generation
from tests.fakes.tiny_model import END_OF_TURN_ID, VOCAB_SIZE, manifest, save_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

ROLLOUT = Rollout(dtype="float32", max_model_len=2048, max_num_seqs=16, kv_cache_gb=0.1, request_timeout_s=60)
DEADLINE_S = 120.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def published(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WeightManifest]:
    """A local cluster, and weights as a policy would publish them."""
    folder = tmp_path_factory.mktemp("weights")
    weights = manifest(save_tiny_model(folder, seed=0), folder, version=6)
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
    yield weights
    ray.shutdown()


@pytest.fixture
def new_actor(published: WeightManifest, tmp_path: Path) -> Callable[[str], ray.actor.ActorHandle]:
    def make(name: str) -> ray.actor.ActorHandle:
        return RemoteRolloutActor.options(num_cpus=0.1).remote(
            name, published.uri, ROLLOUT, WeightSync(), END_OF_TURN_ID, str(tmp_path)
        )

    return make


def turn(seed: int, max_tokens: int = 16) -> GenerateRequest:
    prompt = np.random.default_rng(seed).integers(2, VOCAB_SIZE, 30).astype(np.int32)
    return GenerateRequest(prompt, seed, max_tokens, group="q")


async def ask(reference: ray.ObjectRef, deadline_s: float = DEADLINE_S):
    return await answer(reference, "rollout", deadline_s, on_death=EngineFailed)


async def gone(pids: list[int], within_s: float) -> set[int]:
    """The pids that are still alive (zombies are not) when all have ended or time is up."""
    end = time.monotonic() + within_s
    left = set(pids)
    while left and time.monotonic() < end:
        await asyncio.sleep(0.05)
        left = {pid for pid in left if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"}
    return left


async def test_an_actor_joins_serves_updates_and_leaves_nothing_behind(new_actor, published, tmp_path, capfd):
    actor = new_actor("rollout-0")
    status = await ask(actor.start.remote(published))
    assert (status.state, status.weight_version) == ("serving", 6)
    turns = await asyncio.gather(*(ask(actor.generate.remote(turn(seed))) for seed in range(24)))
    assert {each.weight_version for each in turns} == {6}
    assert await ask(actor.update.remote(replace(published, version=7))) < 1e-4
    assert (await ask(actor.generate.remote(turn(0)))).weight_version == 7
    assert "EngineCore" in (tmp_path / "rollout-0.log").read_text()
    pids = await ask(actor.pids.remote())
    assert len(pids) > 1
    # Nothing that a hard kill could leave in /dev/shm.
    assert not any("/dev/shm/psm_" in Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    await ask(actor.close.remote())
    ray.kill(actor)
    assert await gone(pids, within_s=10) == set()
    printed = capfd.readouterr()
    assert "EngineCore" not in printed.out + printed.err


async def test_a_killed_actor_fails_its_turns_takes_its_engine_along_and_is_replaced(new_actor, published):
    actor = new_actor("rollout-1")
    await ask(actor.start.remote(published))
    pids = await ask(actor.pids.remote())
    running = [asyncio.ensure_future(ask(actor.generate.remote(turn(seed, 1500)))) for seed in range(8)]
    while (await ask(actor.status.remote())).num_in_flight < 8:
        await asyncio.sleep(0)
    os.kill(pids[0], signal.SIGKILL)
    results = await asyncio.gather(*running, return_exceptions=True)
    assert any(isinstance(result, EngineFailed) for result in results)
    assert all(isinstance(result, EngineFailed | Generation) for result in results)
    assert await gone(pids, within_s=5) == set()

    successor = new_actor("rollout-1")
    status = await ask(successor.start.remote(published))
    assert (status.state, status.weight_version) == ("serving", 6)
    assert (await ask(successor.generate.remote(turn(0)))).weight_version == 6

    # Its engine core dies alone: the actor lives, says so, and fails what it had.
    engine_core = next(
        pid for pid in await ask(successor.pids.remote()) if "EngineCore" in " ".join(psutil.Process(pid).cmdline())
    )
    running = [asyncio.ensure_future(ask(successor.generate.remote(turn(seed, 1500)))) for seed in range(8)]
    while (await ask(successor.status.remote())).num_in_flight < 8:
        await asyncio.sleep(0)
    os.kill(engine_core, signal.SIGKILL)
    results = await asyncio.gather(*running, return_exceptions=True)
    assert any(isinstance(result, EngineFailed) for result in results)
    assert (await ask(successor.status.remote())).state == "dead"
    with pytest.raises(EngineFailed):
        await ask(successor.generate.remote(turn(0)))
    await ask(successor.close.remote())
    ray.kill(successor)


async def test_an_actor_killed_while_it_starts_leaves_no_engine_behind(new_actor, published):
    actor = new_actor("rollout-2")
    pid = (await ask(actor.pids.remote()))[0]
    starting = actor.start.remote(published)
    process = psutil.Process(pid)
    while not (children := process.children(recursive=True)):
        await asyncio.sleep(0.02)
    pids = [pid, *(child.pid for child in children)]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineFailed):
        await ask(starting)
    assert await gone(pids, within_s=30) == set()
