"""Engines and policy on the same GPUs take turns (architecture, decision 11); elsewhere they run side by side.

    held_by("policy")    waits until no engine work is left ─▶ engines pause and give their memory back ─▶ commands
    held_by("engines")   waits until no command is left     ─▶ engines take their memory and resume      ─▶ turns, sync

Within a side holders share: many turns, many log-prob requests. A side waits as long as the other holds it, and every
holder has a deadline of its own, so no wait is endless.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Literal, Protocol

Side = Literal["engines", "policy"]


class Turns(Protocol):
    """Who may use the GPUs now."""

    def held_by(self, side: Side) -> AbstractAsyncContextManager[None]: ...


class SideBySide:
    """Engines and policy have resources of their own: nobody waits."""

    def held_by(self, side: Side) -> AbstractAsyncContextManager[None]:
        return nullcontext()


class Lease:
    """One owner at a time; the engines have it first.

    Args:
        pause: makes all engines give the GPUs back. resume: the reverse. Each has its own deadline.
    """

    def __init__(self, pause: Callable[[], Awaitable[None]], resume: Callable[[], Awaitable[None]]) -> None:
        self._hand_over: dict[Side, Callable[[], Awaitable[None]]] = {"policy": pause, "engines": resume}
        self._side: Side = "engines"
        self._num_holders = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def held_by(self, side: Side) -> AsyncGenerator[None]:
        """Inside, the GPUs are this side's. A failed hand-over leaves them with the other side."""
        async with self._changed:
            await self._changed.wait_for(lambda: side == self._side or self._num_holders == 0)
            if side != self._side:
                await self._hand_over[side]()
                self._side = side
            self._num_holders += 1
        try:
            yield
        finally:
            async with self._changed:
                self._num_holders -= 1
                self._changed.notify_all()
