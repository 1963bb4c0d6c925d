"""What the loss of an engine in the middle of a step costs (X8), on real nodes, workers and pool; turns are scripted.

Engines are paused until each episode in flight stands still in a turn: then it is known which engine has how many of
them, and no count depends on how fast anything runs.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from mempo_ray.actors.calls import answer
from mempo_ray.actors.cluster import connected
from mempo_ray.actors.fleet import open_fleet
from mempo_ray.actors.rollout_pool import Member, RayRollouts
from mempo_ray.agent.group import siblings
from mempo_ray.config.load import build
from mempo_ray.config.models import model_folder
from mempo_ray.config.schema import Config
from mempo_ray.data.tasks import read_tasks
from mempo_ray.data.world import same_atlas
from mempo_ray.generation.engine import unproven
from mempo_ray.observability.run_folder import RunFolder
from mempo_ray.placement.plan import make_plan
from mempo_ray.placement.ray_state import largest_shape

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ENGINES, WAIT_S = 3, 120
NUM_TASKS, GROUP_SIZE = 16, 4
WORKERS, GPUS = {"mempo/pool": "cpu"}, {"mempo/pool": "gpu"}
STORE = {"object_store_memory": 80_000_000}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head with all workers, and a node for each engine and for one more."""
    cluster = Cluster()
    cluster.add_node(num_cpus=2, num_gpus=0, include_dashboard=False, labels=WORKERS, **STORE)
    for _ in range(ENGINES + 1):
        cluster.add_node(num_cpus=1, num_gpus=1, labels=GPUS, **STORE)
    yield cluster
    cluster.shutdown()


@pytest.fixture
def config(cluster: Cluster) -> Config:
    labels = {"rollout": GPUS, "agent": WORKERS, "retrieval": WORKERS, "reward": WORKERS}
    pool = dict.fromkeys(("replicas", "min_replicas", "max_replicas"), ENGINES)
    return build(
        {
            "rollout": {"engine": "fake", "request_timeout_s": 240, **pool},
            "agent": {"workers": 2, "max_resamples": 0, "limits": {"episode_s": 240, "search_s": 60}},
            "policy": {"device": "cuda"},
            "placement": {"address": cluster.address, "layout": "disaggregated", "labels": labels},
        }
    )


Lose = Callable[[RayRollouts, Member], Awaitable[None]]


async def lose_in_the_middle(config: Config, folder: RunFolder, lose: Lose) -> tuple[int, dict[str, float]]:
    """Turns that the lost engine had, and the counts of the step, all of whose episodes have ended well."""
    model_dir = model_folder(config.policy.model)
    plan = make_plan(config, largest_shape(), with_policy=False)
    passages = same_atlas(config.data.train, config.data.eval).passages()
    async with open_fleet(config, plan, model_dir, folder, passages, with_policy=False) as fleet:
        rollouts = fleet.rollouts
        await rollouts.sync(unproven(str(model_dir)))
        tasks = read_tasks(config.data.train)[:NUM_TASKS]
        requests = [request for task in tasks for request in siblings(task, GROUP_SIZE, run_seed=0)]
        episodes = rollouts.run(requests)
        ended = [(await anext(episodes)).summary]
        engines = list(rollouts.members)
        assert len({engine.node for engine in engines}) == ENGINES
        await asyncio.gather(*(answer(e.handle.pause.remote(), "pause", WAIT_S) for e in engines))
        turns = await standing_still(rollouts, engines)
        lost = engines[0]
        node = lost.node
        await lose(rollouts, lost)
        for engine in rollouts.members:
            if engine in engines and engine.state in ("serving", "draining"):
                await answer(engine.handle.resume.remote(), "resume", WAIT_S)
        ended += [finished.summary async for finished in episodes]
        keys = [(summary.task_id, summary.sibling) for summary in ended]
        assert sorted(keys) == sorted((request.task.task_id, request.sibling) for request in requests)
        assert not any(summary.end_reason.is_infrastructure or summary.attempt for summary in ended)
        await until(lambda: sum(engine.state == "serving" for engine in rollouts.members) == ENGINES)
        assert node not in {engine.node for engine in rollouts.members}
        await until(lambda: reserved() <= {engine.name for engine in rollouts.members})  # none without one
        return turns[lost.name], await rollouts.stats()


async def standing_still(rollouts: RayRollouts, engines: list[Member]) -> dict[str, int]:
    """Turns in flight by engine, once every episode in flight is in one of them."""
    async with asyncio.timeout(WAIT_S):
        while True:
            loads = await asyncio.gather(*(rollouts.load_of(engine) for engine in engines))
            turns = {e.name: int(load["num_in_flight"]) for e, load in zip(engines, loads, strict=True)}
            if sum(turns.values()) == (await rollouts.stats())["rollout/episodes_in_flight"]:
                return turns


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.1)


def reserved() -> set[str]:
    """Engines that have a placement group."""
    groups = [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"]
    return {own for own in (name.rpartition(":")[2] for name in groups) if own.startswith("rollout")}


async def drain_its_node(rollouts: RayRollouts, engine: Member) -> None:
    """As the notice of a preemption does it."""
    gone = ["--node-id", engine.node, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
    words = ["--address", ray.get_runtime_context().gcs_address, "--deadline-remaining-seconds", "600", *gone]
    await asyncio.to_thread(
        subprocess.run,
        [Path(sys.executable).with_name("ray"), "drain-node", *words],
        check=True,
        timeout=WAIT_S,
        capture_output=True,
    )
    async with asyncio.timeout(WAIT_S):  # it refuses turns only after all workers have heard of it
        while (await answer(engine.handle.status.remote(), "status", WAIT_S)).state != "draining":
            await asyncio.sleep(0.1)


def test_a_drain_fills_one_prompt_anew_for_an_episode_in_flight_and_asks_no_turn_again(config, tmp_path):
    with connected(config, "drain"):
        step = lose_in_the_middle(config, RunFolder.create(tmp_path, "drain"), drain_its_node)
        turns, stats = asyncio.run(step)
    assert 0 < stats["rollout/num_reprefills"] <= turns < NUM_TASKS * GROUP_SIZE
    assert stats["rollout/turns_asked_again"] == stats["rollout/episodes_resampled"] == 0
    assert (stats["rollout/engines_left"], stats["rollout/engines_joined"]) == (1, 1)
    assert stats["rollout/engine_restarts"] == 0


def test_a_node_s_death_costs_each_of_its_episodes_one_turn(config, cluster, tmp_path):
    async def kill_its_node(rollouts: RayRollouts, engine: Member) -> None:
        dead = engine.handle
        (node,) = (node for node in cluster.list_all_nodes() if node.node_id == engine.node)
        await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
        await until(lambda: engine.handle is not dead)

    with connected(config, "death"):
        step = lose_in_the_middle(config, RunFolder.create(tmp_path, "death"), kill_its_node)
        turns, stats = asyncio.run(step)
    assert stats["rollout/turns_asked_again"] == stats["rollout/num_reprefills"] == turns > 0
    assert stats["rollout/engine_restarts"] >= 1  # Ray may start it once more on the node that has just died
    assert stats["rollout/episodes_resampled"] == 0
