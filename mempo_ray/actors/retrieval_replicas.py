"""The RetrievalActors of a run as members of a pool. (Who searches routes by itself: retrieval_pool.py.)

    starting ──it has loaded and answered──▶ serving ──it leaves──▶ draining ──nothing in flight, or late──▶ gone
        ▲                                       │
        └──────────Ray starts it again──────────┘ it died

    told       whoever searches, at every change: who serves
    on failure at the start: the run ends; later: counted, and the pool goes on without it or asks for another

How many there should be is the business of `PoolKeeper`. A fixed pool has no keeper: Ray alone looks after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from mempo_ray.actors.background import Background
from mempo_ray.actors.calls import CLOSE_S, answer, close_actor
from mempo_ray.actors.pool_keeper import PoolKeeper, retrieval_size
from mempo_ray.actors.rollout_pool import RETRY_S, WaitingShare
from mempo_ray.config.schema import Config
from mempo_ray.errors import InfrastructureError, ToolFailed

log = logging.getLogger(__name__)

Serving = Mapping[str, ActorHandle]
"""The replicas that serve, by name. Names are never used again, and Ray's restart of a replica changes neither."""


@dataclass
class Replica:
    """One member."""

    name: str
    handle: ActorHandle
    index: int
    state: str = "starting"  # "starting" | "serving" | "draining"
    node: str = ""  # id of its Ray node, once it has started
    failure: str = ""  # why it did not start, or come back


@dataclass
class MembershipCounters:
    """Since the last step."""

    replicas_joined: int = 0  # after the start
    replicas_left: int = 0  # drained
    joins_failed: int = 0  # did not start, or did not come back; the keeper decides whether another is asked for

    def take(self) -> dict[str, float]:
        values = {f"retrieval/{name}": float(value) for name, value in vars(self).items()}
        vars(self).update(vars(MembershipCounters()))
        return values


class RetrievalReplicas:
    """See above.

    Args:
        make_replica: a new actor in place `index`; places from `retrieval.replicas` on have no bundle.
        tell: everybody who searches; returns when they know.
        free_place: called when the replica in a place has left for good.
        waiting_share: of the rollouts, since searches are made while a step waits for its episodes.
        on_failure: told why the pool is at its end.
    """

    def __init__(
        self,
        config: Config,
        make_replica: Callable[[int], ActorHandle],
        tell: Callable[[Serving], Awaitable[None]],
        free_place: Callable[[int], object],
        waiting_share: WaitingShare,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._config, self._make_replica, self._tell, self._free_place = config, make_replica, tell, free_place
        self.waiting_share = waiting_share
        self._replicas: dict[str, Replica] = {}
        self._places = itertools.count()
        self._background = Background(on_failure)
        self._keeper = PoolKeeper(self, retrieval_size(config))
        self.counters = MembershipCounters()

    async def start(self) -> None:
        """`retrieval.replicas`, side by side; none where no index is needed. Returns when all serve.

        Raises:
            ToolFailed, DeadlineExceeded: one does not.
        """
        retrieval = self._config.retrieval
        first = [self._new_replica() for _ in range(retrieval.replicas if retrieval.needs_index else 0)]
        await asyncio.gather(*(self._answers(replica) for replica in first))
        await self._announce()
        if retrieval.is_elastic:
            for replica in first:
                self._background.start(self._attend(replica), f"watch-{replica.name}")
            self._background.start(self._keeper.keep(), "retrieval pool keeper")

    @property
    def members(self) -> Sequence[Replica]:
        return tuple(self._replicas.values())

    def grow(self, count: int) -> None:
        """Ask for so many more; they are searched when they have loaded and answered."""
        for _ in range(count):
            self._background.start(self._join(replica := self._new_replica()), f"join-{replica.name}")

    def retire(self, name: str, because: str) -> None:
        """No new searches for a replica; those in flight end, then it does, in the background."""
        log.warning("%s leaves: %s", name, because)
        replica = self._replicas[name]
        replica.state = "draining"
        self._background.start(self._let_go(replica), f"retire-{name}")

    async def load_of(self, member: Replica) -> Mapping[str, float]:
        """`RetrievalActor.stats` of one member. Raises ToolFailed, DeadlineExceeded."""
        return await answer(member.handle.stats.remote(), f"{member.name}: stats", CLOSE_S, ToolFailed)

    async def requests_waiting(self) -> int:
        """None: searches wait at replicas."""
        return 0

    def stats(self) -> dict[str, float]:
        """`retrieval/…` of the membership; nothing where no index is needed."""
        if not self._config.retrieval.needs_index:
            return {}
        states = [replica.state for replica in self.members]
        return {
            **self.counters.take(),
            "retrieval/num_serving": float(states.count("serving")),
            "retrieval/num_joining": float(states.count("starting")),
        }

    async def close(self) -> None:
        await self._background.close()
        await asyncio.gather(*(close_actor(replica.handle) for replica in self.members))

    def _new_replica(self) -> Replica:
        index = next(self._places)
        replica = Replica(f"retrieval-{index}", self._make_replica(index), index)
        self._replicas[replica.name] = replica
        return replica

    async def _answers(self, replica: Replica) -> None:
        """It serves once encoder and index have answered."""
        startup_s = self._config.policy.startup_timeout_s
        replica.node = await answer(replica.handle.ping.remote(), f"{replica.name}: start", startup_s, ToolFailed)
        replica.state = "serving"

    async def _join(self, replica: Replica) -> None:
        try:
            await self._answers(replica)
        except InfrastructureError as error:
            self._give_up(replica, error)
        else:
            self.counters.replicas_joined += 1
            await self._announce()
            await self._attend(replica)

    async def _attend(self, replica: Replica) -> None:
        """As long as it lives, and again when Ray has started it again."""
        while True:
            with contextlib.suppress(RayError):  # the death that this call waits for
                await replica.handle.watch.remote()
            if replica.state == "draining":
                return
            replica.state = "starting"
            await self._announce()
            try:
                await self._comes_back(replica)
            except InfrastructureError as error:
                self._give_up(replica, error)
                return
            await self._announce()

    async def _comes_back(self, replica: Replica) -> None:
        """Until Ray has started it again, calls of it fail at once."""
        deadline = time.monotonic() + self._config.policy.startup_timeout_s
        while True:
            try:
                await self._answers(replica)
                return
            except ToolFailed:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(RETRY_S)

    async def _let_go(self, replica: Replica) -> None:
        await self._announce()
        deadline_s = self._config.agent.limits.search_s
        with contextlib.suppress(InfrastructureError):  # a search that ends with its replica is asked elsewhere
            await answer(replica.handle.drain.remote(), f"{replica.name}: drain", deadline_s, ToolFailed)
        await close_actor(replica.handle)
        self._forget(replica)
        self.counters.replicas_left += 1

    def _give_up(self, replica: Replica, error: InfrastructureError) -> None:
        replica.failure = str(error)
        verb = "goes on without" if self._keeper.can_do_without(replica) else "asks for another one in place of"
        log.warning("the retrieval pool %s %s: %s", verb, replica.name, error)
        self.counters.joins_failed += 1
        self._forget(replica)

    def _forget(self, replica: Replica) -> None:
        ray.kill(replica.handle)
        del self._replicas[replica.name]
        self._free_place(replica.index)

    async def _announce(self) -> None:
        await self._tell({r.name: r.handle for r in self.members if r.state == "serving"})
