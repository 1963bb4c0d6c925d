"""What callers of the executor see when a rank, the executor or another caller is lost while scores are pending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import ray
from ray.actor import ActorHandle

from mempo_ray.actors.batch_executor import BatchExecutorActor, GangRunner
from mempo_ray.actors.calls import answer
from mempo_ray.config.schema import BatchExecutor as Section
from mempo_ray.contracts import CommandReply, LogProbRequest, LogProbResult, ScoreCommand, Segment
from mempo_ray.errors import DeadlineExceeded, GangLost

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

NUM_TOKENS = 10  # of each request; a micro-batch holds one


@ray.remote(num_cpus=0.1, max_concurrency=2)
class StubRank:
    """Answers each request with its version. Request "hold" waits for `release`."""

    def __init__(self) -> None:
        self._is_held, self._go_on = threading.Event(), threading.Event()

    def run(self, sequence: int, command: ScoreCommand) -> CommandReply:
        names = [request.id for request in command.requests]
        if "hold" in names:
            self._is_held.set()
            self._go_on.wait()
        return CommandReply(sequence, 5, [LogProbResult(name, 5, (np.zeros(1, np.float32),)) for name in names])

    def wait_until_held(self) -> None:
        self._is_held.wait()

    def release(self) -> None:
        self._go_on.set()


@ray.remote(num_cpus=0.1)
class Caller:
    """Another process with requests in the queue."""

    def submit(self, executor: ActorHandle, names: list[str], deadline_s: float) -> None:
        self._calls = [executor.logprobs.remote(request(name, deadline_s)) for name in names]


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
    yield
    ray.shutdown()


def make(ranks: list[ActorHandle]) -> ActorHandle:
    section = Section(micro_batch_tokens=NUM_TOKENS)
    return BatchExecutorActor.options(num_cpus=0.1).remote(section, GangRunner(ranks, command_timeout_s=60.0))


@pytest.fixture
def ranks() -> Iterator[list[ActorHandle]]:
    handles = [StubRank.remote() for _ in range(2)]
    yield handles
    for handle in handles:
        ray.kill(handle)


@pytest.fixture
def executor(ranks) -> Iterator[ActorHandle]:
    actor = make(ranks)
    yield actor
    ray.kill(actor)


def request(name: str, deadline_s: float = 60.0) -> LogProbRequest:
    return LogProbRequest(name, (Segment(-1, tuple(range(NUM_TOKENS)), NUM_TOKENS, (0, 1)),), deadline_s=deadline_s)


async def ask(executor: ActorHandle, name: str, deadline_s: float = 60.0) -> LogProbResult:
    """As RayPolicy does."""
    return await answer(executor.logprobs.remote(request(name, deadline_s)), name, deadline_s + 10, GangLost)


async def hold(executor: ActorHandle, ranks: list[ActorHandle]) -> asyncio.Task:
    """Both ranks are busy from here on."""
    held = asyncio.create_task(asyncio.wait_for(all_of(ask(executor, "hold"), ask(executor, "hold")), 60))
    for rank in ranks:
        await answer(rank.wait_until_held.remote(), "held", 60)
    return held


async def all_of(*calls) -> list:
    return await asyncio.gather(*calls, return_exceptions=True)


async def queued(executor: ActorHandle) -> float:
    return (await answer(executor.stats.remote(), "stats", 10))["executor/num_queued"]


async def until_queued(executor: ActorHandle, number: int) -> None:
    async with asyncio.timeout(30):
        while await queued(executor) != number:  # each turn waits for the actor
            pass


async def test_the_death_of_a_rank_that_scores_is_a_lost_gang_for_each_pending_caller(executor, ranks):
    held = await hold(executor, ranks)
    pending = [asyncio.create_task(ask(executor, name)) for name in "abc"]
    await until_queued(executor, 3)
    ray.kill(ranks[1])  # rank 0 hangs, as in a collective
    assert all(isinstance(a, GangLost) for a in [*await held, *await asyncio.wait_for(all_of(*pending), 30)])
    with pytest.raises(GangLost, match="rank 1"):
        await ask(executor, "later")


async def test_a_caller_has_its_answer_by_its_deadline_even_while_the_ranks_hang(executor, ranks):
    held = await hold(executor, ranks)
    with pytest.raises(DeadlineExceeded, match=r"log-probs of patient had no answer within 0\.5 s"):
        await ask(executor, "patient", deadline_s=0.5)
    for rank in ranks:
        await answer(rank.release.remote(), "release", 10)
    assert {a.id for a in await held} == {"hold"}
    assert (await ask(executor, "next")).version == 5


async def test_the_death_of_the_executor_is_a_lost_gang_for_each_pending_caller_and_a_new_one_serves(executor, ranks):
    held = await hold(executor, ranks)
    pending = [asyncio.create_task(ask(executor, name)) for name in "abc"]
    ray.kill(executor)
    assert all(isinstance(a, GangLost) for a in [*await held, *await asyncio.wait_for(all_of(*pending), 30)])
    successor = make([StubRank.remote() for _ in range(2)])  # as GangHost does: ranks in a collective are of no use
    assert (await ask(successor, "a")).version == 5
    ray.kill(successor)


async def test_the_death_of_a_caller_harms_no_other_and_its_requests_leave_by_their_deadline(executor, ranks):
    held = await hold(executor, ranks)
    caller = Caller.remote()
    await answer(caller.submit.remote(executor, ["x", "y", "z"], 1.0), "submit", 30)
    other = asyncio.create_task(ask(executor, "other"))
    ray.kill(caller)
    with pytest.raises(DeadlineExceeded):  # asked later than x, y and z, so they are past theirs too
        await ask(executor, "clock", deadline_s=1.0)
    assert await queued(executor) == 1
    for rank in ranks:
        await answer(rank.release.remote(), "release", 10)
    assert (await other).id == "other"
    assert len(await held) == 2


async def test_a_cancelled_call_leaves_the_queue(executor, ranks):
    held = await hold(executor, ranks)
    call = executor.logprobs.remote(request("unwanted"))
    other = asyncio.create_task(ask(executor, "other"))
    await until_queued(executor, 2)
    ray.cancel(call)
    await until_queued(executor, 1)
    for rank in ranks:
        await answer(rank.release.remote(), "release", 10)
    assert (await other).id == "other"
    assert len(await held) == 2
