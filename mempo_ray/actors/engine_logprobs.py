"""`LogProbs` over the rollout engines (`memory_reward.scorer_engine: vllm`): forced decoding over their prefix cache.

consumes     LogProbRequest of the live policy at temperature 1 (memory requests; all others are the policy's)
produces     LogProbResult with the engine's weight version
waits        for one of few places an engine, so that turns do not queue behind scores; then for its deadline
on failure   engine: asked elsewhere, counted; none left: EngineFailed or DeadlineExceeded; other weights:
             TrainingError, as in the batch executor
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from ray.actor import ActorHandle

from mempo_ray.actors.agent_loop import EnginePool
from mempo_ray.actors.lease import Turns
from mempo_ray.actors.rollout import SCORES_AT_ONCE
from mempo_ray.contracts import LogProbRequest, LogProbResult
from mempo_ray.errors import ConfigError


class EngineLogProbs:
    """See above. `announce` is told who serves, as agent workers are (`RayRollouts.listeners`)."""

    def __init__(self, num_engines: int, turns: Turns, clock: Callable[[], float] = time.monotonic) -> None:
        self._engines = EnginePool(clock)
        self._turns, self._clock = turns, clock
        self._num_engines, self._places = num_engines, asyncio.Semaphore(SCORES_AT_ONCE * num_engines)
        self._num_running, self._running_since, self._busy_s = 0, 0.0, 0.0

    def announce(self, engines: Mapping[str, ActorHandle]) -> None:
        """These engines serve, and no others."""
        self._engines.announce(engines)
        while self._num_engines < len(engines):  # the pool has grown
            self._num_engines += 1
            for _ in range(SCORES_AT_ONCE):
                self._places.release()

    async def __call__(self, request: LogProbRequest) -> LogProbResult:
        """The request's deadline counts from its admission."""
        if request.model != "live" or request.temperature != 1:
            raise ConfigError(f"log-probs {request.id}: engines hold the live policy only, and score at temperature 1")
        payload = request.payload.handle if request.payload is not None else None
        sent = replace(request, payload=None)  # the reference itself is an argument: Ray fetches it for the engine

        def score(engine: ActorHandle, left_s: float) -> Awaitable[LogProbResult]:
            return engine.score.remote(sent, payload, left_s)

        async with self._turns.held_by("engines"), self._places:
            with self._busy():
                what, tokens = f"log-probs {request.id}", request.num_forest_tokens
                return await self._engines.ask(what, score, request.affinity, tokens, request.deadline_s)

    async def begin(self, num_requests: int) -> None:
        raise ConfigError("run.deterministic: engines score in any order; set memory_reward.scorer_engine=policy")

    def stats(self) -> dict[str, float]:
        """Since the last call: seconds with at least one request at an engine, and how often one failed."""
        values = {
            "scoring/engine_busy_s": self._busy_s,
            "scoring/num_engine_failures": float(self._engines.num_failures),
        }
        self._busy_s, self._engines.num_failures = 0.0, 0
        return values

    @contextmanager
    def _busy(self) -> Generator[None]:
        if self._num_running == 0:
            self._running_since = self._clock()
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            if self._num_running == 0:
                self._busy_s += self._clock() - self._running_since
