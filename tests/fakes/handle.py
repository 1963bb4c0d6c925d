"""An actor handle in process: calls run at once in this event loop, and fail with Ray's error when the actor dies."""

from __future__ import annotations

import asyncio

import pytest
import ray
from ray.exceptions import RayActorError


class FakeHandle:
    """`handle.verb.remote(…)` runs the coroutine method `verb` of the object behind it, until the handle is killed."""

    def __init__(self, target: object) -> None:
        self._target, self._death = target, asyncio.Event()

    def __getattr__(self, verb: str) -> FakeMethod:
        if verb.startswith("__"):
            raise AttributeError(verb)
        return FakeMethod(getattr(self._target, verb), self._death)


class FakeMethod:
    def __init__(self, method, death: asyncio.Event) -> None:
        self._method, self._death = method, death

    def remote(self, *arguments: object, **named: object) -> asyncio.Task:
        return asyncio.create_task(self._run(arguments, named))

    async def _run(self, arguments: tuple, named: dict) -> object:
        work, died = asyncio.create_task(self._method(*arguments, **named)), asyncio.create_task(self._death.wait())
        try:
            await asyncio.wait({work, died}, return_when=asyncio.FIRST_COMPLETED)
            if self._death.is_set():
                raise RayActorError
            return work.result()
        finally:
            work.cancel()
            died.cancel()


def is_dead(handle: FakeHandle) -> bool:
    return handle._death.is_set()


def replace_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray.kill` and `ray.cancel` on fake handles and their calls."""
    monkeypatch.setattr(ray, "kill", lambda handle: handle._death.set())
    monkeypatch.setattr(ray, "cancel", lambda call: call.cancel())
