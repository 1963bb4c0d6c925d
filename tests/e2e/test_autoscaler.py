"""An elastic pool on a cluster that really grows: GCS, raylets and autoscaler are Ray's own, nodes are processes.

The pool goes from 1 to 3 engines under load, loses a node in the middle of the step, gets another, and shrinks when it
is idle. The engines are scripted there, since load is what counts; one join is shown with real vLLM.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray

from mempo_ray.actors.agent_loop import RemoteAgentLoopWorker
from mempo_ray.actors.calls import answer
from mempo_ray.actors.cluster import connected
from mempo_ray.actors.fleet import open_fleet
from mempo_ray.actors.rollout import RemoteRolloutActor
from mempo_ray.actors.rollout_pool import RayRollouts
from mempo_ray.agent.group import siblings
from mempo_ray.config.load import load_file
from mempo_ray.config.models import model_folder
from mempo_ray.data.tasks import read_tasks
from mempo_ray.data.world import same_atlas
from mempo_ray.generation.engine import unproven
from mempo_ray.observability.run_folder import RunFolder
from mempo_ray.placement.plan import make_plan
from mempo_ray.placement.ray_state import largest_shape
from mempo_ray.ports import GenerateRequest
from tests.fakes.autoscaling import AutoscalingCluster, autoscaling_cluster
from tests.fakes.driver_run import adopted_orphans
from tests.fakes.tiny_model import END_OF_TURN_ID, VOCAB_SIZE, manifest, save_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

IDLE_S = 6
VERSION = 7
NUM_TASKS, GROUP_SIZE = 48, 8
WAIT_S = 150
LOAD = [
    "rollout.engine=fake",
    "rollout.fake_turn_s=0.5",
    "rollout.max_num_seqs=4",
    "rollout.max_replicas=3",
    "rollout.scaling.up_wait_s=2",
    f"rollout.scaling.down_idle_s={IDLE_S}",
    "rollout.scaling.cooldown_s=2",
    "rollout.request_timeout_s=600",  # a busy machine is no failure
    "agent.limits.episode_s=600",
    "agent.limits.search_s=60",
    "placement.layout=disaggregated",  # an engine wants a GPU, which only added nodes have; GPUs are Ray's to count
    "policy.device=cuda",
    "placement.num_cpus=2",  # of which the engine has one half, all that an added node has
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AutoscalingCluster]:
    node = {"CPU": 1, "GPU": 1, "object_store_memory": 80_000_000}
    folder = tmp_path_factory.mktemp("cluster")
    with (
        adopted_orphans(),
        autoscaling_cluster(folder, node=node, max_nodes=3, idle_s=IDLE_S, head_cpus=2) as cluster,
    ):
        yield cluster


class Stopwatch:
    """Seconds between one event and the next, printed as they pass."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._since = say, time.monotonic()

    def lap(self, what: str) -> None:
        now = time.monotonic()
        self._say(f"{what}: {now - self._since:.1f} s")
        self._since = now


@pytest.fixture
def stopwatch(capsys: pytest.CaptureFixture) -> Stopwatch:
    def say(text: str) -> None:
        with capsys.disabled():
            print(f"\n[autoscaler] {text}", end="", flush=True)

    return Stopwatch(say)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.1)


def serving(rollouts: RayRollouts) -> dict[str, str]:
    """Engines that serve → their nodes."""
    return {engine.name: engine.node for engine in rollouts.engines() if engine.state == "serving"}


def num_nodes() -> int:
    return sum(node["Alive"] for node in ray.nodes()) - 1  # without the head


def test_a_pool_grows_on_load_survives_a_node_and_shrinks_when_idle(cluster, tmp_path, stopwatch):
    config = load_file(None, [*LOAD, f"placement.address={cluster.address}"])
    with connected(config, "autoscaler"):
        asyncio.run(a_step(config, RunFolder.create(tmp_path, "autoscaler"), cluster, stopwatch))


async def a_step(config, folder: RunFolder, cluster: AutoscalingCluster, stopwatch: Stopwatch) -> None:
    model_dir = model_folder(config.policy.model)
    passages = same_atlas(config.data.train, config.data.eval).passages()
    plan = make_plan(config, largest_shape(), with_policy=False)
    async with open_fleet(config, plan, model_dir, folder, passages, with_policy=False) as fleet:
        rollouts = fleet.rollouts
        await rollouts.sync(unproven(str(model_dir), VERSION))
        assert len(serving(rollouts)) == num_nodes() == 1
        stopwatch.lap("the first node and its engine")

        tasks = read_tasks(config.data.train)[:NUM_TASKS]
        requests = [request for task in tasks for request in siblings(task, GROUP_SIZE, run_seed=0)]
        ended: list = []

        async def run() -> None:
            async for finished in rollouts.run(requests):
                ended.append(finished.summary)

        step = asyncio.create_task(run())
        await until(lambda: len(serving(rollouts)) == 3 or step.done())
        stopwatch.lap("from 1 to 3 engines under load")
        assert not step.done()
        assert len(set(serving(rollouts).values())) == 3, "a node each"  # the autoscaler may have added one too many

        tokens = {}
        while min(tokens.values(), default=0) < 200:  # each has its share of the tasks
            loads = [await rollouts.load_of(member) for member in rollouts.members]
            tokens = {m.name: load["output_tokens"] for m, load in zip(rollouts.members, loads, strict=True)}
        stopwatch.lap(f"tasks spread over them, output tokens by engine {tokens}")

        victim, node = list(serving(rollouts).items())[-1]
        in_flight = len(requests) - len(ended)
        assert in_flight > 0
        cluster.raylets()[node].kill()
        await until(lambda: victim not in serving(rollouts))
        stopwatch.lap("loss of a node noticed")
        await until(lambda: len(serving(rollouts)) == 3)
        stopwatch.lap("a replacement serves")
        assert node not in serving(rollouts).values()
        assert {engine.weight_version for engine in rollouts.engines()} == {VERSION}

        await asyncio.wait_for(step, WAIT_S)
        stopwatch.lap("the rest of the step")
        keys = Counter((summary.task_id, summary.sibling) for summary in ended)
        assert keys == Counter((r.task.task_id, r.sibling) for r in requests)
        assert not any(summary.end_reason.is_infrastructure for summary in ended)
        assert {version for summary in ended for version in summary.weight_versions_S} == {VERSION}
        stats = await rollouts.stats()
        assert stats["rollout/episodes_resampled"] == 0
        assert 0 < stats["rollout/turns_asked_again"] <= in_flight
        assert stats["rollout/num_reprefills"] <= in_flight
        assert (stats["rollout/engines_joined"], stats["rollout/engine_restarts"]) == (2, 1)

        await until(lambda: len(rollouts.engines()) == 1)
        stopwatch.lap("shrunk to one engine")
        await until(lambda: num_nodes() == 1)
        stopwatch.lap("and to one node")


VLLM = [
    "rollout.dtype=float32",
    "rollout.max_model_len=1024",
    "rollout.max_num_seqs=8",
    "rollout.kv_cache_gb=0.1",
    "rollout.max_replicas=2",
]


def test_a_vllm_engine_joins_on_a_new_node_with_the_present_weights(cluster, tmp_path, stopwatch):
    weights = manifest(save_tiny_model(tmp_path, seed=0), tmp_path, version=VERSION)
    config = load_file(None, [*VLLM, f"placement.address={cluster.address}"])
    with connected(config, "vllm-join"):
        asyncio.run(a_join(config, weights, tmp_path, stopwatch))


async def a_join(config, weights, folder: Path, stopwatch: Stopwatch) -> None:
    def make(index: int):
        arguments = (weights.uri, config.rollout, config.weight_sync, END_OF_TURN_ID, str(folder))
        return RemoteRolloutActor.options(num_cpus=0, num_gpus=1).remote(f"rollout-{index}", *arguments)

    model = str(model_folder(config.policy.model))
    head = {"node:__internal_head__": 0.01}  # an added node may go while it is idle, and the worker with it
    worker = RemoteAgentLoopWorker.options(num_cpus=0, resources=head).remote(0, config.agent, config.rollout, model)
    rollouts = RayRollouts(config, make, [worker])
    rollouts.start()
    await rollouts.sync(weights)
    stopwatch.lap("vLLM: the first node and its engine")
    rollouts.grow(1)
    await until(lambda: len(serving(rollouts)) == 2)
    stopwatch.lap("vLLM: another node, and an engine that has pulled and proven the weights")
    joined = rollouts.members[-1]
    assert (joined.weight_version, len(set(serving(rollouts).values()))) == (VERSION, 2)
    assert joined.gap < 1e-4
    prompt = np.random.default_rng(0).integers(2, VOCAB_SIZE, 30).astype(np.int32)
    turn = await answer(joined.handle.generate.remote(GenerateRequest(prompt, 0, 8, group="q")), "a turn", WAIT_S)
    assert turn.weight_version == VERSION
    await rollouts.close()


def test_nothing_is_left_behind(cluster):
    """Last: what the cluster started is its own, found by its folder, and goes with it."""
    folder = cluster.folder
    cluster.close()
    left = [p for p in psutil.process_iter(["cmdline"]) if any(folder in word for word in p.info["cmdline"] or ())]
    assert [p for p in left if p.status() != psutil.STATUS_ZOMBIE] == []
