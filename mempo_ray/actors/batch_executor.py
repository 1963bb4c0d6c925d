"""BatchExecutor: the one caller of the FSDP ranks (architecture, decision 1).

driver ── logprobs(request) ──▶ Scheduler ──▶ micro-batch ─┐
       ── train / fit / publish / save / load ──▶ heap ────┴──▶ Gang.execute ──▶ PolicyWorker ×P

consumes     LogProbRequest (payloads stay references), TrainPlan, SftBatch
produces     LogProbResult, StepReport, WeightManifest; each with the weight version that made it
order        log-probs that came before a command run before it, later ones after it: no micro-batch straddles
             a weight version, and no stream of scoring starves an update. Among waiting commands: `Order`.
waits        a log-prob request at most its deadline; a command for those before it, each of which has one
on failure   a bad item fails alone; a lost rank fails every pending and following call with GangLost, and all
             ranks are ended. Whoever owns the gang (actors/fleet.py) makes a new gang and a new executor.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError

from mempo_ray.actors.calls import answer
from mempo_ray.batching.packing import RankShare, score_shares, sft_shares, split_between_ranks, train_shares
from mempo_ray.batching.runner import Gang
from mempo_ray.batching.scheduler import Limits, Scheduler, Ticket
from mempo_ray.config.schema import BatchExecutor as BatchExecutorSection
from mempo_ray.contracts import (
    Command,
    CommandReply,
    FreezeReferenceCommand,
    LoadCommand,
    LogProbRequest,
    LogProbResult,
    PublishCommand,
    PushCommand,
    SaveCommand,
    SftBatch,
    SftCommand,
    StepReport,
    TrainPlan,
    WeightManifest,
)
from mempo_ray.errors import (
    DataError,
    DeadlineExceeded,
    GangLost,
    MempoError,
    PayloadLost,
    TrainingError,
    WorkerFailed,
)

T = TypeVar("T")

PUSH_GRACE_S = 30.0  # for rank 0 to tell which engines failed a push, before the gang is ended


class Order(IntEnum):
    """Order of commands that wait at the same moment; equal ones in order of arrival."""

    UPDATE = 0
    REFERENCE = 1
    EXPORT = 2
    CHECKPOINT = 3
    RESTORE = 4


@dataclass(order=True)
class _QueuedCommand:
    order: Order
    number: int
    shares: list[RankShare] = field(compare=False)
    future: asyncio.Future = field(compare=False)
    policy_version: int | None = field(compare=False, default=None)


@dataclass(frozen=True)
class _Waiting:
    request: LogProbRequest
    ticket: Ticket
    future: asyncio.Future


class BatchExecutor:
    """One asyncio task serves the queue; the methods queue and wait. Lives in one event loop."""

    def __init__(self, section: BatchExecutorSection, gang: Gang, clock: Callable[[], float] = time.monotonic) -> None:
        self._section = section
        self._gang = gang
        self._clock = clock
        self._scheduler = Scheduler(
            Limits(section.micro_batch_tokens, gang.num_ranks, section.max_wait_s, section.max_queued_tokens)
        )
        self._commands: list[_QueuedCommand] = []
        self._running: _QueuedCommand | None = None
        self._waiting: dict[int, _Waiting] = {}
        self._numbers = itertools.count()
        self._wake = asyncio.Event()
        self._serving: asyncio.Task | None = None
        self._state = "running"
        self._failure: GangLost | None = None
        self._counters: defaultdict[str, float] = defaultdict(float)

    # -- calls ----------------------------------------------------------------------------------------

    async def logprobs(self, request: LogProbRequest) -> LogProbResult:
        """Log-probs of the request's marked tokens. Cancelling the caller takes the request out of the queue.

        Raises:
            Overloaded: the queue is full. DeadlineExceeded: no answer within the request's deadline.
            GangLost: the ranks are gone. TrainingError: its weights are not of `request.policy_version`.
            DataError: the request cannot be computed (its payload does not hold what its segments name).
        """
        self._check_open()
        now, patience_s = self._clock(), min(request.deadline_s, self._section.request_timeout_s)
        cost = self._gang.cost(request)
        number = next(self._numbers)
        ticket = Ticket(number, request.id, cost, now, now + patience_s, request.priority, request.model)
        self._scheduler.submit(ticket)
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = _Waiting(request, ticket, future)
        self._start()
        try:
            async with asyncio.timeout(patience_s):
                return await future
        except TimeoutError:
            raise _deadline(ticket) from None
        finally:
            self._scheduler.cancel(number)
            self._waiting.pop(number, None)

    async def begin(self, expected_requests: int) -> None:
        """Hold the next `expected_requests` until all are here, then cut by id and token budget only."""
        self._scheduler.begin(expected_requests)

    async def train(self, plan: TrainPlan) -> StepReport:
        """One step of the policy. Metrics are rank 0's, reduced over the ranks by the workers.

        Raises:
            TrainingError: the plan was made for another weight version.
        """
        reply = await self._call(Order.UPDATE, train_shares(plan, self._gang.num_ranks), plan.policy_version)
        return StepReport(plan.step, reply.version, _value(reply, Mapping))

    async def fit(self, batch: SftBatch, lr: float, num_target_tokens: int) -> Mapping[str, float]:
        """One supervised optimiser step on `batch`, split between the ranks. Metrics as in `train`."""
        command = SftCommand(lr, num_target_tokens)
        return _value(await self._call(Order.UPDATE, sft_shares(batch, command, self._gang.num_ranks)), Mapping)

    async def freeze_reference(self) -> None:
        """Keep the present weights as π_ref."""
        await self._call_all(Order.REFERENCE, FreezeReferenceCommand())

    async def publish(self, uri: str) -> WeightManifest:
        """Export the present weights to the folder `uri`."""
        return _value(await self._call_all(Order.EXPORT, PublishCommand(uri)), WeightManifest)

    async def push(self, command: PushCommand) -> Mapping[str, str]:
        """Send the present weights into the engines; those that failed it, with the reason."""
        return _value(await self._call_all(Order.EXPORT, command), Mapping)

    async def save(self, uri: str, extra: Mapping[str, object]) -> None:
        """Write a complete checkpoint to the folder `uri`."""
        await self._call_all(Order.CHECKPOINT, SaveCommand(uri, extra))

    async def load(self, uri: str) -> Mapping[str, object]:
        """Restore a checkpoint; returns the `extra` it was saved with."""
        return _value(await self._call_all(Order.RESTORE, LoadCommand(uri)), Mapping)

    async def stats(self) -> dict[str, float]:
        """Queue depth now; counts and wall-clock seconds since the last call.

        executor/… num_queued, queued_tokens, num_answered, num_failed, num_micro_batches, busy_s (any command),
        score_s, wait_s (in the queue, summed over requests), batch_fill (mean share of the token budget).
        """
        counted, self._counters = self._counters, defaultdict(float)
        names = ("num_answered", "num_failed", "num_micro_batches", "busy_s", "score_s", "wait_s")
        values = {name: counted[name] for name in names} | {
            "num_queued": float(len(self._scheduler)),
            "queued_tokens": float(self._scheduler.queued_tokens),
            "batch_fill": counted["filled_tokens"] / max(1.0, counted["budget_tokens"]),
        }
        return {f"executor/{name}": value for name, value in values.items()}

    async def close(self) -> None:
        """Refuse new calls, finish the queued ones. The ranks live on: they are their owner's."""
        if self._state == "running":
            self._state = "closed"
        self._wake.set()
        if self._serving is not None:
            await asyncio.wait([self._serving])

    # -- the queue ------------------------------------------------------------------------------------

    async def _call_all(self, order: Order, command: Command) -> CommandReply:
        return await self._call(order, [RankShare(command)] * self._gang.num_ranks)

    async def _call(self, order: Order, shares: list[RankShare], policy_version: int | None = None) -> CommandReply:
        """Rank 0's reply. A caller that is cancelled before its command began takes it out of the queue."""
        self._check_open()
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._commands, _QueuedCommand(order, next(self._numbers), shares, future, policy_version))
        self._start()
        return await future

    def _check_open(self) -> None:
        if self._failure is not None:
            raise GangLost(str(self._failure))
        if self._state == "closed":
            raise WorkerFailed("the batch executor is closed")

    def _start(self) -> None:
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve(), name="batch-executor")
            self._serving.add_done_callback(self._on_serving_ended)
        self._wake.set()

    async def _serve(self) -> None:
        """Decide, obey, until closed and drained. Between a decision and the wait nothing else can run."""
        while self._failure is None:
            while self._commands and self._commands[0].future.done():  # its caller went away
                heapq.heappop(self._commands)
            behind = self._commands[0].number if self._commands else None
            closing = self._state == "closed"
            if closing and behind is None:
                behind = next(self._numbers)  # nothing comes after: drain
            decision = self._scheduler.decide(self._clock(), behind)
            for ticket in decision.expired:
                self._answer(ticket, _deadline(ticket))
            if decision.batch:
                await self._score(decision.batch)
            elif self._commands:
                await self._obey(heapq.heappop(self._commands))
            elif closing:
                return
            else:
                await self._sleep(decision.wake_at_s)

    async def _sleep(self, wake_at_s: float | None) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(None if wake_at_s is None else max(0.0, wake_at_s - self._clock())):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _score(self, batch: Sequence[Ticket]) -> None:
        """Run one micro-batch; each ticket gets its own result or its own error."""
        version, runnable = self._gang.version, []
        for ticket in batch:
            request = self._waiting[ticket.number].request
            if request.policy_version in (None, version):
                runnable.append(ticket)
            else:
                text = f"log-probs of {request.id}: asked of version {request.policy_version}, the ranks hold {version}"
                self._answer(ticket, TrainingError(text))
        if not runnable:
            return
        started = self._clock()
        self._count(wait_s=sum(started - t.arrived_s for t in runnable))
        try:
            results = await self._gang.run([self._waiting[t.number].request for t in runnable])
        except MempoError as error:
            self._fail(f"log-probs: {error}")
            return
        seconds = self._clock() - started
        self._count(
            num_micro_batches=1,
            busy_s=seconds,
            score_s=seconds,
            filled_tokens=sum(t.cost for t in runnable),
            budget_tokens=self._section.micro_batch_tokens * self._gang.num_ranks,
        )
        if len(results) != len(runnable):
            text = f"{len(results)} results came back for a micro-batch of {len(runnable)}; none can be told apart"
            results = [WorkerFailed(text)] * len(runnable)
        for ticket, result in zip(runnable, results, strict=True):
            self._answer(ticket, result)

    async def _obey(self, command: _QueuedCommand) -> None:
        if command.policy_version not in (None, self._gang.version):
            text = f"the plan trains version {command.policy_version}, the ranks hold {self._gang.version}"
            command.future.set_exception(TrainingError(text))
            return
        self._running, started = command, self._clock()
        try:
            replies = await self._gang.execute(command.shares)
        except MempoError as error:
            if not command.future.done():
                command.future.set_exception(error)
            self._fail(f"{type(command.shares[0].command).__name__}: {error}")
            return
        self._count(busy_s=self._clock() - started)
        if not command.future.done():
            command.future.set_result(replies[0])
        self._running = None

    def _answer(self, ticket: Ticket, result: LogProbResult | MempoError) -> None:
        failed = isinstance(result, MempoError)
        self._count(num_failed=failed, num_answered=not failed)
        waiting = self._waiting.get(ticket.number)
        if waiting is None or waiting.future.done():  # its caller went away meanwhile
            return
        if failed:
            waiting.future.set_exception(result)
        else:
            waiting.future.set_result(result)

    def _count(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self._counters[name] += amount

    def _fail(self, reason: str) -> None:
        """Nothing can run any more: every caller hears it now."""
        self._state = "failed"
        self._failure = GangLost(reason)
        commands = [*self._commands, *([self._running] if self._running is not None else [])]
        pending = [w.future for w in self._waiting.values()] + [c.future for c in commands]
        for future in pending:
            if not future.done():
                future.set_exception(GangLost(reason))
        self._commands.clear()

    def _on_serving_ended(self, task: asyncio.Task) -> None:
        if task.cancelled():
            self._fail("the batch executor was cancelled")
        elif (error := task.exception()) is not None:
            self._fail(f"the batch executor broke: {type(error).__name__}: {error}")


class GangRunner:
    """The FSDP ranks behind `worker.run.remote(sequence, command, *payloads)`. A `Gang`."""

    def __init__(self, workers: Sequence[ActorHandle], command_timeout_s: float, version: int = 0) -> None:
        self._workers = list(workers)
        self._timeout_s = command_timeout_s
        self._sequence = 0
        self.num_ranks = len(self._workers)
        self.version = version

    def cost(self, request: LogProbRequest) -> int:
        """The ranks expand a forest to plain sequences."""
        return max(1, request.num_plain_tokens)

    async def run(self, requests: Sequence[LogProbRequest]) -> list[LogProbResult | MempoError]:
        split = split_between_ranks([self.cost(r) for r in requests], self.num_ranks)
        replies = await self.execute(score_shares(requests, split))
        results: dict[int, LogProbResult | MempoError] = {}
        for rank, (indices, reply) in enumerate(zip(split, replies, strict=True)):
            values = reply.value
            if not isinstance(values, Sequence) or len(values) != len(indices):
                raise self._ended(f"rank {rank} did not answer each of its {len(indices)} log-prob requests")
            for i, value in zip(indices, values, strict=True):
                failed = isinstance(value, str)
                results[i] = DataError(f"log-probs of {requests[i].id}: {value}") if failed else value
        return [results[i] for i in range(len(requests))]

    async def execute(self, shares: Sequence[RankShare]) -> list[CommandReply]:
        """A push that an engine's death holds in a collective has the deadline of its sync, not of a whole update."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        command = shares[0].command
        timeout_s = self._timeout_s
        if isinstance(command, PushCommand):
            timeout_s = min(timeout_s, command.timeout_s + PUSH_GRACE_S)
        what = f"{type(command).__name__} {sequence}"
        calls = [
            answer(
                worker.run.remote(sequence, share.command, *share.payloads),
                f"{what}, rank {rank}",
                timeout_s,
                GangLost,
            )
            for rank, (worker, share) in enumerate(zip(self._workers, shares, strict=True))
        ]
        try:
            replies = await asyncio.gather(*calls)
        except DeadlineExceeded as error:
            raise self._ended(f"{error} (batch_executor.command_timeout_s)") from None
        except PayloadLost as error:  # the step that made it is done again
            raise self._ended(str(error)) from None
        except MempoError:
            self._ended(what)
            raise
        except RayTaskError as error:  # a bug in the rank: its traceback is in the message
            raise self._ended(f"{what}: {error}") from None
        versions = {reply.version for reply in replies}
        if len(versions) != 1:
            raise self._ended(f"{what}: the ranks are at different versions {sorted(versions)}")
        self.version = versions.pop()
        return replies

    def _ended(self, reason: str) -> GangLost:
        """End all ranks: those that live may hang in a collective."""
        for worker in self._workers:
            ray.kill(worker)
        return GangLost(reason)


def _value(reply: CommandReply, kind: type[T]) -> T:
    if not isinstance(reply.value, kind):
        raise WorkerFailed(f"command {reply.sequence}: a rank answered a {type(reply.value).__name__}")
    return reply.value


def _deadline(ticket: Ticket) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"log-probs of {ticket.id} had no answer within {ticket.deadline_s - ticket.arrived_s:.3g} s"
    )


BatchExecutorActor = ray.remote(max_concurrency=4096)(BatchExecutor)  # pyrefly: ignore[unexpected-keyword]
