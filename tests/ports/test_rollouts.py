"""What every `ports.Rollouts` does: the fake, and the fleet's over real Ray actors and the scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest
import pytest_asyncio

from mempo_ray.actors.cluster import connected
from mempo_ray.actors.fleet import open_fleet
from mempo_ray.agent.group import siblings
from mempo_ray.config.load import load_file
from mempo_ray.config.models import model_folder
from mempo_ray.contracts import EpisodeRequest, WeightManifest
from mempo_ray.data.tasks import read_tasks
from mempo_ray.data.world import same_atlas
from mempo_ray.generation.engine import unproven
from mempo_ray.observability.run_folder import RunFolder
from mempo_ray.placement.plan import make_plan
from mempo_ray.placement.ray_state import largest_shape
from mempo_ray.ports import Rollouts
from tests.fakes.rollouts import FakeRollouts, finished

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

WORDS = ["rollout.engine=fake", "rollout.replicas=2", "rollout.max_replicas=2", "agent.workers=2"]
REQUESTS = [r for task in read_tasks("synthetic:train")[:4] for r in siblings(task, 2, run_seed=0)]


@dataclass(frozen=True)
class Case:
    rollouts: Rollouts
    manifest: Callable[[int], WeightManifest]  # of a version


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["fake", pytest.param("real", marks=pytest.mark.slow)]
)
async def case(request, tmp_path_factory) -> AsyncIterator[Case]:
    if request.param == "fake":
        ended = [finished(r.task.task_id, r.sibling, turns=1 + n % 3) for n, r in enumerate(REQUESTS)]
        yield Case(FakeRollouts(ended, num_engines=2), lambda version: unproven("", version))
        return
    config = load_file(None, WORDS)
    model, folder = model_folder(config.policy.model), RunFolder.create(tmp_path_factory.mktemp("runs"), "ports")
    passages = same_atlas(config.data.train, config.data.eval).passages()
    with connected(config, "ports-rollouts"):
        plan = make_plan(config, largest_shape())
        async with open_fleet(config, plan, model, folder, passages, with_policy=False) as fleet:
            yield Case(fleet.rollouts, lambda version: unproven(str(model), version))


def keys(requests: list[EpisodeRequest]) -> list[tuple[str, int]]:
    return sorted((request.task.task_id, request.sibling) for request in requests)


async def test_no_engine_serves_before_the_first_sync(case: Case):
    assert len(case.rollouts.engines()) == 2
    assert "serving" not in {engine.state for engine in case.rollouts.engines()}


async def test_after_a_sync_every_engine_serves_its_version(case: Case):
    for version in (1, 2):
        report = await case.rollouts.sync(case.manifest(version))
        assert (report.version, report.num_engines) == (version, 2)
        assert {(e.state, e.weight_version) for e in case.rollouts.engines()} == {("serving", version)}


async def test_each_request_ends_exactly_once_with_a_payload_if_it_has_a_turn(case: Case):
    ended = [finished async for finished in case.rollouts.run(REQUESTS)]
    assert sorted((f.summary.task_id, f.summary.sibling) for f in ended) == keys(REQUESTS)
    assert all((f.payload is not None) == (f.summary.num_turns > 0) for f in ended)


async def test_a_drained_engine_is_no_longer_synced_and_the_others_serve(case: Case):
    first, second = (engine.name for engine in case.rollouts.engines())
    await case.rollouts.drain(first)
    assert (await case.rollouts.sync(case.manifest(3))).num_engines == 1
    states = {engine.name: engine.state for engine in case.rollouts.engines()}
    assert states[first] in ("draining", "dead")
    assert states[second] == "serving"
    ended = [finished async for finished in case.rollouts.run(REQUESTS)]
    assert len(ended) == len(REQUESTS)
