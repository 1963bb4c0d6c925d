"""When a pool of replicas grows or shrinks. A decision only: it knows no actor, and the clock is passed in.

consumes   a `Reading` of the pool every second or so
produces   a `Change`: so many more replicas, or those that leave, and why
obeyed by  actors/pool_keeper.py and actors/rollout_pool.py

A pool grows when requests have queued for `up_wait_s` and shrinks when fewer replicas have been enough for
`down_idle_s`; any change starts both waits anew and is followed by `cooldown_s` of rest. So two opposite changes are
never closer than the shorter of the two waits, and a lasting shortage is met within `up_wait_s` and the cooldown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mempo_ray.config.schema import Scaling

EPSILON = 1e-9


@dataclass(frozen=True)
class Replica:
    """A replica that serves. `kv_use`: share of its KV cache that is in use (0 where there is none)."""

    name: str
    num_requests: int  # running and queued
    kv_use: float = 0.0


@dataclass(frozen=True)
class Reading:
    """A pool at time `now` (s, monotonic). `serving` is in the order of joining: who came last leaves first, since the
    first have places that are reserved for them.

    Example:
        >>> Reading(12.0, (Replica("rollout-0", num_requests=40),), num_joining=1, num_waiting=3)
        Reading(now=12.0, serving=(Replica(name='rollout-0', num_requests=40, kv_use=0.0),), num_joining=1, \
num_waiting=3, waiting_share=1.0)
    """

    now: float
    serving: tuple[Replica, ...]
    num_joining: int = 0  # asked for, starting, or pulling weights
    num_waiting: int = 0  # requests that no replica has
    waiting_share: float = 1.0  # of a step's time, in which the run waited for this pool


@dataclass(frozen=True)
class Bounds:
    """What one pool may be.

    Args:
        slots: requests that a replica works on at once; more of them queue.
        kv_use: share of a KV cache from which the pool is short of caches (1: never grows for that).
    """

    min_replicas: int
    max_replicas: int
    slots: int
    kv_use: float = 1.0

    @property
    def least(self) -> int:
        """A pool that serves has one replica at least."""
        return max(1, self.min_replicas)


@dataclass(frozen=True)
class Change:
    """What to do with a pool now; at most one of the two."""

    grow: int = 0
    shrink: tuple[str, ...] = ()
    because: str = ""


NOTHING = Change()


def num_wanted(reading: Reading, bounds: Bounds) -> int:
    """Replicas that would work on all present requests at once, with room in their KV caches.

    Example:
        40 requests at one replica of 16 slots: 3. A second one whose caches are full: 2 × 0.95 / 0.9, so 3 as well.
    """
    requests = reading.num_waiting + sum(replica.num_requests for replica in reading.serving)
    by_slots = math.ceil(requests / bounds.slots)
    by_cache = math.ceil(sum(replica.kv_use for replica in reading.serving) / bounds.kv_use - EPSILON)
    return min(max(by_slots, by_cache, bounds.least), max(bounds.least, bounds.max_replicas))


class ElasticPolicy:
    """Remembers since when a pool has been short or spare, and when it changed last."""

    def __init__(self, bounds: Bounds, scaling: Scaling) -> None:
        self._bounds, self._scaling = bounds, scaling
        self._short_since: float | None = None
        self._spare_since: float | None = None
        self._most_wanted = 0  # while it has been spare
        self._rested_at = -math.inf  # when the cooldown of the last change ends

    def decide(self, reading: Reading) -> Change:
        """What the pool should do now. Readings come in order of `now`."""
        now, scaling = reading.now, self._scaling
        have, wanted = len(reading.serving) + reading.num_joining, num_wanted(reading, self._bounds)
        if have < self._bounds.least:
            return self._changed(now, Change(self._bounds.least - have, because="below the least size"))
        is_short = have < wanted and reading.waiting_share >= scaling.min_waiting_share
        is_spare = wanted < have
        self._short_since = _since(self._short_since, is_short, now)
        self._spare_since = _since(self._spare_since, is_spare, now)
        self._most_wanted = max(self._most_wanted, wanted) if is_spare else 0
        if now < self._rested_at:
            return NOTHING
        if self._short_since is not None and now - self._short_since >= scaling.up_wait_s:
            waited_s = now - self._short_since
            return self._changed(now, Change(wanted - have, because=f"requests have queued for {waited_s:.0f} s"))
        if self._spare_since is not None and now - self._spare_since >= scaling.down_idle_s and not reading.num_joining:
            leaving = tuple(replica.name for replica in reading.serving[self._most_wanted - have :])
            idle_s = now - self._spare_since
            because = f"{self._most_wanted} of {have} have been enough for {idle_s:.0f} s"
            return self._changed(now, Change(shrink=leaving, because=because))
        return NOTHING

    def _changed(self, now: float, change: Change) -> Change:
        self._short_since = self._spare_since = None
        self._most_wanted, self._rested_at = 0, now + self._scaling.cooldown_s
        return change


def _since(since: float | None, holds: bool, now: float) -> float | None:
    """When a condition began to hold without a break."""
    return (now if since is None else since) if holds else None
