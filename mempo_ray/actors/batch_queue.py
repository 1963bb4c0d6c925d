"""BatchQueue: many waiting callers in, one thing at a time out. What BatchExecutor serves from, or any other runner.

ask(request) ──────────▶ Scheduler ──▶ micro-batch ──▶ Runner.run ──▶ each caller its own result or its own error
run_alone(name, job) ──▶ heap ───────────────────────▶ job()      ──▶ its caller

order        a job runs after the requests that came before it and before those that came after it, so no micro-batch
             straddles it, and no stream of requests starves it. Jobs that wait together: by `order`, then arrival.
waits        a request at most its deadline; a job for the requests before it, each of which has one
on failure   an error that is *returned* belongs to one item or job. One that is *raised* means that the runner is
             spent: every pending and following call gets `lost`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from mempo_ray.batching.runner import Runner
from mempo_ray.batching.scheduler import Limits, Scheduler, Ticket
from mempo_ray.errors import DeadlineExceeded, InfrastructureError, MempoError, WorkerFailed

T = TypeVar("T")
RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")

Clock = Callable[[], float]

KEPT_WAITS = 65_536  # of the newest requests: nobody need ever ask for the percentiles


@dataclass(order=True)
class _Job:
    order: int
    number: int
    name: str = field(compare=False)
    run: Callable[[], Awaitable[Any]] = field(compare=False)
    future: asyncio.Future = field(compare=False)


@dataclass(frozen=True)
class _Waiting(Generic[RequestT]):
    request: RequestT
    ticket: Ticket
    future: asyncio.Future


class BatchQueue(Generic[RequestT, ResultT]):
    """One asyncio task serves the queue; the methods queue and wait. Lives in one event loop.

    Args:
        what: of a request, in messages ("log-probs").
        lost: the type of error that tells that nothing can run here any more.
    """

    def __init__(
        self,
        runner: Runner[RequestT, ResultT],
        limits: Limits,
        what: str,
        lost: type[InfrastructureError] = WorkerFailed,
        clock: Clock = time.monotonic,
    ) -> None:
        self._runner = runner
        self._limits = limits
        self._what = what
        self._lost = lost
        self._clock = clock
        self._scheduler = Scheduler(limits)
        self._jobs: list[_Job] = []
        self._running: _Job | None = None
        self._waiting: dict[int, _Waiting[RequestT]] = {}
        self._numbers = itertools.count()
        self._wake = asyncio.Event()
        self._serving: asyncio.Task | None = None
        self._is_closed = False
        self._failure: str | None = None
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._waits_s: deque[float] = deque(maxlen=KEPT_WAITS)

    # -- calls ----------------------------------------------------------------------------------------

    async def ask(
        self,
        request: RequestT,
        *,
        id: str,
        timeout_s: float,
        priority: int = 0,
        lane: Hashable = None,
        affinity: str = "",
    ) -> ResultT:
        """The runner's result. Cancelling the caller takes the request out of the queue. Rest: `scheduler.Ticket`.

        Raises:
            Overloaded: the queue is full. DeadlineExceeded: no answer within `timeout_s`.
            MempoError: what the runner found wrong with it; `lost` where the runner is spent.
        """
        self._check_open()
        now, number = self._clock(), next(self._numbers)
        cost = max(1, self._runner.cost(request))
        ticket = Ticket(number, id, cost, now, now + timeout_s, priority, lane, affinity)
        self._scheduler.submit(ticket)
        waiting = self._waiting[number] = _Waiting(request, ticket, asyncio.get_running_loop().create_future())
        self._start()
        try:
            async with asyncio.timeout(timeout_s):
                return await waiting.future
        except TimeoutError:
            self._count(num_failed=1)
            raise self._deadline(ticket) from None
        finally:
            self._scheduler.cancel(number)
            self._waiting.pop(number, None)

    def begin(self, expected_requests: int) -> None:
        """`Scheduler.begin`."""
        self._scheduler.begin(expected_requests)

    async def run_alone(self, order: int, name: str, job: Callable[[], Awaitable[T | MempoError]]) -> T:
        """What `job` returns. A caller that is cancelled before it began takes it out of the queue."""
        self._check_open()
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._jobs, _Job(order, next(self._numbers), name, job, future))
        self._start()
        return await future

    def live(self) -> dict[str, float]:
        """The queue now, and counts since the last `take_stats`.

        now       num_queued, queued_tokens, oldest_wait_s (since the oldest request without an answer came)
        counts    num_answered (or failed), tokens (computed), busy_s
        """
        now = self._clock()
        oldest_s = min((waiting.ticket.arrived_s for waiting in self._waiting.values()), default=now)
        return {
            "num_queued": float(len(self._scheduler)),
            "queued_tokens": float(self._scheduler.queued_tokens),
            "oldest_wait_s": now - oldest_s,
            "num_answered": self._counters["num_answered"] + self._counters["num_failed"],
            "tokens": self._counters["tokens"],
            "busy_s": self._counters["busy_s"],
        }

    def take_stats(self) -> dict[str, float]:
        """The queue now, and what happened since the last call.

        now       num_queued, queued_tokens
        counts    num_answered, num_failed, num_micro_batches, tokens (computed)
        seconds   busy_s (micro-batches and jobs), score_s (micro-batches), wait_p50_s, wait_p95_s, wait_p99_s (queued;
                  over the newest `KEPT_WAITS` requests)
        shares    batch_fill (tokens asked for / budget), merged_share (of the tokens asked for, computed with those of
                  another request), padding_share (of the tokens computed)
        rates     items_per_s, tokens_per_s: per second of score_s
        """
        counted, self._counters = self._counters, defaultdict(float)
        p50, p95, p99 = np.percentile(self._waits_s or [0.0], (50, 95, 99)).tolist()
        self._waits_s.clear()
        names = ("num_answered", "num_failed", "num_micro_batches", "tokens", "busy_s", "score_s")
        merged = counted["filled_tokens"] - (counted["tokens"] - counted["padded_tokens"])
        score_s = max(1e-9, counted["score_s"])
        return {name: counted[name] for name in names} | {
            "num_queued": float(len(self._scheduler)),
            "queued_tokens": float(self._scheduler.queued_tokens),
            "wait_p50_s": p50,
            "wait_p95_s": p95,
            "wait_p99_s": p99,
            "batch_fill": counted["filled_tokens"] / max(1.0, counted["budget_tokens"]),
            "merged_share": merged / max(1.0, counted["filled_tokens"]),
            "padding_share": counted["padded_tokens"] / max(1.0, counted["tokens"]),
            "items_per_s": counted["num_answered"] / score_s,
            "tokens_per_s": counted["tokens"] / score_s,
        }

    async def close(self) -> None:
        """Refuse new calls, finish the queued ones."""
        self._is_closed = True
        self._wake.set()
        if self._serving is not None:
            await asyncio.wait([self._serving])

    # -- the loop -------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._lost(self._failure)
        if self._is_closed:
            raise WorkerFailed(f"{self._what}: the queue is closed")

    def _start(self) -> None:
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve(), name=f"queue of {self._what}")
            self._serving.add_done_callback(self._on_serving_ended)
        self._wake.set()

    async def _serve(self) -> None:
        """Decide, obey, until closed and drained. Between a decision and the wait nothing else can run."""
        while self._failure is None:
            while self._jobs and self._jobs[0].future.done():  # its caller went away
                heapq.heappop(self._jobs)
            behind = self._jobs[0].number if self._jobs else None
            is_closing = self._is_closed
            if is_closing and behind is None:
                behind = next(self._numbers)  # nothing comes after: drain
            decision = self._scheduler.decide(self._clock(), behind)
            for ticket in decision.expired:
                self._answer(ticket, self._deadline(ticket))
            if decision.batch:
                await self._run_batch(decision.batch)
            elif self._jobs:
                await self._run_job(heapq.heappop(self._jobs))
            elif is_closing:
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

    async def _run_batch(self, batch: Sequence[Ticket]) -> None:
        """Each ticket gets its own result or its own error."""
        started = self._clock()
        self._waits_s.extend(started - ticket.arrived_s for ticket in batch)
        try:
            ran = await self._runner.run([self._waiting[ticket.number].request for ticket in batch])
        except MempoError as error:
            self._fail(f"{self._what}: {error}")
            return
        seconds = self._clock() - started
        self._count(
            num_micro_batches=1,
            busy_s=seconds,
            score_s=seconds,
            tokens=ran.num_tokens,
            padded_tokens=ran.num_padded_tokens,
            filled_tokens=sum(ticket.cost for ticket in batch),
            budget_tokens=self._limits.micro_batch_tokens * self._limits.num_ranks,
        )
        results = ran.results
        if len(results) != len(batch):
            text = f"{len(results)} results came back for a micro-batch of {len(batch)}; none can be told apart"
            results = [WorkerFailed(text)] * len(batch)
        for ticket, result in zip(batch, results, strict=True):
            self._answer(ticket, result)

    async def _run_job(self, job: _Job) -> None:
        self._running, started = job, self._clock()
        try:
            result = await job.run()
        except MempoError as error:
            _settle(job.future, error)
            self._fail(f"{job.name}: {error}")
            return
        self._count(busy_s=self._clock() - started)
        _settle(job.future, result)
        self._running = None

    def _answer(self, ticket: Ticket, result: ResultT | MempoError) -> None:
        waiting = self._waiting.get(ticket.number)
        if waiting is None or waiting.future.done():  # its caller went away meanwhile
            return
        failed = isinstance(result, MempoError)
        self._count(num_failed=failed, num_answered=not failed)
        _settle(waiting.future, result)

    def _deadline(self, ticket: Ticket) -> DeadlineExceeded:
        timeout_s = ticket.deadline_s - ticket.arrived_s
        return DeadlineExceeded(f"{self._what} of {ticket.id} had no answer within {timeout_s:.3g} s")

    def _count(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self._counters[name] += amount

    def _fail(self, reason: str) -> None:
        """Nothing can run any more: every caller hears it now."""
        self._failure = reason
        jobs = [*self._jobs, *([self._running] if self._running is not None else [])]
        for pending in [*self._waiting.values(), *jobs]:
            _settle(pending.future, self._lost(reason))
        self._jobs.clear()

    def _on_serving_ended(self, task: asyncio.Task) -> None:
        if task.cancelled():
            self._fail(f"the queue of {self._what} was cancelled")
        elif (error := task.exception()) is not None:
            self._fail(f"the queue of {self._what} broke: {type(error).__name__}: {error}")


def _settle(future: asyncio.Future, result: object) -> None:
    if future.done():
        return
    if isinstance(result, MempoError):
        future.set_exception(result)
    else:
        future.set_result(result)
