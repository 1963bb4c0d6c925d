"""`<search>query</search>` → passages: deadlines, retries and back-off around a `ports.Search`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from time import monotonic

from mempo_ray.config.schema import Agent
from mempo_ray.contracts import Passage
from mempo_ray.errors import DeadlineExceeded, InfrastructureError, ToolFailed
from mempo_ray.ports import Search

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 10.0


class SearchTool:
    """Asks `search` until it answers, at most `limits.search_retries` times again.

    The n-th retry waits a random time up to min(0.1 · 2ⁿ, 10) s: full jitter, so that episodes which a dead index
    failed together do not return together.
    """

    def __init__(
        self,
        search: Search,
        agent: Agent,
        *,
        clock: Callable[[], float] = monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._search, self._agent, self._clock, self._sleep = search, agent, clock, sleep

    async def __call__(self, query: str, deadline: float, seed: int) -> list[Passage]:
        """At most `agent.top_k` passages, best first. `deadline` is a reading of the clock; `seed` draws the jitter.

        Raises:
            ToolFailed: every try failed; the message has the last reason.
            DeadlineExceeded: the deadline is sooner than the next try could be.
        """
        limits, draw = self._agent.limits, random.Random(seed)
        failure: InfrastructureError | TimeoutError | None = None
        for attempt in range(limits.search_retries + 1):
            if attempt:
                await self._sleep(min(wait_s(attempt, draw), max(deadline - self._clock(), 0)))
            remaining_s = deadline - self._clock()
            if remaining_s <= 0:
                raise DeadlineExceeded(f"search {query!r}: the episode's time is up; last failure: {failure}")
            try:
                async with asyncio.timeout(min(limits.search_s, remaining_s)):
                    (passages,) = await self._search([query], self._agent.top_k)
                return passages[: self._agent.top_k]
            except InfrastructureError as error:
                failure = error
            except TimeoutError:
                failure = DeadlineExceeded(f"no answer within {min(limits.search_s, remaining_s):g} s")
        raise ToolFailed(f"search {query!r} failed {limits.search_retries + 1} times: {failure}")


def wait_s(attempt: int, draw: random.Random) -> float:
    """Seconds before retry `attempt` (1, 2, …)."""
    return draw.uniform(0, min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S))
