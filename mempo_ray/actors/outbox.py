"""Searches that are asked in one turn of the event loop travel to a replica in one message.

    searches ──▶ outbox ──at the turn's end──▶ messages of at most `most` searches ──▶ the replica
                                                                                          │
    callers  ◀── an outcome for each search: passages, or its own failure ◀───────────────┘
    on failure   a message that is lost fails each of its searches, and each is asked elsewhere by itself

A Ray call costs its two processes nearly a millisecond of processor time (`benchmarks/retrieval.py`), and searches come
in bursts: turns end together where their engine samples in batches, and searches that shared a micro-batch are answered
together. No search waits for others to come; one that the replica's cache could answer waits for those in its message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from mempo_ray.contracts import Passage

MOST = 16
"""Searches in a message: its answer, with three passages a query, stays below the 100 kB that Ray sends inline."""

Asked = tuple[list[str], int]
"""Queries and k of one search."""
Outcome = list[list[Passage]] | Exception


class Outbox:
    """Searches on their way to one replica.

    Args:
        send: asks the replica for the outcome of every search, in their order.
    """

    def __init__(self, send: Callable[[list[Asked]], Awaitable[list[Outcome]]], most: int = MOST) -> None:
        self._send, self._most = send, most
        self._waiting: list[tuple[Asked, asyncio.Future[list[list[Passage]]]]] = []
        self._messages: set[asyncio.Task[None]] = set()

    async def __call__(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Passages for each query. Raises the search's own failure, or that of its message."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._flush)
        found: asyncio.Future[list[list[Passage]]] = loop.create_future()
        self._waiting.append(((list(queries), top_k), found))
        return await found

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for start in range(0, len(waiting), self._most):
            message = asyncio.create_task(self._ask(waiting[start : start + self._most]))
            self._messages.add(message)
            message.add_done_callback(self._messages.discard)

    async def _ask(self, searches: Sequence[tuple[Asked, asyncio.Future[list[list[Passage]]]]]) -> None:
        outcomes: list[Outcome]
        try:
            outcomes = await self._send([asked for asked, _ in searches])
        except Exception as error:  # noqa: BLE001 - every caller gets it
            outcomes = [error] * len(searches)
        for (_, found), outcome in zip(searches, outcomes, strict=True):
            if found.done():  # its caller has left
                continue
            if isinstance(outcome, Exception):
                found.set_exception(outcome)
            else:
                found.set_result(outcome)
