"""Retries, back-off and deadlines around a search."""

import asyncio
import random

import pytest

from mempo_ray.agent.tools import TOOLS, SearchTool
from mempo_ray.agent.tools.search import LONGEST_WAIT_S, wait_s
from mempo_ray.config.schema import Agent, AgentLimits
from mempo_ray.contracts import Passage
from mempo_ray.errors import ConfigError, DeadlineExceeded, ToolFailed
from tests.fakes.search import FakeSearch

PASSAGES = [Passage(str(n), "", "x") for n in range(5)]


class Clock:
    def __init__(self):
        self.now, self.waits = 0.0, []

    def __call__(self):
        return self.now

    async def sleep(self, seconds):
        self.waits.append(seconds)
        self.now += seconds


def tool(search, clock, **limits):
    return SearchTool(search, Agent(limits=AgentLimits(**limits), top_k=3), clock=clock, sleep=clock.sleep)


async def test_at_most_top_k_passages():
    assert await tool(FakeSearch(default=PASSAGES), Clock())("q", 100, 0) == PASSAGES[:3]


async def test_waits_grow_have_jitter_and_are_the_same_for_the_same_seed():
    waits = []
    for _ in range(2):
        clock = Clock()
        await tool(FakeSearch(num_failures=5), clock)("q", 1000, seed=5)
        waits.append(clock.waits)
    assert waits[0] == waits[1]
    assert len(waits[0]) == 5
    assert all(0 <= wait <= min(0.1 * 2**n, LONGEST_WAIT_S) for n, wait in enumerate(waits[0], 1))
    assert wait_s(60, random.Random(0)) <= LONGEST_WAIT_S


async def test_the_episode_s_deadline_ends_the_retries():
    clock = Clock()
    with pytest.raises(DeadlineExceeded, match="the index is away"):
        await tool(FakeSearch(num_failures=99), clock, search_retries=50)("q", 0.01, 0)
    assert clock.now == pytest.approx(0.01)


async def test_a_search_that_never_answers_fails_at_its_own_deadline():
    async def silent(queries, top_k):
        await asyncio.Event().wait()

    with pytest.raises(ToolFailed, match=r"failed 1 times: no answer within 0\.01 s"):
        await tool(silent, Clock(), search_s=0.01, search_retries=0)("q", 100, 0)


def test_tools_are_registered_by_the_name_of_their_tag():
    assert TOOLS.names == ("search",)
    with pytest.raises(ConfigError, match=r"agent\.tools"):
        TOOLS.check("serach")
