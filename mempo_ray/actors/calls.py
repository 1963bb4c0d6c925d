"""Awaiting another actor: always with a deadline, always with a typed failure."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError, WorkerCrashedError

from mempo_ray.errors import DeadlineExceeded, InfrastructureError, MempoError, PayloadLost, WorkerFailed

T = TypeVar("T")

CLOSE_S = 20.0  # for one actor to close by itself before it is killed

DIED = (RayActorError, OutOfMemoryError, WorkerCrashedError)
"""What Ray raises when a process is gone; Ray ends actors itself where a node runs low on memory."""


async def answer(
    ref: Awaitable[T], what: str, deadline_s: float, on_death: type[InfrastructureError] = WorkerFailed
) -> T:
    """The value of a Ray reference.

    Raises:
        DeadlineExceeded: no answer within `deadline_s` seconds.
        on_death: the actor died, or is unavailable (its call may or may not have run).
        PayloadLost: an argument left the object store.
        MempoError: whatever typed error the actor raised, without Ray's wrapping.
    """
    try:
        return await asyncio.wait_for(_value(ref), deadline_s)
    except TimeoutError:
        raise DeadlineExceeded(f"{what}: no answer within {deadline_s:g} s") from None
    except DIED as error:
        raise on_death(f"{what}: {first_line(error)}") from error
    except ObjectLostError as error:
        raise PayloadLost(f"{what}: {first_line(error)}") from error
    except RayTaskError as error:
        if isinstance(error.cause, ObjectLostError):
            raise PayloadLost(f"{what}: {error.cause}") from error
        if isinstance(error.cause, MempoError):
            raise error.cause from None
        raise


def first_line(error: Exception) -> str:
    """Ray's messages go on for pages; their first line says what happened."""
    return str(error).strip().partition("\n")[0]


async def _value(ref: Awaitable[T]) -> T:
    return await ref


async def close_actor(handle: ActorHandle) -> None:
    """Let an actor close by itself, then make sure that it is gone."""
    with contextlib.suppress(InfrastructureError):  # it is dead or stuck: the kill below is what counts
        await answer(handle.close.remote(), "close", CLOSE_S)
    ray.kill(handle)
