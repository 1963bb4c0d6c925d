"""Where turns go while engines come, drain and die, and what that costs: fake handles, no Ray."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest

from mempo_ray.actors.agent_loop import EnginePool
from mempo_ray.errors import EngineFailed
from mempo_ray.ports import GenerateRequest, Generation
from tests.fakes.handle import FakeHandle, replace_ray

pytestmark = pytest.mark.timeout(60)

GROUP_SIZE = 4


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch):
    replace_ray(monkeypatch)


class Engine:
    """Holds its turns until it is told to end one, or all; a drained one takes no new turn."""

    def __init__(self) -> None:
        self.turns: list[tuple[str, asyncio.Future]] = []
        self.num_served, self.is_draining = 0, False
        self.handle = FakeHandle(self)

    async def generate(self, request: GenerateRequest) -> Generation:
        if self.is_draining:
            raise EngineFailed("draining")
        ended = asyncio.get_running_loop().create_future()
        self.turns.append((request.group, ended))
        await ended
        self.num_served += 1
        return Generation(np.zeros(1, np.int32), np.zeros(1, np.float32), "stop", 0)

    def end(self, count: int) -> None:
        for _, ended in self.turns[:count]:
            if not ended.cancelled():
                ended.set_result(None)
        del self.turns[:count]

    def die(self) -> None:
        self.turns.clear()
        self.handle._death.set()


class Step:
    """Episodes of so many turns each over a pool, `GROUP_SIZE` a group."""

    def __init__(self, pool: EnginePool, num_episodes: int, num_turns: int) -> None:
        self.turns_by_episode: Counter[int] = Counter()
        self.running = [asyncio.create_task(self._episode(pool, i, num_turns)) for i in range(num_episodes)]

    async def _episode(self, pool: EnginePool, number: int, num_turns: int) -> None:
        generate = pool.for_episode()
        for _ in range(num_turns):
            request = GenerateRequest(np.zeros(10, np.int32), 0, 10, f"q{number // GROUP_SIZE}", deadline_s=30)
            await generate(request)
            self.turns_by_episode[number] += 1

    @property
    def in_flight(self) -> int:
        return sum(not episode.done() for episode in self.running)

    async def finish(self, *engines: Engine) -> None:
        while self.in_flight:
            for engine in engines:
                engine.end(1)
            await settle()
        await asyncio.gather(*self.running)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def pool_of(*engines: Engine, **options: float) -> EnginePool:
    pool = EnginePool(**options)
    pool.announce(announced(*engines))
    return pool


def announced(*engines: Engine) -> dict[str, FakeHandle]:
    return {f"engine-{i}": engine.handle for i, engine in enumerate(engines)}


async def test_a_drain_in_the_middle_of_a_step_fills_at_most_one_prompt_per_episode_again():
    """X8. Turns in flight end where they are; the next ones of those episodes go elsewhere and stay there."""
    leaving, staying = Engine(), Engine()
    pool = pool_of(staying, leaving)
    step = Step(pool, num_episodes=32, num_turns=4)
    await settle()
    at_the_leaving, in_flight = len(leaving.turns), step.in_flight
    assert at_the_leaving > 0
    pool.announce(announced(staying))
    leaving.is_draining = True
    await step.finish(leaving, staying)
    assert set(step.turns_by_episode.values()) == {4}
    assert pool.num_failures == 0
    assert pool.num_reprefills == at_the_leaving <= in_flight
    assert leaving.num_served == at_the_leaving


async def test_the_death_of_an_engine_costs_each_of_its_episodes_one_turn_and_the_others_nothing():
    dying, living = Engine(), Engine()
    pool = pool_of(living, dying)
    step = Step(pool, num_episodes=32, num_turns=4)
    await settle()
    lost = len(dying.turns)
    dying.die()
    await settle()
    pool.announce(announced(living))
    await step.finish(living)
    assert set(step.turns_by_episode.values()) == {4}
    assert (pool.num_failures, pool.num_reprefills) == (lost, lost)
    assert living.num_served == 32 * 4


async def test_an_engine_that_joins_gets_the_turns_that_wait_in_line():
    first, late = Engine(), Engine()
    pool = pool_of(first, most_in_flight=3)
    step = Step(pool, num_episodes=8, num_turns=1)
    await settle()
    assert (len(first.turns), pool.num_waiting) == (3, 5)
    pool.announce(announced(first, late))
    await settle()
    assert (len(first.turns), len(late.turns), pool.num_waiting) == (3, 3, 2)
    await step.finish(first, late)
    assert pool.num_waiting == 0


async def test_an_engine_with_room_again_gets_its_own_groups_first_and_then_the_one_that_waits_longest():
    a, b = Engine(), Engine()
    pool = pool_of(a, b, most_in_flight=1)

    def ask(group: str) -> asyncio.Task:
        return asyncio.create_task(pool(GenerateRequest(np.zeros(10, np.int32), 0, 10, group, deadline_s=30)))

    calls = []
    for group in ("on a", "on b", "on b", "new", "on a"):
        calls.append(ask(group))
        await settle()
    a.end(1)
    await settle()
    assert [group for group, _ in a.turns] == ["on a"]
    a.end(1)
    await settle()
    assert [group for group, _ in a.turns] == ["on b"]
    for _ in range(3):
        a.end(1)
        b.end(1)
        await settle()
    await asyncio.gather(*calls)


async def test_a_request_that_is_given_up_in_line_leaves_its_place_to_the_next():
    engine = Engine()
    pool = pool_of(engine, most_in_flight=1)
    step = Step(pool, num_episodes=3, num_turns=1)
    await settle()
    step.running[1].cancel()
    engine.end(1)
    await settle()
    assert len(engine.turns) == 1
    engine.end(1)
    await asyncio.gather(*step.running, return_exceptions=True)
    assert (engine.num_served, pool.num_waiting) == (2, 0)
