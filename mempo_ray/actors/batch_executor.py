"""BatchExecutor: the one caller of the FSDP ranks (architecture, decision 1).

driver ── logprobs(request) ──▶ BatchQueue ──▶ micro-batch ───┐
       ── train / fit / publish / save / load ──▶ BatchQueue ─┴──▶ Gang ──▶ PolicyWorker ×P

consumes     LogProbRequest (payloads stay references), TrainPlan, SftBatch
produces     LogProbResult, StepReport, WeightManifest; each with the weight version that made it
order        that of batch_queue.py: no micro-batch straddles a weight version, and no stream of scoring starves an
             update. Log-probs go first while sampling goes on; among waiting commands: `Order`.
on failure   a bad item fails alone; a lost rank fails every pending and following call with GangLost, and all
             ranks are ended. Whoever owns the gang (actors/fleet.py) makes a new gang and a new executor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError

from mempo_ray.actors.batch_queue import BatchQueue, Clock
from mempo_ray.actors.calls import answer
from mempo_ray.actors.metrics_sink import ActorGauges
from mempo_ray.actors.names import own_name
from mempo_ray.batching.packing import RankShare, score_shares, sft_shares, split_by_affinity, train_shares
from mempo_ray.batching.runner import Gang, Ran
from mempo_ray.batching.scheduler import Limits
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
from mempo_ray.training.rows import DUMMY

T = TypeVar("T")

PUSH_GRACE_S = 30.0  # for rank 0 to tell which engines failed a push, before the gang is ended


class Order(IntEnum):
    """Order of commands that wait at the same moment; equal ones in order of arrival."""

    UPDATE = 0
    REFERENCE = 1
    EXPORT = 2
    CHECKPOINT = 3
    RESTORE = 4


class BatchExecutor:
    """The queue of the FSDP ranks: log-prob requests in micro-batches, commands alone. Lives in one event loop."""

    def __init__(self, section: BatchExecutorSection, gang: Gang, clock: Clock = time.monotonic) -> None:
        self._section = section
        self._gang = gang
        limits = Limits(
            section.micro_batch_tokens, gang.num_ranks, section.max_wait_s, section.max_queued_tokens, gang.pads
        )
        self._queue = BatchQueue[LogProbRequest, LogProbResult](
            _OfThisVersion(gang), limits, "log-probs", GangLost, clock
        )
        self._gauges = ActorGauges("batch_executor")
        self._gauges.keep(self._live)

    def __repr__(self) -> str:
        return f"BatchExecutor({own_name()})"

    # -- calls ----------------------------------------------------------------------------------------

    async def logprobs(self, request: LogProbRequest) -> LogProbResult:
        """Log-probs of the request's marked tokens. Cancelling the caller takes the request out of the queue.

        Raises:
            Overloaded: the queue is full. DeadlineExceeded: no answer within the request's deadline.
            GangLost: the ranks are gone. TrainingError: its weights are not of `request.policy_version`.
            DataError: the request cannot be computed (its payload does not hold what its segments name).
        """
        return await self._queue.ask(
            request,
            id=request.id,
            timeout_s=min(request.deadline_s, self._section.request_timeout_s),
            priority=request.priority,
            lane=request.model,
            affinity=request.affinity,
        )

    async def begin(self, expected_requests: int) -> None:
        """Hold the next `expected_requests` until all are here, then cut by id and token budget only."""
        self._queue.begin(expected_requests)

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
        """`BatchQueue.take_stats`, as executor/…"""
        self._gauges.taken(self._live())
        return {f"executor/{name}": value for name, value in self._queue.take_stats().items()}

    async def close(self) -> None:
        """Refuse new calls, finish the queued ones. The ranks live on: they are their owner's."""
        await self._queue.close()

    def _live(self) -> dict[str, float]:
        return {f"queue/{name}": value for name, value in self._queue.live().items()}

    # -- commands -------------------------------------------------------------------------------------

    async def _call_all(self, order: Order, command: Command) -> CommandReply:
        return await self._call(order, [RankShare(command)] * self._gang.num_ranks)

    async def _call(self, order: Order, shares: list[RankShare], policy_version: int | None = None) -> CommandReply:
        """Rank 0's reply."""

        async def execute() -> CommandReply | TrainingError:
            if policy_version not in (None, self._gang.version):
                return TrainingError(f"the plan trains version {policy_version}, the ranks hold {self._gang.version}")
            return (await self._gang.execute(shares))[0]

        return await self._queue.run_alone(order, type(shares[0].command).__name__, execute)


class _OfThisVersion:
    """The gang as a `Runner` in which a request for other weights than today's fails alone."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self.pads = gang.pads
        self.cost = gang.cost

    async def run(self, requests: Sequence[LogProbRequest]) -> Ran[LogProbResult]:
        version = self._gang.version
        results: list[LogProbResult | MempoError] = [
            TrainingError(f"log-probs of {r.id}: asked of version {r.policy_version}, the ranks hold {version}")
            for r in requests
        ]
        fitting = [i for i, r in enumerate(requests) if r.policy_version in (None, version)]
        if not fitting:
            return Ran(results, 0, 0)
        ran = await self._gang.run([requests[i] for i in fitting])
        if len(ran.results) != len(fitting):
            return ran  # the queue tells the callers
        for i, result in zip(fitting, ran.results, strict=True):
            results[i] = result
        return Ran(results, ran.num_tokens, ran.num_padded_tokens)


class GangRunner:
    """The FSDP ranks behind `worker.run.remote(sequence, command, *payloads)`. A `Gang`."""

    pads = False

    def __init__(self, workers: Sequence[ActorHandle], command_timeout_s: float, version: int = 0) -> None:
        self._workers = list(workers)
        self._timeout_s = command_timeout_s
        self._sequence = 0
        self.num_ranks = len(self._workers)
        self.version = version

    def cost(self, request: LogProbRequest) -> int:
        """The ranks run every segment once, and less where requests begin alike."""
        return request.num_forest_tokens

    async def run(self, requests: Sequence[LogProbRequest]) -> Ran[LogProbResult]:
        costs = [self.cost(r) for r in requests]
        split = split_by_affinity(costs, [r.affinity for r in requests], self.num_ranks)
        replies = await self.execute(score_shares(requests, split))
        results: dict[int, LogProbResult | MempoError] = {}
        for rank, (indices, reply) in enumerate(zip(split, replies, strict=True)):
            values = reply.value
            if not isinstance(values, Sequence) or len(values) != len(indices):
                raise self._ended(f"rank {rank} did not answer each of its {len(indices)} log-prob requests")
            for i, value in zip(indices, values, strict=True):
                failed = isinstance(value, str)
                results[i] = DataError(f"log-probs of {requests[i].id}: {value}") if failed else value
        most_passes = max(reply.num_passes for reply in replies)
        num_padded_tokens = len(DUMMY.ids_T) * sum(most_passes - reply.num_passes for reply in replies)
        num_tokens = sum(reply.num_tokens for reply in replies) + num_padded_tokens
        return Ran([results[i] for i in range(len(requests))], num_tokens, num_padded_tokens)

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


# a set (`begin`) waits for all of its members: 4,096 trajectories with KL in the reward are 12,288 requests
BatchExecutorActor = ray.remote(max_concurrency=65_536)(BatchExecutor)  # pyrefly: ignore[unexpected-keyword]
