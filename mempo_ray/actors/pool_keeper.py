"""Who should be in a pool of rollout engines or retrieval replicas: looked at once a second, decided here and in
placement/elastic.py.

    look                                   do
    a node is about to go (Ray drains it)  its replicas leave as soon as they may, as many others are asked for
    fewer than the pool should have        ask for more
    fewer than `min_replicas` for long     the run ends
    an elastic pool: its load              grow, or let those leave that came last

The pool obeys: a replica that is asked for has no bundle, so Ray, or its autoscaler, finds a node for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from mempo_ray.actors.cluster import draining_nodes
from mempo_ray.config.schema import Config, Scaling
from mempo_ray.errors import EngineFailed, InfrastructureError, ToolFailed
from mempo_ray.placement.elastic import Bounds, ElasticPolicy, Reading, Replica

if TYPE_CHECKING:
    from mempo_ray.actors.rollout_pool import WaitingShare

log = logging.getLogger(__name__)

TICK_S = 1.0


class Member(Protocol):
    """A replica, as its pool knows it."""

    name: str
    state: str  # see ports.EngineStatus; a retrieval replica is never stale
    node: str  # id of its Ray node, once it has started
    failure: str  # why it was lost last


M = TypeVar("M", bound=Member)


class Pool(Protocol[M]):
    """What the keeper asks of `RayRollouts` and `RetrievalReplicas`."""

    waiting_share: WaitingShare

    @property
    def members(self) -> Sequence[M]: ...

    def grow(self, count: int) -> None: ...

    def retire(self, name: str, because: str) -> None: ...

    async def load_of(self, member: M) -> Mapping[str, float]:
        """`num_in_flight`: requests that run and queue there; `kv_use`, where there is a KV cache."""
        ...

    async def requests_waiting(self) -> int:
        """Requests that no replica has."""
        ...


@dataclass(frozen=True)
class PoolSize:
    """What the configuration says of the size of a pool; `section` and `startup_key` are its own words, for messages.

    `bounds` is None where the pool is fixed; `may_move` says whether its replicas leave a node that is about to go.
    """

    section: str
    replicas: int
    min_replicas: int
    bounds: Bounds | None
    scaling: Scaling
    startup_key: str
    startup_timeout_s: float
    too_few: type[InfrastructureError]
    may_move: bool = True


def rollout_size(config: Config) -> PoolSize:
    """Of the engines. One that shares a rank's GPU cannot come or go."""
    rollout, is_apart = config.rollout, config.placement.layout != "colocated"
    bounds = Bounds(rollout.min_replicas, rollout.max_replicas, rollout.max_num_seqs, rollout.max_kv_use)
    return PoolSize(
        "rollout",
        rollout.replicas,
        rollout.min_replicas,
        bounds if is_apart and rollout.min_replicas < rollout.max_replicas else None,
        rollout.scaling,
        "rollout.startup_timeout_s",
        rollout.startup_timeout_s,
        EngineFailed,
        may_move=is_apart,
    )


def retrieval_size(config: Config) -> PoolSize:
    """Of the retrieval replicas: one works on a batch at once."""
    retrieval, (least, most) = config.retrieval, config.retrieval.bounds
    return PoolSize(
        "retrieval",
        retrieval.replicas,
        least,
        Bounds(least, most, retrieval.max_batch) if retrieval.is_elastic else None,
        retrieval.scaling,
        "policy.startup_timeout_s",
        config.policy.startup_timeout_s,
        ToolFailed,
    )


class PoolKeeper(Generic[M]):
    """See above. `tick` is one look.

    Args:
        nodes_going: ids of the nodes that are about to go.
    """

    def __init__(
        self,
        pool: Pool[M],
        size: PoolSize,
        clock: Callable[[], float] = time.monotonic,
        nodes_going: Callable[[], frozenset[str]] = draining_nodes,
    ) -> None:
        self._pool, self._size = pool, size
        self._clock, self._nodes_going = clock, nodes_going
        self._policy = None if size.bounds is None else ElasticPolicy(size.bounds, size.scaling)
        self._target = size.replicas  # members that the pool should have
        self._going: frozenset[str] = frozenset()
        self._few_since: float | None = None

    async def keep(self) -> None:
        """Until cancelled. Raises EngineFailed or ToolFailed: too few replicas for too long."""
        while True:
            await self.tick()
            await asyncio.sleep(TICK_S)

    async def tick(self) -> None:
        self._going = self._nodes_going() if self._size.may_move else frozenset()
        self._check_enough()
        if self._policy is not None:
            change = self._policy.decide(await self._reading())
            if change.grow:
                log.warning("%s: %d more are asked for: %s", self._size.section, change.grow, change.because)
                self._target = len(self._staying()) + change.grow
            for name in change.shrink:
                self._pool.retire(name, change.because)
                self._target = len(self._staying())
        if (missing := self._target - len(self._staying())) > 0:
            self._pool.grow(missing)
        self._send_away()

    def can_do_without(self, member: M) -> bool:
        """Whether an elastic pool need not replace this one, which did not start. It then has one less to have."""
        others = sum(m is not member for m in self._staying())
        if self._policy is None or others < max(1, self._size.min_replicas):
            return False
        self._target = min(self._target, others)
        return True

    def _staying(self) -> list[M]:
        """Those that count: in service, on their way, or being replaced."""
        return [m for m in self._pool.members if m.state != "draining" and not self._must_go(m)]

    def _must_go(self, member: M) -> bool:
        return member.node in self._going and member.state in ("stale", "serving")

    def _send_away(self) -> None:
        """From nodes that are about to go; the last that serves stays until another does, or its node is gone."""
        serving = [m for m in self._pool.members if m.state == "serving"]
        others = any(not self._must_go(m) for m in serving)
        for member in self._pool.members:
            if self._must_go(member) and (others or member.state == "stale"):
                self._pool.retire(member.name, "its node is about to go")

    def _check_enough(self) -> None:
        least = self._size.min_replicas
        alive = sum(m.state in ("stale", "serving") for m in self._pool.members)
        now = self._clock()
        if alive >= least:
            self._few_since = None
            return
        self._few_since = now if self._few_since is None else self._few_since
        if now - self._few_since > self._size.startup_timeout_s:
            reasons = "; ".join(f"{m.name} is {m.state} ({m.failure})" for m in self._pool.members if m.failure)
            raise self._size.too_few(
                f"fewer than {least} live replicas ({self._size.section}.min_replicas) for more than "
                f"{self._size.startup_key}={self._size.startup_timeout_s:g} s: {reasons or 'none has started'}"
            )

    async def _reading(self) -> Reading:
        serving = [m for m in self._staying() if m.state == "serving"]
        loads, waiting = await asyncio.gather(
            asyncio.gather(*(self._pool.load_of(m) for m in serving), return_exceptions=True),
            self._pool.requests_waiting(),
        )
        replicas = []
        for member, load in zip(serving, loads, strict=True):
            if isinstance(load, BaseException):
                if not isinstance(load, InfrastructureError):
                    raise load
                continue  # it is dying: its watcher replaces it, so it counts as one that joins
            replicas.append(Replica(member.name, int(load["num_in_flight"]), load.get("kv_use", 0.0)))
        joining = len(self._staying()) - len(replicas)
        return Reading(self._clock(), tuple(replicas), joining, waiting, self._pool.waiting_share.value)
