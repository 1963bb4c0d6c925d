"""The fleet over real Ray actors and the scripted engine: deaths cost nothing that had ended, and lose nothing."""

import asyncio

import pytest
import ray

from mempo_ray.actors.cluster import connected
from mempo_ray.actors.fleet import open_fleet
from mempo_ray.actors.rollout_pool import RayRollouts
from mempo_ray.agent.group import siblings
from mempo_ray.config.load import load_file
from mempo_ray.config.models import model_folder
from mempo_ray.contracts import TrajectoryBatch
from mempo_ray.data.tasks import read_tasks
from mempo_ray.data.world import same_atlas
from mempo_ray.generation.engine import unproven
from mempo_ray.observability.run_folder import RunFolder
from mempo_ray.placement.plan import make_plan
from mempo_ray.placement.ray_state import largest_shape
from tests.fakes.trajectories import TASK, trajectory

pytestmark = pytest.mark.slow


@pytest.fixture
def config():
    words = ["rollout.engine=fake", "agent.workers=2", "rollout.replicas=2", "rollout.max_replicas=2"]
    return load_file(None, [*words, "agent.max_resamples=0"])  # a worker's death is no episode's fault


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path, "fleet")


async def run_episodes(config, folder, during):
    """All (task, sibling) keys that ended, with `during(fleet, number)` called after each."""
    passages = same_atlas(config.data.train, config.data.eval).passages()
    model_dir = model_folder(config.policy.model)
    plan = make_plan(config, largest_shape())
    async with open_fleet(config, plan, model_dir, folder, passages, with_policy=False) as fleet:
        await fleet.rollouts.sync(unproven(str(model_dir)))
        tasks = read_tasks(config.data.train)[:16]
        requests = [request for task in tasks for request in siblings(task, 4, run_seed=0)]
        ended = []
        async for finished in fleet.rollouts.run(requests):
            ended.append((finished.summary.task_id, finished.summary.sibling))
            if finished.payload is not None:
                assert len(await fleet.payloads.read(finished.payload)) == finished.summary.num_turns
            await during(fleet, len(ended))
        return requests, ended, await fleet.rollouts.stats()


@pytest.mark.parametrize("victim", ["nobody", "agent worker", "engine"])
def test_every_episode_ends_exactly_once_whoever_dies(config, folder, victim):
    async def during(fleet, number):
        if number != 3 or victim == "nobody":
            return
        rollouts = fleet.rollouts
        actor = rollouts._workers[0] if victim == "agent worker" else rollouts._members["rollout-0"].handle
        ray.kill(actor, no_restart=False)  # as if its process had crashed

    with connected(config, "fleet-test"):
        requests, ended, stats = asyncio.run(run_episodes(config, folder, during))
    assert sorted(ended) == sorted((r.task.task_id, r.sibling) for r in requests)
    assert stats["rollout/worker_restarts"] == (victim == "agent worker")


@ray.remote(num_cpus=0, max_concurrency=4)
class HangingWorker:
    """An agent worker whose first episode ends and whose second one hangs until it is cancelled."""

    def __init__(self):
        self._cancelled = asyncio.Event()

    async def run(self, requests):
        try:
            ended = trajectory()
            yield TrajectoryBatch.from_trajectories([ended])
            yield ended.summary()
            await asyncio.Event().wait()
        finally:
            self._cancelled.set()

    async def cancelled(self):
        await self._cancelled.wait()


def test_episodes_that_nobody_waits_for_are_cancelled(config):
    async def leave_early():
        worker = HangingWorker.remote()
        rollouts = RayRollouts(config, make_engine=None, workers=[worker])
        finished = rollouts.run(siblings(TASK, 2, run_seed=0))
        assert (await anext(finished)).summary.sibling == 0
        await finished.aclose()
        await asyncio.wait_for(worker.cancelled.remote(), 30)

    with connected(config, "fleet-test"):
        asyncio.run(leave_early())
