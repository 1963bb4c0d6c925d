"""Engines as members of a pool, in process: what a sync does when they fail, and what the agent workers hear."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from mempo_ray.actors.rollout_pool import RayRollouts
from mempo_ray.config.load import load_file
from mempo_ray.contracts import WeightManifest, WeightProof
from mempo_ray.errors import EngineFailed, TrainingError
from mempo_ray.ports import EngineStatus
from tests.fakes.handle import FakeHandle, is_dead, replace_ray

MANIFEST = WeightManifest(version=5, uri="/weights/5", proof=WeightProof((1, 2), (-1.0,)))
DEADLINE_S = 10

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch):
    replace_ray(monkeypatch)


class Engine:
    """`update` does what `behaviour` says: a gap, an error, or "dies"; it waits for `gate` first."""

    def __init__(self, behaviour: float | Exception | str = 0.0, node: str = "") -> None:
        self.node, self.num_in_flight, self.told = node, 0, []
        self.behaviour, self.gate, self.manifests = behaviour, asyncio.Event(), []
        self.gate.set()
        self.handle = FakeHandle(self)

    async def start(self, manifest: WeightManifest | None) -> EngineStatus:
        if self.behaviour == "never starts":
            await asyncio.Event().wait()
        if self.behaviour == "does not start":
            raise EngineFailed("no memory")
        return EngineStatus("", "stale", -1, node=self.node)

    async def update(self, manifest: WeightManifest) -> float:
        self.manifests.append(manifest)
        await self.gate.wait()
        if self.behaviour == "dies":
            self.handle._death.set()
            await asyncio.Event().wait()
        if isinstance(self.behaviour, Exception):
            raise self.behaviour
        return self.behaviour

    async def drain(self) -> None:
        self.told.append("drain")

    async def close(self) -> None:
        self.told.append("close")

    async def stats(self) -> dict[str, float]:
        return {"num_in_flight": self.num_in_flight}

    async def sees(self, folder: str) -> bool:
        return True

    async def watch(self) -> None:
        await asyncio.Event().wait()


class Worker:
    """Writes down which engines it was told of. `gate` holds its first call."""

    def __init__(self) -> None:
        self.heard: list[dict[str, object]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def set_retrieval(self, replicas: Mapping[str, object]) -> None:
        held, self.gate = self.gate, asyncio.Event()
        self.gate.set()
        await held.wait()

    async def set_engines(self, engines: Mapping[str, object]) -> None:
        self.heard.append(dict(engines))

    async def turns_waiting(self) -> int:
        return 0


class Pool:
    """Lives of engines in the order in which they are made."""

    def __init__(self, *lives: Engine, replicas: int = 1, **rollout: object) -> None:
        rollout = {"replicas": replicas, "max_replicas": replicas} | rollout
        self.config = load_file(None, [f"rollout.{key}={value}" for key, value in rollout.items()])
        self._lives = list(lives)
        self.worker, self.made, self.freed = Worker(), asyncio.Semaphore(0), []
        self.rollouts = RayRollouts(self.config, self._make, [FakeHandle(self.worker)], self.freed.append)

    def _make(self, index: int) -> FakeHandle:
        self.made.release()
        return self._lives.pop(0).handle

    async def sync(self):
        self.rollouts.start()
        return await asyncio.wait_for(self.rollouts.sync(MANIFEST), DEADLINE_S)

    async def restarted(self) -> None:
        """The pool has dealt with a death."""
        await asyncio.wait(self.rollouts._watchers, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)


async def test_the_only_engine_dies_in_an_update_and_the_sync_waits_for_its_successor():
    old, new = Engine("dies"), Engine(2e-6)
    pool = Pool(old, new)
    report = await pool.sync()
    assert (report.version, report.num_engines, report.max_gap) == (5, 1, 2e-6)
    assert new.manifests == [MANIFEST]
    assert pool.worker.heard[-1] == {"rollout-0": new.handle}
    (status,) = pool.rollouts.engines()
    assert (status.state, status.weight_version, status.num_restarts) == ("serving", 5, 1)


async def test_with_enough_others_nobody_waits_for_the_successor():
    pool = Pool(Engine(), Engine("dies"), Engine("never starts"), replicas=2)
    assert (await pool.sync()).num_engines == 1


async def test_a_sync_waits_for_as_many_engines_as_the_pool_must_have():
    pool = Pool(Engine(), Engine("dies"), Engine(), replicas=2, min_replicas=2)
    assert (await pool.sync()).num_engines == 2


async def test_too_few_engines_for_too_long_end_the_run_and_say_so():
    pool = Pool(Engine("dies"), Engine("never starts"), startup_timeout_s=0.05)
    message = r"fewer than 1 engines \(rollout.min_replicas\) serve weights 5 .*startup_timeout_s=0.05"
    with pytest.raises(EngineFailed, match=message):
        await pool.sync()


async def test_too_many_restarts_end_the_sync_at_once():
    pool = Pool(*(Engine("dies") for _ in range(3)), max_restarts=2)
    with pytest.raises(EngineFailed, match=r"rollout\.max_restarts=2"):
        await pool.sync()


async def test_an_engine_without_the_policys_weights_ends_the_run_where_no_other_is_left():
    with pytest.raises(TrainingError, match="other weights"):
        await Pool(Engine(TrainingError("other weights"))).sync()


async def test_a_successor_that_does_not_prove_its_weights_is_replaced_as_well():
    first, wrong, right = Engine(), Engine(TrainingError("other weights")), Engine()
    pool = Pool(first, wrong, right)
    await pool.sync()
    first.handle._death.set()
    await pool.restarted()
    (status,) = pool.rollouts.engines()
    assert (status.state, status.num_restarts) == ("serving", 2)
    assert is_dead(wrong.handle)
    assert pool.worker.heard[-1] == {"rollout-0": right.handle}


async def test_a_successor_made_during_a_sync_is_neither_killed_nor_taken_for_the_engine_that_died():
    dying, slow, successor = Engine("dies"), Engine(), Engine()
    slow.gate.clear()
    pool = Pool(dying, slow, successor, replicas=2, min_replicas=2)
    syncing = asyncio.create_task(pool.sync())
    for _ in range(3):
        await asyncio.wait_for(pool.made.acquire(), DEADLINE_S)
    slow.gate.set()
    assert (await syncing).num_engines == 2
    assert not is_dead(successor.handle)
    assert successor.manifests == [MANIFEST]
    assert [engine.num_restarts for engine in pool.rollouts.engines()] == [1, 0]


async def test_what_an_agent_worker_hears_last_is_what_is_true_last():
    pool = Pool(Engine())
    await pool.sync()
    held = pool.worker.gate = asyncio.Event()
    early = asyncio.create_task(pool.rollouts.connect_retrieval({}))
    await asyncio.sleep(0)
    draining = asyncio.create_task(pool.rollouts.drain("rollout-0"))
    while pool.rollouts.engines()[0].state != "draining":
        await asyncio.sleep(0)
    held.set()
    await asyncio.gather(early, draining)
    assert pool.worker.heard[-1] == {}


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0)


async def test_an_engine_that_fails_its_very_first_start_is_replaced():
    dead, new = Engine("does not start"), Engine()
    pool = Pool(dead, new)
    assert (await pool.sync()).num_engines == 1
    assert is_dead(dead.handle)
    (status,) = pool.rollouts.engines()
    assert (status.state, status.num_restarts) == ("serving", 1)


async def test_an_engine_that_is_asked_for_later_pulls_and_proves_the_present_weights_before_it_serves():
    first, late = Engine(), Engine()
    late.gate.clear()
    pool = Pool(first, late, max_replicas=2)
    await pool.sync()
    pool.rollouts.grow(1)
    await until(lambda: late.manifests)
    assert late.manifests == [MANIFEST]
    assert pool.worker.heard[-1] == {"rollout-0": first.handle}
    late.gate.set()
    await until(lambda: len(pool.worker.heard[-1]) == 2)
    assert [status.weight_version for status in pool.rollouts.engines()] == [5, 5]
    assert pool.rollouts.counters.engines_joined == 1


async def test_an_engine_that_leaves_is_announced_away_first_then_drained_then_closed_and_its_place_is_free():
    first, second = Engine(), Engine()
    pool = Pool(first, second, replicas=2)
    await pool.sync()
    pool.rollouts.retire("rollout-0", "a test")
    await until(lambda: pool.freed)
    assert (first.told, pool.freed) == (["drain", "close"], [0])
    assert pool.worker.heard[-1] == {"rollout-1": second.handle}
    assert is_dead(first.handle)
    assert [status.name for status in pool.rollouts.engines()] == ["rollout-1"]
    assert pool.rollouts.counters.engines_left == 1
    for _ in range(50):
        await asyncio.sleep(0)
    assert [status.name for status in pool.rollouts.engines()] == ["rollout-1"]
    assert pool.rollouts.counters.engine_restarts == 0  # its end is no death


async def test_an_elastic_pool_goes_on_without_an_engine_that_does_not_start():
    pool = Pool(Engine(), Engine("does not start"), max_replicas=3)
    await pool.sync()
    pool.rollouts.grow(1)
    await until(lambda: pool.freed)
    assert (pool.rollouts.counters.joins_failed, pool.rollouts.counters.engine_restarts) == (1, 0)
    assert [status.name for status in pool.rollouts.engines()] == ["rollout-0"]


async def test_an_engine_that_failed_a_push_is_replaced_and_the_others_pull():
    failing, other, successor = Engine(), Engine(), Engine()
    pool = Pool(failing, other, successor, replicas=2, min_replicas=2)

    async def push(engines: Mapping[str, object]) -> Mapping[str, str]:
        assert engines == {"rollout-0/0": failing.handle, "rollout-1/0": other.handle}
        return {"rollout-0/0": "weight push, update: the actor died"}

    pool.rollouts.push = push
    assert (await pool.sync()).num_engines == 2
    assert is_dead(failing.handle)
    assert (failing.manifests, other.manifests, successor.manifests) == ([], [MANIFEST], [MANIFEST])
