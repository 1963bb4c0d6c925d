"""RolloutActor: one engine replica behind Ray. The engine's failures become EngineFailed here.

    state       means                                       generate
    starting    the model is being loaded                   EngineFailed
    stale       holds no proven weights                     EngineFailed
    serving     proven weights, requests welcome            turn
    draining    finishes what it has, takes nothing new     EngineFailed
    dead        engine core gone; only `close` is left      EngineFailed

A caller sees a dead *actor* as RayActorError (`calls.answer` turns it into EngineFailed). Its engine-core child is
killed by the kernel at once. The fleet then makes a new actor, whose `start(manifest)` pulls, proves and serves.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import psutil
import ray

from mempo_ray.config.schema import Rollout, WeightSync
from mempo_ray.contracts import WeightManifest
from mempo_ray.errors import DeadlineExceeded, EngineFailed
from mempo_ray.generation.engine import NO_WEIGHTS, Engine, build_engine
from mempo_ray.ports import EngineStatus, GenerateRequest, Generation

WATCH_EVERY_S = 0.5


class RolloutActor:
    """One engine. Plain class: in tests it runs without Ray.

    Make it with `max_concurrency(rollout)`, so that status and update are not queued behind turns.
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
    ) -> None:
        self._name = name
        self._rollout = rollout
        self._engine = engine or build_engine(
            name, model_dir, rollout, weight_sync, end_of_turn_id, Path(log_dir) / f"{name}.log"
        )
        self._started = False
        self._draining = False
        self._idle = asyncio.Condition()
        self._num_in_flight = 0

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
        if self._draining:
            raise EngineFailed(f"{self._name} is draining")
        self._num_in_flight += 1
        try:
            return await self._engine.generate(request)
        finally:
            self._num_in_flight -= 1
            async with self._idle:
                self._idle.notify_all()

    async def update(self, manifest: WeightManifest) -> float:
        """Take over and prove new weights; returns the largest |Δ log-prob| of the proof."""
        return await self._engine.update(manifest)

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
        return EngineStatus(self._name, self._state(), self._engine.weight_version, self._num_in_flight)

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

    async def transfer(self, step: str, info: Mapping[str, object] | None = None) -> None:
        """One step of a push from the trainer (weight_sync.EngineClient), see `Engine.transfer`."""
        await self._engine.transfer(step, info)

    def _state(self) -> str:
        if self._engine.errored:
            return "dead"
        if not self._started:
            return "starting"
        if self._draining:
            return "draining"
        return "stale" if self._engine.weight_version == NO_WEIGHTS else "serving"


def max_concurrency(rollout: Rollout) -> int:
    """Calls that a RolloutActor must be able to hold: all sequences, and room for control beside them."""
    return rollout.max_num_seqs + 8


RemoteRolloutActor = ray.remote(RolloutActor)
