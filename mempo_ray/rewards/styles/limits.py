"""How many requests may start in a second, and how many may be in flight: decided here, awaited by whoever obeys."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Protocol


class Limiter(Protocol):
    """Permits for requests to services by name; one of them counts for a whole cluster (actors/limiter.py)."""

    async def acquire(self, name: str, timeout_s: float) -> int:
        """A permit for one request. Raises DeadlineExceeded: none within `timeout_s`."""
        ...

    async def release(self, name: str, permit: int) -> None:
        """The request has ended."""
        ...

    async def pause(self, name: str, seconds: float) -> None:
        """The service asked for quiet: no permit before that."""
        ...


@dataclass(frozen=True)
class Permit:
    number: int


@dataclass(frozen=True)
class Wait:
    """No permit now. Ask again after `seconds`, or when one is given back."""

    seconds: float


class Limits:
    """A pure state machine; the clock is passed in, in seconds.

    Requests start at least 1 / `requests_per_s` apart, so that no service sees a burst; at most `concurrency` are in
    flight. A permit that is not given back lapses after `lease_s`: its holder has died.
    """

    def __init__(self, requests_per_s: float, concurrency: int, lease_s: float) -> None:
        self._interval_s = 1 / requests_per_s
        self._concurrency = concurrency
        self._lease_s = lease_s
        self._next_start_s = -math.inf
        self._lapses_s: dict[int, float] = {}
        self._numbers = itertools.count()

    def take(self, now_s: float) -> Permit | Wait:
        """A permit for a request that starts now."""
        self._lapses_s = {number: lapse_s for number, lapse_s in self._lapses_s.items() if lapse_s > now_s}
        if now_s < self._next_start_s:
            return Wait(self._next_start_s - now_s)
        if len(self._lapses_s) >= self._concurrency:
            return Wait(min(self._lapses_s.values()) - now_s)
        permit = Permit(next(self._numbers))
        self._lapses_s[permit.number] = now_s + self._lease_s
        self._next_start_s = now_s + self._interval_s
        return permit

    def give_back(self, number: int) -> None:
        self._lapses_s.pop(number, None)

    def pause_until(self, time_s: float) -> None:
        """No start before `time_s`; an earlier pause that is longer stays."""
        self._next_start_s = max(self._next_start_s, time_s)
