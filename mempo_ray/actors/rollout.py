"""RolloutActor: one engine replica behind Ray. The engine's failures become EngineFailed here.

    state       means                                       generate, score
    starting    the model is being loaded                   EngineFailed
    stale       holds no proven weights                     EngineFailed
    serving     proven weights, requests welcome            turn, log-probs
    draining    finishes what it has, takes nothing new     EngineFailed
    dead        engine core gone; only `close` is left      EngineFailed

A caller sees a dead *actor* as RayActorError (`calls.answer` turns it into EngineFailed). Its engine-core child is
killed by the kernel at once. The fleet then makes a new actor, whose `start(manifest)` pulls, proves and serves.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import ray

from mempo_ray.actors.metrics_sink import ActorGauges
from mempo_ray.config.schema import Rollout, WeightSync
from mempo_ray.contracts import LogProbRequest, LogProbResult, TrajectoryBatch, WeightManifest
from mempo_ray.errors import DeadlineExceeded, EngineFailed, TrainingError
from mempo_ray.generation.engine import NO_WEIGHTS, Continuation, Engine, build_engine
from mempo_ray.observability.catalogue import ENGINE_STATES
from mempo_ray.ports import EngineStatus, GenerateRequest, Generation
from mempo_ray.training.rows import Limits, expand

WATCH_EVERY_S = 0.5

MEMORY = Path("/dev/shm")
"""Where a snapshot that came from another node lies until it is loaded, if there is room."""

CALLS_AT_ONCE = 4096
"""Calls that a RolloutActor has open at once: more than the episodes of all agent workers."""

SCORES_AT_ONCE = 4
"""Log-prob requests that an engine gets at once; each is two sequences a turn of its trajectory."""


class RolloutActor:
    """One engine. Plain class: in tests it runs without Ray.

    Turns queue in the engine, not before the actor (CALLS_AT_ONCE): so status, update and drain never wait behind them,
    and `stats` shows the queue.
    """

    def __init__(
        self,
        name: str,
        model_dir: str,
        rollout: Rollout,
        weight_sync: WeightSync,
        end_of_turn_id: int,
        log_dir: str,
        engine: Engine | None = None,
        *,
        scores: bool = False,
    ) -> None:
        self._name = name
        self._rollout = rollout
        self._limits = Limits(np.iinfo(np.int32).max, rollout.max_model_len)  # vLLM knows its vocabulary itself
        self._engine = engine or build_engine(
            name, model_dir, rollout, weight_sync, end_of_turn_id, Path(log_dir) / f"{name}.log", scores=scores
        )
        self._started = False
        self._draining = False
        self._idle = asyncio.Condition()
        self._num_in_flight = 0
        self._received: Path | None = None  # files of a snapshot from another node
        ActorGauges("rollout").keep(self._live)

    def __repr__(self) -> str:
        return f"RolloutActor({self._name})"

    async def start(self, manifest: WeightManifest | None = None) -> EngineStatus:
        """Load the model and, given a manifest, take over and prove its weights. Without one it stays stale.

        Raises:
            EngineFailed: the engine could not be started. TrainingError: the weights are not those of the manifest.
        """
        if not self._started:
            await self._engine.start()
            self._started = True
        if manifest is not None:
            await self._engine.update(manifest)
        return await self.status()

    async def generate(self, request: GenerateRequest) -> Generation:
        """One turn, see `Engine.generate`."""
        async with self._serving():
            return await self._engine.generate(request)

    async def score(self, request: LogProbRequest, payload: TrajectoryBatch | None, deadline_s: float) -> LogProbResult:
        """Log-probs of the request's marked tokens, by forced decoding: each marked segment is a prompt that ends at
        its first target, and vLLM's prefix cache does what the forest does in the ranks.

        Raises:
            TrainingError: the engine's weights are not of `request.policy_version`.
            DataError: the request cannot be computed (see `training.rows.expand`).
            EngineFailed, DeadlineExceeded: see `Engine.score`.
        """
        rows = expand(request, payload, self._limits)
        continuations = [
            Continuation(row.ids_T[: row.targets_K[0]].astype(np.int32), row.ids_T[row.targets_K].astype(np.int32))
            for row in rows
        ]
        async with self._serving():
            version, logprobs = await self._engine.score(continuations, request.affinity, deadline_s)
        if request.policy_version not in (None, version):
            raise TrainingError(
                f"log-probs of {request.id}: asked of version {request.policy_version}, {self._name} holds {version}"
            )
        return LogProbResult(request.id, version, tuple(logprobs))

    @asynccontextmanager
    async def _serving(self) -> AsyncGenerator[None]:
        """Counted in flight; refused while draining."""
        if self._draining:
            raise EngineFailed(f"{self._name} is draining")
        self._num_in_flight += 1
        try:
            yield
        finally:
            self._num_in_flight -= 1
            async with self._idle:
                self._idle.notify_all()

    async def update(self, manifest: WeightManifest) -> float:
        """Take over and prove new weights; returns the largest |Δ log-prob| of the proof."""
        try:
            return await self._engine.update(manifest)
        finally:
            self._forget()

    async def sees(self, folder: str) -> bool:
        """Whether this node has the folder, on a disk of its own or a shared one."""
        return await asyncio.to_thread(Path(folder).is_dir)

    async def receive(self, file: tuple[str, np.ndarray], is_first: bool) -> str:
        """Keep one file of a snapshot that lies on another node, for the next `update`. Returns the folder of all.

        Args:
            file: its name and its bytes, uint8, read straight from the object store.
        """
        if is_first or self._received is None:
            self._forget()
            room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2 * file[1].nbytes
            self._received = Path(tempfile.mkdtemp(prefix="mempo-weights-", dir=MEMORY if room else None))
        await asyncio.to_thread(file[1].tofile, self._received / file[0])
        return str(self._received)

    def _forget(self) -> None:
        if self._received is not None:
            shutil.rmtree(self._received, ignore_errors=True)
            self._received = None

    async def pause(self, release_memory: bool = False) -> None:
        """Freeze requests while the policy has the lease (colocated layout)."""
        await self._engine.pause(release_memory=release_memory)

    async def resume(self) -> None:
        await self._engine.resume()

    async def drain(self) -> EngineStatus:
        """Take no new request and finish those in flight.

        Raises:
            DeadlineExceeded: some are left after `rollout.request_timeout_s`; they have been aborted.
        """
        self._draining = True
        try:
            async with asyncio.timeout(self._rollout.request_timeout_s), self._idle:
                await self._idle.wait_for(lambda: self._num_in_flight == 0)
        except TimeoutError:
            count = await self._engine.abort_all()
            raise DeadlineExceeded(
                f"{self._name}: {count} requests left after {self._rollout.request_timeout_s:g} s of draining"
            ) from None
        return await self.status()

    async def status(self) -> EngineStatus:
        node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
        return EngineStatus(self._name, self._state(), self._engine.weight_version, self._num_in_flight, node=node)

    async def watch(self) -> None:
        """Return when the engine is dead or closed. A caller that waits here learns of an actor's death at once."""
        while not self._engine.errored and not self._draining:
            await asyncio.sleep(WATCH_EVERY_S)

    async def stats(self) -> dict[str, float]:
        return self._engine.stats()

    async def pids(self) -> list[int]:
        """This process first, then all its descendants (engine core and workers)."""
        return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]

    async def close(self) -> None:
        """Stop the engine and its children. Idempotent."""
        self._draining = True
        await self._engine.close()
        self._forget()

    async def transfer(self, step: str, info: Mapping[str, object] | None = None) -> None:
        """One step of a push from the trainer (weight_sync.EngineClient), see `Engine.transfer`."""
        await self._engine.transfer(step, info)

    def _live(self) -> dict[str, float]:
        state = {"weight_version": self._engine.weight_version, "state": ENGINE_STATES.index(self._state())}
        return {f"engine/{name}": value for name, value in {**self._engine.stats(), **state}.items()}

    def _state(self) -> str:
        if self._engine.errored:
            return "dead"
        if not self._started:
            return "starting"
        if self._draining:
            return "draining"
        return "stale" if self._engine.weight_version == NO_WEIGHTS else "serving"


RemoteRolloutActor = ray.remote(max_concurrency=CALLS_AT_ONCE)(RolloutActor)  # pyrefly: ignore[unexpected-keyword]
