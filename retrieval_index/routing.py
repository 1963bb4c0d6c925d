"""Which replica gets a search, and what happens when it fails. No transport here: whoever sends it is passed in.

query ──choose_replica──▶ replica ──send──▶ result
              ▲                      │ it died, is full, …: suspect for a while
              └──── another one ◀────┘ each replica at most once
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

from retrieval_index.service import normalise_query

SLACK = 32
"""Queries that a query's home may have in flight above the least loaded: half a batch."""
SUSPECT_S = 2.0
"""How long a replica that failed is passed over; Ray starts an actor again within some seconds."""

T = TypeVar("T")


def choose_replica(loads: Mapping[str, int], query: str, slack: int = SLACK) -> str | None:
    """The replica for a query: its home, unless that is too busy; else the least loaded.

    A query's home is the replica with the largest hash of (replica, normalised query): rendezvous hashing (Thaler and
    Ravishankar, 1998). Equal queries meet in one cache, whoever asks them, and when a replica leaves or joins only
    its own share of the queries moves.

    Args:
        loads: replicas that may be asked → queries in flight there, as far as the caller knows.
        slack: how much more than the least loaded the home may carry and still be chosen.

    Returns:
        A name of `loads`; None where there is none.

    Example:
        home "a", loads {"a": 40, "b": 0}: slack 64 → "a"; slack 32 → "b".
    """
    if not loads:
        return None
    text = normalise_query(query)
    home = max(loads, key=lambda name: hashlib.blake2b(f"{name}\0{text}".encode(errors="replace")).digest())
    least = min(loads, key=lambda name: (loads[name], name))
    return home if loads[home] - loads[least] <= slack else least


class Router:
    """Sends searches to replicas, by load and affinity, and elsewhere when one fails.

    Args:
        elsewhere: errors after which another replica is asked.
        suspicious: errors after which a replica is suspect as well, but this call is not tried again: its deadline is
            over.
    """

    def __init__(
        self,
        elsewhere: tuple[type[Exception], ...],
        suspicious: tuple[type[Exception], ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._elsewhere, self._suspicious, self._clock = elsewhere, suspicious, clock
        self._replicas: tuple[str, ...] = ()
        self._in_flight: Counter[str] = Counter()
        self._suspect_until: dict[str, float] = {}
        self.num_failures = 0
        """Of a replica, after which another one was asked or the call failed."""

    def announce(self, replicas: Iterable[str]) -> None:
        """These may be asked, and no others. Calls in flight go on."""
        self._replicas = tuple(replicas)
        self._suspect_until.clear()

    async def ask(self, query: str, num_queries: int, send: Callable[[str], Awaitable[T]]) -> T | None:
        """The answer of some replica; None where there is no replica.

        Args:
            query: decides the home of the call (its first query).
            num_queries: what the call adds to the load of its replica.
            send: asks the replica of that name, with a deadline of its own: a cancelled caller says nothing about the
                replica.

        Raises:
            What `send` raised last, when every replica has been asked once.
        """
        failure: Exception | None = None
        tried: set[str] = set()
        while (name := self._choose(tried, query)) is not None:
            tried.add(name)
            self._in_flight[name] += num_queries
            try:
                return await send(name)
            except self._elsewhere as error:
                self._suspect(name)
                failure = error
            except self._suspicious:
                self._suspect(name)
                raise
            finally:
                self._in_flight[name] -= num_queries
        if failure is not None:
            raise failure
        return None

    def _choose(self, tried: set[str], query: str) -> str | None:
        """One that is not suspect, or else any: a suspect may have recovered, and there is nobody else."""
        now_s = self._clock()
        left = set(self._replicas) - tried  # others may have been announced meanwhile
        trusted = {name for name in left if self._suspect_until.get(name, 0.0) <= now_s}
        return choose_replica({name: self._in_flight[name] for name in trusted or left}, query)

    def _suspect(self, name: str) -> None:
        self.num_failures += 1
        self._suspect_until[name] = self._clock() + SUSPECT_S
