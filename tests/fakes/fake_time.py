"""An event loop in which waiting takes no time: where nothing is ready, its clock jumps to the next timer.

A test runs in it through a module-scoped fixture `event_loop_policy` that returns `FakeTimePolicy()`, or through
`asyncio.Runner(loop_factory=FakeTimeLoop)`. Code under test takes the time from `asyncio.get_running_loop().time`.
"""

from __future__ import annotations

import asyncio
import selectors


class WaitsForEverError(Exception):
    """Nothing is ready and no timer is set: outside of fake time this would hang."""


class _JumpingSelector(selectors.DefaultSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> list:
        if ready := super().select(0):
            return ready
        if timeout is None:
            raise WaitsForEverError
        self.now_s += max(0.0, timeout)
        return []


class FakeTimeLoop(asyncio.SelectorEventLoop):
    """Starts at 0 seconds."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


class FakeTimePolicy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> FakeTimeLoop:
        return FakeTimeLoop()
