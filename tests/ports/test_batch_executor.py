"""The behaviour of the LogProbs and Policy ports, on the plain BatchExecutor over a fake gang, in fake time.

The first block holds the faults that were measured in another system's executor; each must be impossible here.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempo_ray.actors import batch_queue
from mempo_ray.actors.batch_executor import BatchExecutor, GangRunner
from mempo_ray.config.schema import BatchExecutor as Section
from mempo_ray.contracts import (
    CommandReply,
    EndReason,
    LogProbRequest,
    LogProbResult,
    PayloadRef,
    Ragged,
    Segment,
    SftBatch,
    SftCommand,
    TrainCommand,
    TrainItem,
    TrainPlan,
    TrajectorySummary,
)
from mempo_ray.errors import (
    DataError,
    DeadlineExceeded,
    GangLost,
    Overloaded,
    PayloadLost,
    TrainingError,
    WorkerFailed,
)
from tests.fakes.fake_time import FakeTimeLoop, FakeTimePolicy
from tests.fakes.gang import FakeGang
from tests.fakes.handle import FakeHandle, is_dead, replace_ray
from tests.fakes.solo_gang import SoloGang
from tests.fakes.training import settings

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(scope="module")
def event_loop_policy() -> FakeTimePolicy:
    return FakeTimePolicy()


def request(name: object, tokens: int = 10, **kwargs) -> LogProbRequest:
    return LogProbRequest(f"{name}", (Segment(-1, tuple(range(tokens)), tokens, (0, 1)),), **kwargs)


def executor(gang: FakeGang, **settings) -> BatchExecutor:
    section = Section(**{"micro_batch_tokens": 40, "max_wait_s": 0.001, **settings})
    return BatchExecutor(section, gang, asyncio.get_running_loop().time)


def plan(version: int = 0, num_items: int = 4) -> TrainPlan:
    items = tuple(
        TrainItem(
            PayloadRef(f"p{i}", handle=f"object {i}"),
            TrajectorySummary(
                "q", i, 0, EndReason.ANSWERED, "", True, (10 * (i + 1),), (5,), (0,), (0,), (version,), ()
            ),
            0.5,
            (0.0,),
        )
        for i in range(num_items)
    )
    return TrainPlan(7, version, items, (tuple(range(num_items)),))


async def all_of(*calls) -> list:
    return await asyncio.gather(*calls, return_exceptions=True)


# -- faults of another executor -----------------------------------------------------------------------


def test_64_submitters_that_block_the_6_threads_they_have_are_all_served_in_micro_batches_of_up_to_8():
    loop, gang = asyncio.new_event_loop(), FakeGang()  # a real loop: threads do not wait in fake time
    e = BatchExecutor(Section(micro_batch_tokens=80, max_wait_s=0.001), gang)

    def submit(i: int) -> str:
        return asyncio.run_coroutine_threadsafe(e.logprobs(request(i)), loop).result(timeout=20).id

    with ThreadPoolExecutor(1) as host, ThreadPoolExecutor(6) as threads:
        host.submit(loop.run_forever)
        try:
            assert list(threads.map(submit, range(64))) == [str(i) for i in range(64)]
        finally:
            asyncio.run_coroutine_threadsafe(e.close(), loop).result(timeout=20)
            loop.call_soon_threadsafe(loop.stop)
    loop.close()
    assert max(len(batch) for batch in gang.micro_batches) <= 6  # never the 8 that were waited for elsewhere


async def test_64_submitters_that_each_wait_are_all_served():
    e = executor(FakeGang())

    async def submitter(i: int) -> list[str]:
        return [(await e.logprobs(request(f"{i}-{k}"))).id for k in range(4)]

    assert await all_of(*(submitter(i) for i in range(64))) == [[f"{i}-{k}" for k in range(4)] for i in range(64)]


async def test_5_items_with_room_for_4_are_all_served():
    gang = FakeGang()
    e = executor(gang)
    assert [r.id for r in await all_of(*(e.logprobs(request(i)) for i in range(5)))] == list("01234")
    assert [len(batch) for batch in gang.micro_batches] == [4, 1]


async def test_a_cancelled_request_harms_nobody():
    gang = FakeGang()
    gang.gate.clear()
    e = executor(gang, micro_batch_tokens=10)
    running = asyncio.create_task(e.logprobs(request("running")))
    await gang.started.wait()
    queued, other = (
        asyncio.create_task(e.logprobs(request("queued"))),
        asyncio.create_task(e.logprobs(request("other"))),
    )
    await asyncio.sleep(0)
    running.cancel()
    queued.cancel()
    gang.gate.set()
    assert (await other).id == "other"
    assert ("queued",) not in gang.micro_batches
    assert (await e.stats())["executor/queued_tokens"] == 0


async def test_a_short_list_of_results_leaves_nobody_waiting():
    gang = FakeGang(drop_results=1)
    e = executor(gang)
    answers = await all_of(*(e.logprobs(request(i)) for i in range(4)))
    assert all(isinstance(a, WorkerFailed) and "3 results" in str(a) for a in answers)
    gang.drop_results = 0
    assert (await e.logprobs(request("later"))).id == "later"


async def test_one_bad_item_fails_alone():
    e = executor(FakeGang(bad=["2"]), micro_batch_tokens=80)
    answers = await all_of(*(e.logprobs(request(i)) for i in range(8)))
    assert isinstance(answers[2], DataError)
    assert [a.id for i, a in enumerate(answers) if i != 2] == [str(i) for i in range(8) if i != 2]


async def test_200_queued_items_keep_the_token_budget():
    gang = FakeGang(num_ranks=2)
    e = executor(gang)
    assert len(await all_of(*(e.logprobs(request(i)) for i in range(200)))) == 200
    assert {len(batch) for batch in gang.micro_batches} == {8}


# -- what runs together -------------------------------------------------------------------------------


async def test_siblings_run_together_although_others_came_between_them():
    gang = FakeGang(num_ranks=2)
    e = executor(gang)
    order = ["a0", "b0", "a1", "b1", "c0", "a2", "c1", "b2", "a3", "b3"]
    await all_of(*(e.logprobs(request(name, affinity=name[0])) for name in order))
    assert gang.micro_batches[0] == ("a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3")


async def test_a_runner_that_pads_gets_similar_lengths_and_the_padding_is_counted():
    lengths = np.minimum(300 * np.exp(np.random.default_rng(0).standard_normal(500)), 4096).astype(int)
    shares = {}
    for pads in (True, False):
        e = executor(FakeGang(pads=pads), micro_batch_tokens=16384)
        await all_of(*(e.logprobs(request(i, int(n))) for i, n in enumerate(lengths)))
        stats = await e.stats()
        shares[pads] = stats["executor/padding_share"]
        assert stats["executor/num_answered"] == 500
    assert 0 < shares[True] < 0.05
    assert shares[False] == 0


async def test_dummy_passes_of_ranks_that_have_less_to_do_count_as_padding(monkeypatch):
    replace_ray(monkeypatch)

    class Rank:
        def __init__(self, num_passes: int) -> None:
            self.num_passes = num_passes

        async def run(self, sequence, command, *payloads) -> CommandReply:
            results = [LogProbResult(r.id, 0, (np.zeros(1),)) for r in command.requests]
            return CommandReply(sequence, 0, results, num_tokens=30 * self.num_passes, num_passes=self.num_passes)

    gang = GangRunner([FakeHandle(Rank(3)), FakeHandle(Rank(0))], command_timeout_s=5)
    ran = await gang.run([request(0, 90)])
    assert (ran.num_tokens, ran.num_padded_tokens) == (90 + 3 * 2, 3 * 2)


async def test_what_siblings_share_is_computed_once_and_told(tiny_model, solo_gang):
    from mempo_ray.training.rank import PolicyRank

    e = executor(SoloGang(PolicyRank(settings(tiny_model), solo_gang)), micro_batch_tokens=200)
    prompt = Segment(-1, tuple(range(90)), 90)
    siblings = [LogProbRequest(str(i), (prompt, Segment(0, (i, 7, 8), 3, (1, 3))), affinity="q") for i in (1, 2)]
    assert [r.id for r in await all_of(*map(e.logprobs, siblings))] == ["1", "2"]
    assert (await e.stats())["executor/merged_share"] == pytest.approx(90 / 186, abs=0.02)


# -- waiting and refusing -----------------------------------------------------------------------------


async def test_a_request_that_is_not_answered_in_time_gets_a_typed_error_and_is_forgotten():
    gang = FakeGang()
    gang.gate.clear()
    e = executor(gang)
    with pytest.raises(DeadlineExceeded, match=r"of slow had no answer within 0\.01 s"):
        await e.logprobs(request("slow", deadline_s=0.01))
    gang.gate.set()
    assert (await e.logprobs(request("next"))).id == "next"


async def test_more_queued_tokens_than_the_limit_are_refused():
    gang = FakeGang()
    gang.gate.clear()
    e = executor(gang, max_queued_tokens=20, micro_batch_tokens=10)
    calls = [asyncio.create_task(e.logprobs(request(0)))]
    await gang.started.wait()
    calls += [asyncio.create_task(e.logprobs(request(i))) for i in (1, 2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await e.logprobs(request(3))
    gang.gate.set()
    assert len(await all_of(*calls)) == 3


async def test_close_finishes_what_is_queued_and_refuses_the_rest():
    gang = FakeGang()
    e = executor(gang, max_wait_s=1000)
    calls = [asyncio.create_task(e.logprobs(request(i))) for i in range(3)]
    await asyncio.sleep(0)
    await e.close()
    assert [r.id for r in await all_of(*calls)] == list("012")
    with pytest.raises(WorkerFailed, match="closed"):
        await e.logprobs(request(9))


async def test_a_set_is_held_until_it_is_complete_and_cut_in_order_of_ids():
    gang = FakeGang()
    e = executor(gang, max_wait_s=0.0)
    await e.begin(6)
    calls = [asyncio.create_task(e.logprobs(request(i))) for i in (5, 2, 4, 0, 3)]
    for _ in range(20):  # turns of the loop, many more than an unheld request needs to reach the gang
        await asyncio.sleep(0)
    assert gang.micro_batches == []
    await all_of(*calls, e.logprobs(request(1)))
    assert gang.micro_batches == [("0", "1", "2", "3"), ("4", "5")]


async def test_each_request_counts_once_also_where_its_answer_comes_too_late():
    e = executor(FakeGang(token_s=0.1), micro_batch_tokens=10)
    calls = (request("late", deadline_s=0.5), request("queued", deadline_s=0.7), request("in time"))
    await asyncio.gather(*map(e.logprobs, calls), return_exceptions=True)
    stats = await e.stats()
    assert (stats["executor/num_failed"], stats["executor/num_answered"]) == (2, 1)


async def test_waits_that_nobody_asks_for_take_bounded_memory(monkeypatch):
    monkeypatch.setattr(batch_queue, "KEPT_WAITS", 2)
    e = executor(FakeGang(token_s=0.1), micro_batch_tokens=10)
    await all_of(*(e.logprobs(request(i)) for i in range(6)))  # one a second
    assert (await e.stats())["executor/wait_p50_s"] == pytest.approx(4.5)  # of the last two: 4 s and 5 s
    assert (await e.stats())["executor/wait_p50_s"] == 0


async def test_what_the_executor_has_done_is_told_once():
    gang = FakeGang(bad=["1"], token_s=0.1)
    e = executor(gang, max_wait_s=0.5)
    await all_of(*(e.logprobs(request(i)) for i in range(6)))
    stats = {name.removeprefix("executor/"): value for name, value in (await e.stats()).items()}
    assert stats == pytest.approx(
        {
            "num_queued": 0,
            "queued_tokens": 0,
            "num_answered": 5,
            "num_failed": 1,
            "num_micro_batches": 2,
            "tokens": 60,
            "busy_s": 6,
            "score_s": 6,
            "wait_p50_s": 0,  # four run at once, two wait until those are done
            "wait_p95_s": 4,
            "wait_p99_s": 4,
            "batch_fill": 60 / 80,
            "merged_share": 0,
            "padding_share": 0,
            "items_per_s": 5 / 6,
            "tokens_per_s": 10,
        }
    )
    assert (await e.stats())["executor/num_answered"] == 0


calls = st.tuples(
    st.floats(0, 3),  # arrives
    st.integers(1, 60),  # tokens
    st.floats(0.1, 20),  # deadline
    st.integers(0, 2),  # priority
    st.sampled_from(["", "a", "b"]),
    st.sampled_from(["", "", "", "bad", "cancelled"]),
)


@given(st.lists(calls, max_size=40), st.integers(1, 3), st.lists(st.floats(0, 4), max_size=3))
def test_every_call_ends_by_its_deadline_in_its_own_answer_or_its_own_error(arrivals, num_ranks, updates):
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        gang = FakeGang(num_ranks, bad=[str(i) for i, call in enumerate(arrivals) if call[5] == "bad"], token_s=0.02)
        e = executor(gang, max_wait_s=0.2)

        async def call(number: int, at_s, tokens, deadline_s, priority, affinity, fate) -> None:
            await asyncio.sleep(at_s)
            asking = request(number, tokens, deadline_s=deadline_s, priority=priority, affinity=affinity)
            task = asyncio.create_task(e.logprobs(asking))
            if fate == "cancelled":
                loop.call_later(0.1, task.cancel)
            (answer,) = await all_of(task)
            assert loop.time() <= at_s + deadline_s + 1e-6
            if isinstance(answer, BaseException):
                expected = {"bad": DataError, "cancelled": asyncio.CancelledError}.get(fate, DeadlineExceeded)
                assert isinstance(answer, expected | DeadlineExceeded)
            else:
                assert answer.id == str(number)
                assert fate != "bad"

        async def update(at_s: float) -> None:
            await asyncio.sleep(at_s)
            await e.freeze_reference()

        await asyncio.gather(*(call(i, *a) for i, a in enumerate(arrivals)), *map(update, updates))
        await e.close()
        served = [name for batch in gang.micro_batches for name in batch]
        assert len(served) == len(set(served))
        assert gang.journal.count("FreezeReferenceCommand@0") == len(updates)
        assert (await e.stats())["executor/queued_tokens"] == 0

    with asyncio.Runner(loop_factory=FakeTimeLoop) as runner:
        runner.run(scenario())


# -- one order of commands ----------------------------------------------------------------------------


async def test_scores_before_an_update_run_before_it_and_later_ones_after_it():
    gang = FakeGang()
    gang.gate.clear()
    e = executor(gang, max_wait_s=1000)
    first = [asyncio.create_task(e.logprobs(request(i, policy_version=0))) for i in range(4)]
    await gang.started.wait()
    before = asyncio.create_task(e.logprobs(request("before", policy_version=0)))
    await asyncio.sleep(0)
    update = asyncio.create_task(e.train(plan()))
    await asyncio.sleep(0)
    after = [asyncio.create_task(e.logprobs(request(f"after{i}", policy_version=1))) for i in range(4)]
    gang.gate.set()
    await asyncio.gather(*first, before, update, *after)
    assert gang.journal == ["score@0", "score@0", "TrainCommand@0", "score@1"]
    assert {(await r).version for r in after} == {1}


async def test_a_request_for_another_version_fails_alone():
    e = executor(FakeGang())
    wrong, right = await all_of(e.logprobs(request("w", policy_version=3)), e.logprobs(request("r", policy_version=0)))
    assert isinstance(wrong, TrainingError)
    assert right.version == 0


async def test_waiting_commands_run_update_before_export_before_checkpoint():
    gang = FakeGang()
    gang.gate.clear()
    e = executor(gang)
    calls = [asyncio.create_task(e.logprobs(request("first")))]
    await gang.started.wait()
    calls += [asyncio.create_task(c) for c in (e.save("s", {}), e.publish("p"), e.freeze_reference(), e.train(plan()))]
    await asyncio.sleep(0)
    gang.gate.set()
    await asyncio.gather(*calls)
    assert [line.split("@")[0] for line in gang.journal[1:]] == [
        "TrainCommand",
        "FreezeReferenceCommand",
        "PublishCommand",
        "SaveCommand",
    ]


async def test_a_plan_for_another_version_is_not_trained():
    gang = FakeGang()
    e = executor(gang)
    with pytest.raises(TrainingError, match="trains version 3"):
        await e.train(plan(version=3))
    assert gang.journal == []
    assert (await e.train(plan(version=0))).version == 1


async def test_an_update_is_split_by_tokens_and_payloads_stand_beside_the_command():
    gang = FakeGang(num_ranks=2)
    report = await executor(gang).train(plan())
    assert (report.step, report.version, report.metrics) == (7, 1, {"rank": 0.0})
    commands = [share.command for share in gang.shares[0]]
    assert all(isinstance(c, TrainCommand) and c.num_trajectories == (4,) for c in commands)
    assert [share.payloads for share in gang.shares[0]] == [("object 0", "object 3"), ("object 1", "object 2")]
    assert all(item.payload.handle is None for c in commands for item in c.items)


async def test_supervised_rows_are_split_and_none_is_lost():
    rows = [[1] * n for n in (3, 1, 2)]
    ragged = Ragged.from_rows(rows, np.int32)
    gang = FakeGang(num_ranks=2)
    await executor(gang).fit(SftBatch({"prompt_ids": ragged, "output_ids": ragged}), 1e-3, 6)
    shares = gang.shares[0]
    assert all(share.command == SftCommand(1e-3, 6) for share in shares)
    assert [share.payloads[0].ragged["output_ids"].lengths.tolist() for share in shares] == [[3], [1, 2]]


# -- loss of a rank -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dies_at", [LogProbRequest, TrainCommand])
async def test_the_loss_of_a_rank_fails_every_pending_and_following_call(dies_at):
    gang = FakeGang(dies_at=dies_at)
    gang.gate.clear()
    e = executor(gang, max_wait_s=0.0)
    scores, commands = [e.logprobs(request(i)) for i in range(9)], [e.train(plan()), e.publish("p")]
    dying_first = [*scores, *commands] if dies_at is LogProbRequest else [*commands, *scores]
    calls = [asyncio.create_task(call) for call in dying_first]
    await asyncio.sleep(0)
    gang.gate.set()
    assert all(isinstance(a, WorkerFailed) for a in await all_of(*calls))
    with pytest.raises(WorkerFailed, match="rank 1 died"):
        await e.logprobs(request("late"))


async def test_a_bug_in_the_runner_reaches_the_callers_instead_of_hanging_them():
    class Broken(FakeGang):
        async def run(self, requests):
            raise ZeroDivisionError("bug")

    with pytest.raises(WorkerFailed, match="ZeroDivisionError: bug"):
        await executor(Broken()).logprobs(request(0))


async def test_a_bug_in_a_command_reaches_its_caller_and_those_behind_it():
    class Broken(FakeGang):
        async def execute(self, shares):
            raise TypeError("bug")

    e = executor(Broken())
    answers = await all_of(e.publish("p"), e.save("s", {}))
    assert all(isinstance(a, GangLost) and "TypeError: bug" in str(a) for a in answers)


async def test_a_payload_that_a_rank_cannot_read_ends_the_gang_as_lost(monkeypatch):
    replace_ray(monkeypatch)

    class Rank:
        async def run(self, *_: object) -> None:
            raise PayloadLost("p0: its node is gone")

    rank = FakeHandle(Rank())
    e = BatchExecutor(Section(), GangRunner([rank], command_timeout_s=5))
    with pytest.raises(GangLost, match="its node is gone"):
        await e.train(plan())
    assert is_dead(rank)
