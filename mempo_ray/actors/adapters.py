"""The driver's ports over actor handles: what it calls `Policy`, `LogProbs` and `Rewards`, and how payloads are read.

    Policy, LogProbs   TrainPlan, LogProbRequest   StepReport, LogProbResult   batch executor   GangLost: `restart`
    Rewards            PayloadRef                  Scored | Unscored           reward workers   Unscored(infrastructure)

`Rollouts` has a file of its own: rollout_pool.py.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle

from mempo_ray.actors.calls import answer
from mempo_ray.actors.lease import Turns
from mempo_ray.actors.reward import calls_at_once, longest_call_s
from mempo_ray.actors.weight_sync import choose_transport
from mempo_ray.config.schema import Config, Reward
from mempo_ray.contracts import (
    LogProbRequest,
    LogProbResult,
    PayloadRef,
    PushCommand,
    Score,
    SftBatch,
    StepReport,
    TrainPlan,
    TrajectoryBatch,
    Unscored,
    WeightManifest,
)
from mempo_ray.errors import (
    DeadlineExceeded,
    GangLost,
    PayloadLost,
    WorkerFailed,
)

if TYPE_CHECKING:
    from mempo_ray.actors.fleet import GangHost

KEPT_SNAPSHOTS = 2
"""Published weights that stay: the newest, and the one before, which a restarting engine may still be pulling."""

READ_S = 60.0  # for a payload to be read from the object store


class Payloads:
    """Reads payloads in the driver's process, for those few who must open them: the log and the evaluation."""

    async def read(self, ref: PayloadRef) -> TrajectoryBatch:
        return await answer(ref.handle, f"payload {ref.key}", READ_S, PayloadLost)


class TokenRoom:
    """At most `limit` tokens at once; a request that is larger than that has it all to itself."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def held(self, tokens: int) -> AsyncGenerator[None]:
        """Waits until there is room; whoever has it has a deadline of its own."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._held == 0 or self._held + tokens <= self._limit)
            self._held += tokens
        try:
            yield
        finally:
            async with self._changed:
                self._held -= tokens
                self._changed.notify_all()


class RayPolicy:
    """`Policy` and `LogProbs` over the batch executor, the gang's only caller. Commands wait for the policy's turn."""

    def __init__(self, gang: GangHost, executor: ActorHandle, config: Config, weights_dir: Path, turns: Turns):
        self._gang = gang
        self._executor = executor
        self._turns = turns
        self._transport = choose_transport(config)
        self._gpus_per_engine = config.rollout.tensor_parallel
        self._sync_s = config.weight_sync.timeout_s
        self._command_s = config.batch_executor.command_timeout_s
        self._grace_s = 10.0  # the executor's own deadline fires first and says more
        self._weights_dir = weights_dir
        self._numbers = itertools.count()
        self._snapshots: deque[Path] = deque(maxlen=KEPT_SNAPSHOTS)
        self._room = TokenRoom(config.batch_executor.max_queued_tokens)
        self._set_missing = 0

    async def __call__(self, request: LogProbRequest) -> LogProbResult:
        """The request's deadline counts from its admission: until the executor's queue has room, it waits here."""
        in_set, self._set_missing = self._set_missing > 0, max(0, self._set_missing - 1)
        room = nullcontext() if in_set else self._room.held(request.num_forest_tokens)  # a set waits for its members
        async with room, self._turns.held_by("policy"):
            call = self._executor.logprobs.remote(request)
            try:
                return await answer(call, f"log-probs {request.id}", request.deadline_s + self._grace_s, GangLost)
            except asyncio.CancelledError:
                ray.cancel(call)  # it leaves the queue: nobody waits any more
                raise

    async def restart(self, version: int) -> None:
        """A new gang in the place of a lost one; it holds the model folder's weights and stays above `version`."""
        async with self._turns.held_by("policy"):
            self._executor = await self._gang.start(version)
            self._set_missing = 0

    async def train(self, plan: TrainPlan) -> StepReport:
        return await self._command("train", plan)

    async def fit(self, batch: SftBatch, lr: float, num_target_tokens: int) -> Mapping[str, float]:
        """One supervised optimiser step; `num_target_tokens` is the loss's denominator."""
        return await self._command("fit", batch, lr, num_target_tokens)

    async def freeze_reference(self) -> None:
        """Keep the present weights as π_ref and start RL with a fresh optimiser."""
        await self._command("freeze_reference")

    async def publish(self) -> WeightManifest:
        """Export this version once into a folder of its own, and remove all but the newest `KEPT_SNAPSHOTS`."""
        manifest = await self._command("publish", str(self._weights_dir / f"{next(self._numbers):06d}"))
        self._snapshots.append(Path(manifest.uri))
        for old in self._weights_dir.iterdir():
            if old not in self._snapshots:
                shutil.rmtree(old, ignore_errors=True)
        return replace(manifest, node=self._gang.node)

    async def push(self, engines: Mapping[str, ActorHandle]) -> Mapping[str, str]:
        """Send the published version into these engines (by the names of their lives), in the engines' turn.

        Returns those that failed it, with the reason.
        """
        return await self._ask("push", PushCommand(self._transport, engines, self._gpus_per_engine, self._sync_s))

    async def save(self, uri: str, extra: Mapping[str, object]) -> None:
        await self._command("save", uri, extra)

    async def load(self, uri: str) -> Mapping[str, Any]:
        return await self._command("load", uri)

    async def begin(self, num_requests: int) -> None:
        """Deterministic mode: serve the next requests only when this many have come, in the order of their ids."""
        await self._command("begin", num_requests)
        self._set_missing = num_requests

    async def stats(self) -> Mapping[str, float]:
        return await self._ask("stats")

    async def _command(self, name: str, *arguments: object) -> Any:
        async with self._turns.held_by("policy"):
            return await self._ask(name, *arguments)

    async def _ask(self, name: str, *arguments: object) -> Any:
        call = getattr(self._executor, name).remote(*arguments)
        return await answer(call, f"batch executor: {name}", self._command_s + self._grace_s, GangLost)


class RayRewards:
    """`Rewards` over the pool, round robin. A worker that dies is asked again elsewhere once.

    A worker is sent no more than it scores soon, so that `reward.timeout_s` and the caller's deadline count the same
    wait: a queue of slow scorers is no failure.
    """

    def __init__(self, workers: Sequence[ActorHandle], settings: Reward):
        places = calls_at_once(settings)
        self._workers = itertools.cycle([(worker, asyncio.Semaphore(places)) for worker in workers])
        self._deadline_s = longest_call_s(settings)

    async def score(self, payload: PayloadRef) -> Score:
        failure = ""
        for _ in range(2):
            worker, places = next(self._workers)
            async with places:
                call = worker.score.remote(payload.handle)
                try:
                    return await answer(call, f"reward of {payload.key}", self._deadline_s)
                except PayloadLost as error:  # no other worker could read it either
                    return Unscored(str(error), kind="infrastructure")
                except WorkerFailed as error:
                    failure = str(error)
                except DeadlineExceeded as error:
                    failure = str(error)
                    ray.cancel(call)
                except asyncio.CancelledError:
                    ray.cancel(call)  # nobody waits any more
                    raise
        return Unscored(failure, kind="infrastructure")
