import asyncio

import pytest

from mempo_ray.actors.search_shared import SharedSearch
from mempo_ray.contracts import Passage
from mempo_ray.errors import ToolFailed
from tests.fakes.search import FakeSearch

FOUND = [Passage("p1", "", "mentor Boko Sari .")]


class HeldSearch(FakeSearch):
    """Answers when it is let go."""

    def __init__(self, **how):
        super().__init__(default=FOUND, **how)
        self.go = asyncio.Event()

    async def __call__(self, queries, top_k):
        self.queries.extend(queries)
        await self.go.wait()
        found = await super().__call__(queries, top_k)
        del self.queries[-len(queries) :]
        return found


async def ask(search, *queries, top_k=1):
    task = asyncio.create_task(search(list(queries), top_k))
    await asyncio.sleep(0)
    return task


async def test_equal_queries_are_asked_once_side_by_side_and_later():
    held = HeldSearch()
    search = SharedSearch(held)
    siblings = [await ask(search, "mentor Boko") for _ in range(16)]
    mixed = await ask(search, "boss Sari", "mentor Boko", "boss Sari")
    held.go.set()
    assert await asyncio.gather(*siblings) == [[FOUND]] * 16
    assert await mixed == [FOUND] * 3
    assert await search(["boss Sari"], 1) == [FOUND]
    assert held.queries == ["mentor Boko", "boss Sari"]
    assert (search.num_queries, search.num_repeated) == (20, 18)
    await search(["boss Sari"], 2)
    assert held.queries[2:] == ["boss Sari"], "another k is another search"


async def test_a_failure_is_shared_by_those_who_waited_and_by_nobody_after():
    held = HeldSearch(num_failures=1)
    search = SharedSearch(held)
    waiting = [await ask(search, "q") for _ in range(2)]
    held.go.set()
    failures = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(failure) for failure in failures] == [ToolFailed] * 2
    assert await search(["q"], 1) == [FOUND]


async def test_a_caller_that_leaves_takes_nothing_from_the_others():
    held = HeldSearch()
    search = SharedSearch(held)
    leaves, stays = await ask(search, "q"), await ask(search, "q")
    leaves.cancel()
    held.go.set()
    assert await stays == [FOUND]
    with pytest.raises(asyncio.CancelledError):
        await leaves


async def test_what_was_used_longest_ago_is_forgotten():
    fake = FakeSearch(default=FOUND)
    search = SharedSearch(fake, max_kept=2)
    for query in ("a", "b", "a", "c", "a", "b"):
        await search([query], 1)
    assert fake.queries == ["a", "b", "c", "b"]
    await search(["d", "e", "f", "d"], 1)
    assert fake.queries[4:] == ["d", "e", "f"], "a call larger than what is kept is answered all the same"


async def test_what_one_caller_does_with_its_list_is_its_own_affair():
    search = SharedSearch(FakeSearch(default=FOUND))
    (mine,) = await search(["q"], 1)
    mine.clear()
    assert await search(["q"], 1) == [FOUND]
