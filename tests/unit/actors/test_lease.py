"""Engines and policy on the same GPUs: never both, and nobody waits for his own side."""

from __future__ import annotations

import asyncio

import pytest

from mempo_ray.actors.lease import Lease, Side, SideBySide, Turns
from mempo_ray.errors import EngineFailed


class Gpus:
    """Writes down what happens to them."""

    def __init__(self) -> None:
        self.log: list[str] = []

    async def pause(self) -> None:
        self.log.append("pause")

    async def resume(self) -> None:
        self.log.append("resume")


class Worker:
    """Holds the GPUs from `await begin()` until `await end()`."""

    def __init__(self, turns: Turns, side: Side, log: list[str], name: str) -> None:
        self._holding, self._done = asyncio.Event(), asyncio.Event()
        self._task = asyncio.create_task(self._work(turns, side, log, name))

    async def _work(self, turns: Turns, side: Side, log: list[str], name: str) -> None:
        async with turns.held_by(side):
            log.append(name)
            self._holding.set()
            await self._done.wait()

    async def begin(self) -> None:
        await self._holding.wait()

    async def end(self) -> None:
        self._done.set()
        await self._task


async def test_the_policy_waits_for_the_last_turn_and_the_engines_give_way_first():
    gpus = Gpus()
    lease = Lease(gpus.pause, gpus.resume)
    turns = [Worker(lease, "engines", gpus.log, f"turn {i}") for i in range(2)]
    for turn in turns:
        await turn.begin()
    command = Worker(lease, "policy", gpus.log, "command")
    await turns[0].end()
    assert gpus.log == ["turn 0", "turn 1"]
    await turns[1].end()
    await command.begin()
    assert gpus.log[2:] == ["pause", "command"]

    sync = Worker(lease, "engines", gpus.log, "sync")
    await command.end()
    await sync.begin()
    assert gpus.log[4:] == ["resume", "sync"]
    await sync.end()


async def test_log_probs_share_the_policys_turn():
    gpus = Gpus()
    lease = Lease(gpus.pause, gpus.resume)
    requests = [Worker(lease, "policy", gpus.log, "log-probs") for _ in range(3)]
    for request in requests:
        await request.begin()
    assert gpus.log == ["pause", *["log-probs"] * 3]
    for request in requests:
        await request.end()


async def test_a_hand_over_that_fails_leaves_the_gpus_where_they_were():
    gpus = Gpus()

    async def refuse() -> None:
        raise EngineFailed("cannot sleep")

    lease = Lease(refuse, gpus.resume)
    with pytest.raises(EngineFailed, match="cannot sleep"):
        async with lease.held_by("policy"):
            raise AssertionError("the policy must not run")
    async with lease.held_by("engines"):
        assert gpus.log == []


async def test_a_failing_holder_gives_the_gpus_back():
    gpus = Gpus()
    lease = Lease(gpus.pause, gpus.resume)
    with pytest.raises(KeyError):
        async with lease.held_by("engines"):
            raise KeyError
    async with lease.held_by("policy"):
        assert gpus.log == ["pause"]


async def test_side_by_side_nobody_waits():
    log: list[str] = []
    both = [Worker(SideBySide(), side, log, side) for side in ("engines", "policy")]
    for worker in both:
        await worker.begin()
    assert sorted(log) == ["engines", "policy"]
    for worker in both:
        await worker.end()
