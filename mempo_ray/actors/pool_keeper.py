"""Who should be in a pool of rollout engines: looked at once a second, decided here and in placement/elastic.py.

    look                                   do
    a node is about to go (Ray drains it)  its engines leave at their turns' ends, as many others are asked for
    fewer than the pool should have        ask for more
    fewer than `min_replicas` for long     the run ends
    an elastic pool: its load              grow, or let those leave that came last

The pool obeys: an engine that is asked for has no bundle, so Ray, or its autoscaler, finds a node for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from mempo_ray.actors.cluster import draining_nodes
from mempo_ray.config.schema import Config
from mempo_ray.errors import EngineFailed, InfrastructureError
from mempo_ray.placement.elastic import Bounds, ElasticPolicy, Reading, Replica

if TYPE_CHECKING:
    from mempo_ray.actors.rollout_pool import Member, WaitingShare

log = logging.getLogger(__name__)

TICK_S = 1.0


class Pool(Protocol):
    """What the keeper asks of `RayRollouts`."""

    waiting_share: WaitingShare

    @property
    def members(self) -> Sequence[Member]: ...

    def grow(self, count: int) -> None: ...

    def retire(self, name: str, because: str) -> None: ...

    async def load_of(self, member: Member) -> Mapping[str, float]: ...

    async def turns_waiting(self) -> int: ...


def bounds_of(config: Config) -> Bounds | None:
    """None: the pool is fixed. An engine that shares a rank's GPU cannot come or go."""
    rollout = config.rollout
    if rollout.min_replicas == rollout.max_replicas or config.placement.layout == "colocated":
        return None
    return Bounds(rollout.min_replicas, rollout.max_replicas, rollout.max_num_seqs, rollout.max_kv_use)


class PoolKeeper:
    """See above. `tick` is one look.

    Args:
        nodes_going: ids of the nodes that are about to go.
    """

    def __init__(
        self,
        pool: Pool,
        config: Config,
        clock: Callable[[], float] = time.monotonic,
        nodes_going: Callable[[], frozenset[str]] = draining_nodes,
    ) -> None:
        self._pool, self._rollout = pool, config.rollout
        self._clock, self._nodes_going = clock, nodes_going
        bounds = bounds_of(config)
        self._policy = None if bounds is None else ElasticPolicy(bounds, config.rollout.scaling)
        self._target = config.rollout.replicas  # members that the pool should have
        self._going: frozenset[str] = frozenset()
        self._few_since: float | None = None

    async def keep(self) -> None:
        """Until cancelled. Raises EngineFailed: too few engines for too long."""
        while True:
            await self.tick()
            await asyncio.sleep(TICK_S)

    async def tick(self) -> None:
        self._going = self._nodes_going()
        self._check_enough()
        if self._policy is not None:
            change = self._policy.decide(await self._reading())
            if change.grow:
                log.warning("%d more engines are asked for: %s", change.grow, change.because)
                self._target = len(self._staying()) + change.grow
            for name in change.shrink:
                self._pool.retire(name, change.because)
                self._target = len(self._staying())
        if (missing := self._target - len(self._staying())) > 0:
            self._pool.grow(missing)
        self._send_away()

    def can_do_without(self, member: Member) -> bool:
        """Whether an elastic pool need not replace this one, which did not start. It then has one less to have."""
        others = sum(m is not member for m in self._staying())
        if self._policy is None or others < max(1, self._rollout.min_replicas):
            return False
        self._target = min(self._target, others)
        return True

    def _staying(self) -> list[Member]:
        """Those that count: in service, on their way, or being replaced."""
        return [m for m in self._pool.members if m.state != "draining" and not self._must_go(m)]

    def _must_go(self, member: Member) -> bool:
        return member.node in self._going and member.state in ("stale", "serving")

    def _send_away(self) -> None:
        """From nodes that are about to go; the last that serves stays until another does, or its node is gone."""
        serving = [m for m in self._pool.members if m.state == "serving"]
        others = any(not self._must_go(m) for m in serving)
        for member in self._pool.members:
            if self._must_go(member) and (others or member.state == "stale"):
                self._pool.retire(member.name, "its node is about to go")

    def _check_enough(self) -> None:
        least = self._rollout.min_replicas
        alive = sum(m.state in ("stale", "serving") for m in self._pool.members)
        now = self._clock()
        if alive >= least:
            self._few_since = None
            return
        self._few_since = now if self._few_since is None else self._few_since
        if now - self._few_since > self._rollout.startup_timeout_s:
            reasons = "; ".join(f"{m.name} is {m.state} ({m.failure})" for m in self._pool.members if m.failure)
            raise EngineFailed(
                f"fewer than {least} engines (rollout.min_replicas) for more than "
                f"rollout.startup_timeout_s={self._rollout.startup_timeout_s:g} s: {reasons or 'none has started'}"
            )

    async def _reading(self) -> Reading:
        serving = [m for m in self._staying() if m.state == "serving"]
        loads, waiting = await asyncio.gather(
            asyncio.gather(*(self._pool.load_of(m) for m in serving), return_exceptions=True),
            self._pool.turns_waiting(),
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
