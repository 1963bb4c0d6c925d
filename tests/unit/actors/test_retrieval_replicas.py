"""Retrieval replicas as members of a pool, in process: when they are searched, how they leave, what a death does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from mempo_ray.actors import retrieval_replicas
from mempo_ray.actors.retrieval_replicas import RetrievalReplicas
from mempo_ray.actors.rollout_pool import WaitingShare
from mempo_ray.config.load import load_file
from mempo_ray.errors import ToolFailed, WorkerFailed
from tests.fakes.handle import FakeHandle, is_dead, replace_ray

DEADLINE_S = 10

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch):
    replace_ray(monkeypatch)
    monkeypatch.setattr(retrieval_replicas, "RETRY_S", 0)


class Actor:
    """Answers its first `ping` when `loaded` is set, or fails it; `in_flight` is over when the test says so."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.told, self.pings = fails, [], 0
        self.loaded, self.idle, self.died = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.loaded.set()
        self.handle = FakeHandle(self)

    async def ping(self) -> str:
        self.pings += 1
        await self.loaded.wait()
        if self.fails:
            raise ToolFailed("no index on this node")
        return "n0"

    async def watch(self) -> None:
        await self.died.wait()
        self.died.clear()

    async def drain(self) -> None:
        self.told.append("drain")
        await self.idle.wait()

    async def close(self) -> None:
        self.told.append("close")

    async def stats(self) -> dict[str, float]:
        return {"num_in_flight": 0}


class Pool:
    """Actors in the order in which they are asked for; `heard` is what those who search were told."""

    def __init__(self, *actors: Actor, search_s: float = DEADLINE_S, **retrieval: object) -> None:
        words = {"agent.limits.search_s": search_s} | {f"retrieval.{key}": value for key, value in retrieval.items()}
        self.config = load_file(None, [f"{key}={value}" for key, value in words.items()])
        self.actors, self.made = list(actors), 0
        self.heard: list[Mapping[str, object]] = []
        self.freed: list[int] = []
        self.failures: list[BaseException] = []
        self.unreachable: Exception | None = None
        self.replicas = RetrievalReplicas(
            self.config, self._make, self._tell, self.freed.append, WaitingShare(), self.failures.append
        )

    def _make(self, index: int) -> FakeHandle:
        self.made += 1
        return self.actors[self.made - 1].handle

    async def _tell(self, serving: Mapping[str, object]) -> None:
        if self.unreachable is not None:
            raise self.unreachable
        self.heard.append(dict(serving))

    def counts(self) -> tuple[float, ...]:
        stats = self.replicas.stats()
        names = ("num_serving", "num_joining", "replicas_joined", "replicas_left", "joins_failed")
        return tuple(stats[f"retrieval/{name}"] for name in names)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0)


async def test_all_replicas_of_the_start_are_announced_at_once_when_each_has_answered():
    first, slow = Actor(), Actor()
    slow.loaded.clear()
    pool = Pool(first, slow, replicas=2)
    starting = asyncio.create_task(pool.replicas.start())
    await until(lambda: slow.pings > 0)
    assert pool.heard == []
    slow.loaded.set()
    await starting
    assert pool.heard == [{"retrieval-0": first.handle, "retrieval-1": slow.handle}]
    await pool.replicas.close()


async def test_one_that_fails_at_the_start_ends_the_run():
    pool = Pool(Actor(), Actor(fails=True), replicas=2)
    with pytest.raises(ToolFailed, match="no index"):
        await pool.replicas.start()
    await pool.replicas.close()


async def test_where_no_index_is_needed_there_is_no_replica():
    pool = Pool(mode="replay", record="searches.arrow", max_replicas=2)
    await pool.replicas.start()
    assert (pool.made, pool.heard) == (0, [{}])


async def test_one_that_joins_is_searched_only_after_it_has_answered():
    first, late = Actor(), Actor()
    late.loaded.clear()
    pool = Pool(first, late, max_replicas=2)
    await pool.replicas.start()
    pool.replicas.grow(1)
    await until(lambda: late.pings > 0)
    assert (pool.heard[-1], pool.counts()) == ({"retrieval-0": first.handle}, (1, 1, 0, 0, 0))
    late.loaded.set()
    await until(lambda: len(pool.heard[-1]) == 2)
    assert pool.counts() == (2, 0, 1, 0, 0)
    await pool.replicas.close()


async def test_one_that_leaves_is_announced_away_ends_its_searches_then_itself_and_its_name_is_not_used_again():
    first, second, third = Actor(), Actor(), Actor()
    pool = Pool(first, second, third, replicas=2)
    await pool.replicas.start()
    pool.replicas.retire("retrieval-0", "a test")
    await until(lambda: first.told == ["drain"])
    assert pool.heard[-1] == {"retrieval-1": second.handle}
    assert not is_dead(first.handle)
    first.idle.set()
    await until(lambda: pool.freed == [0])
    assert first.told == ["drain", "close"]
    assert is_dead(first.handle)
    pool.replicas.grow(1)
    await until(lambda: len(pool.heard[-1]) == 2)
    assert pool.heard[-1] == {"retrieval-1": second.handle, "retrieval-2": third.handle}
    assert pool.counts() == (2, 0, 1, 1, 0)
    await pool.replicas.close()


async def test_a_replica_that_never_gets_idle_leaves_at_the_deadline_of_its_searches():
    busy, other = Actor(), Actor()
    pool = Pool(busy, other, search_s=0.05, replicas=2)
    await pool.replicas.start()
    pool.replicas.retire("retrieval-0", "a test")
    await until(lambda: pool.freed == [0])
    assert is_dead(busy.handle)
    await pool.replicas.close()


async def test_one_that_dies_is_not_searched_until_ray_has_started_it_again():
    first, second = Actor(), Actor()
    pool = Pool(first, second, replicas=2, max_replicas=3)
    await pool.replicas.start()
    first.loaded.clear()
    first.died.set()
    await until(lambda: first.pings == 2)
    assert pool.heard[-1] == {"retrieval-1": second.handle}
    first.loaded.set()
    await until(lambda: len(pool.heard[-1]) == 2)
    assert (pool.heard[-1]["retrieval-0"], pool.counts()) == (first.handle, (2, 0, 0, 0, 0))
    await pool.replicas.close()


async def test_one_that_does_not_start_is_counted_and_the_pool_goes_on_without():
    pool = Pool(Actor(), Actor(fails=True), max_replicas=3)
    await pool.replicas.start()
    pool.replicas.grow(1)
    await until(lambda: pool.freed == [1])
    assert pool.counts() == (1, 0, 0, 0, 1)
    await pool.replicas.close()
    assert (pool.made, pool.failures) == (2, [])


async def test_whoever_searches_cannot_be_told_and_that_ends_the_run():
    pool = Pool(Actor(), Actor(), max_replicas=2)
    await pool.replicas.start()
    pool.unreachable = WorkerFailed("agent worker: it does not come back")
    pool.replicas.grow(1)
    await until(lambda: pool.failures)
    assert pool.failures == [pool.unreachable]
    await pool.replicas.close()
