"""The one limiter of a cluster: permits for requests to judges, whichever worker makes them.

consumes   acquire / release / pause, by the name of a style
produces   permits, in the order in which they were asked for
waits      a caller at most its own timeout
on failure the permit of a worker that dies lapses after the style's `timeout_s`. Without the limiter nobody is judged;
           one that is started again waits as long, since it does not know who holds permits
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping

import ray
from ray.actor import ActorHandle

from mempo_ray.actors.calls import CLOSE_S, answer
from mempo_ray.config.schema import Judge, Style
from mempo_ray.errors import DeadlineExceeded
from mempo_ray.rewards.styles.limits import Limits, Permit


class JudgeLimiter:
    """A `Limiter` for the judges of `reward.styles`. Lives in one event loop."""

    def __init__(self, styles: Mapping[str, Style], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._gates = {name: _Gate(style.judge, clock) for name, style in styles.items() if style.style == "api"}

    async def ping(self) -> None:
        """Returns once the actor has started."""

    async def acquire(self, name: str, timeout_s: float) -> int:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._gates[name].enter()
        except TimeoutError:
            raise DeadlineExceeded(f"reward.styles.{name}.judge: no permit within {timeout_s:.3g} s") from None

    async def release(self, name: str, permit: int) -> None:
        self._gates[name].leave(permit)

    async def pause(self, name: str, seconds: float) -> None:
        self._gates[name].limits.pause_until(self._clock() + seconds)

    def forget(self) -> None:
        """Nobody knows who holds permits: give none before all of them must have lapsed."""
        for gate in self._gates.values():
            gate.limits.pause_until(self._clock() + gate.lease_s)

    async def close(self) -> None:
        """Nothing to close."""


class _Gate:
    """One queue: who is first waits for the limits, the others wait for him."""

    def __init__(self, judge: Judge, clock: Callable[[], float]) -> None:
        self.lease_s = judge.timeout_s
        self.limits = Limits(judge.requests_per_s, judge.concurrency, self.lease_s)
        self._clock = clock
        self._first = asyncio.Lock()
        self._left = asyncio.Event()

    async def enter(self) -> int:
        async with self._first:
            while not isinstance(decision := self.limits.take(self._clock()), Permit):
                self._left.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(decision.seconds):
                        await self._left.wait()
            return decision.number

    def leave(self, permit: int) -> None:
        self.limits.give_back(permit)
        self._left.set()


class RayLimiter:
    """`Limiter` over the actor."""

    def __init__(self, handle: ActorHandle) -> None:
        self._handle = handle

    async def acquire(self, name: str, timeout_s: float) -> int:
        call = self._handle.acquire.remote(name, timeout_s)
        try:
            return await answer(call, "judge limiter", timeout_s + CLOSE_S)
        except asyncio.CancelledError:
            ray.cancel(call)  # else it waits on, and takes a permit that nobody uses
            raise

    async def release(self, name: str, permit: int) -> None:
        await answer(self._handle.release.remote(name, permit), "judge limiter", CLOSE_S)

    async def pause(self, name: str, seconds: float) -> None:
        await answer(self._handle.pause.remote(name, seconds), "judge limiter", CLOSE_S)


class ClusterLimiter(JudgeLimiter):
    """The actor. One that Ray has started again keeps the limits, too."""

    def __init__(self, styles: Mapping[str, Style]) -> None:
        super().__init__(styles)
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self.forget()


JudgeLimiterActor = ray.remote(num_cpus=0, max_concurrency=4096)(ClusterLimiter)  # pyrefly: ignore[unexpected-keyword]
