"""Searches that travel together, each with an outcome of its own."""

import asyncio

import pytest

from mempo_ray.actors.outbox import Outbox
from mempo_ray.contracts import Passage
from mempo_ray.errors import Overloaded, ToolFailed


class Replica:
    """Finds for each query the query itself. Refuses the query "full"; answers when it may."""

    def __init__(self):
        self.messages = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, searches):
        self.messages.append([queries for queries, _ in searches])
        await self.may_answer.wait()
        return [
            Overloaded("no room") if queries == ["full"] else [[Passage(query, "", query)] * top_k for query in queries]
            for queries, top_k in searches
        ]


async def test_what_is_asked_together_travels_together_in_messages_of_a_bounded_size():
    replica = Replica()
    outbox = Outbox(replica, most=2)
    found = await asyncio.gather(outbox(["a"], 1), outbox(["b", "c"], 2), outbox(["d"], 1))
    assert replica.messages == [[["a"], ["b", "c"]], [["d"]]]
    assert [[[passage.id for passage in passages] for passages in search] for search in found] == [
        [["a"]],
        [["b", "b"], ["c", "c"]],
        [["d"]],
    ]


async def test_a_search_does_not_wait_for_the_message_before_it():
    replica = Replica()
    replica.may_answer.clear()
    outbox = Outbox(replica)
    first = asyncio.create_task(outbox(["a"], 1))
    await asyncio.sleep(0.01)
    second = asyncio.create_task(outbox(["b"], 1))
    while len(replica.messages) < 2:
        await asyncio.sleep(0)
    replica.may_answer.set()
    await asyncio.gather(first, second)


async def test_a_failure_is_that_of_its_own_search():
    outbox = Outbox(Replica())
    found = await asyncio.gather(outbox(["a"], 1), outbox(["full"], 1), return_exceptions=True)
    assert found[0][0][0].id == "a"
    assert isinstance(found[1], Overloaded)


async def test_a_lost_message_fails_each_of_its_searches():
    async def lost(searches):
        raise ToolFailed("the actor died")

    outbox = Outbox(lost)
    for failure in await asyncio.gather(outbox(["a"], 1), outbox(["b"], 1), return_exceptions=True):
        assert isinstance(failure, ToolFailed)


async def test_a_caller_that_leaves_takes_nothing_from_the_others():
    replica = Replica()
    replica.may_answer.clear()
    outbox = Outbox(replica)
    leaver, stayer = (asyncio.create_task(outbox([query], 1)) for query in "ab")
    while not replica.messages:
        await asyncio.sleep(0)
    leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    replica.may_answer.set()
    assert (await stayer)[0][0].id == "b"
