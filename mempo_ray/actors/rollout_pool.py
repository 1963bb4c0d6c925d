"""`Rollouts` over Ray: episodes over agent workers, engines as members of a pool that may join, drain and die.

run     EpisodeRequest    Finished, as they end   agent workers   worker: what had not ended runs again
sync    WeightManifest    SyncReport              engines         engine: a new one, which pulls and proves
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from mempo_ray.actors.background import Background
from mempo_ray.actors.calls import CLOSE_S, answer, close_actor
from mempo_ray.actors.lease import Lease, SideBySide, Turns
from mempo_ray.actors.pool_keeper import PoolKeeper, rollout_size
from mempo_ray.actors.weight_sync import PushInto, Snapshots, sync_engines
from mempo_ray.config.schema import Config
from mempo_ray.contracts import (
    EpisodeRequest,
    Finished,
    PayloadRef,
    TrajectorySummary,
    WeightManifest,
)
from mempo_ray.errors import (
    EngineFailed,
    InfrastructureError,
    TrainingError,
    WorkerFailed,
)
from mempo_ray.ports import EngineStatus, SyncReport

log = logging.getLogger(__name__)

MAX_WORKER_LIVES = 4
"""Streams that a share of episodes gets: a worker that dies more often in one step dies of its episodes."""

RETRY_S = 0.5  # between two tries to reach an actor that Ray restarts
READ_S = 60.0  # for a payload to be read from the object store


@dataclass
class Member:
    """One engine of the pool. `handle` changes at a restart; `name` does not."""

    name: str
    handle: ActorHandle
    index: int
    state: str = "starting"  # see ports.EngineStatus
    node: str = ""  # id of its Ray node, once it has started
    weight_version: int = -1
    gap: float = 0.0  # largest |Δ log-prob| of its last proof
    num_restarts: int = 0
    failure: str = ""  # why it was restarted last


@dataclass
class RolloutCounters:
    """What was tolerated since the last step; each has a ceiling in the configuration."""

    engine_restarts: int = 0
    recovery_s: float = 0.0
    worker_restarts: int = 0
    engines_joined: int = 0  # after the start: grown, or in the place of one that left
    engines_left: int = 0  # drained: shrunk, or their node was about to go
    joins_failed: int = 0  # asked for in vain; the pool goes on without

    def take(self) -> dict[str, float]:
        values = {f"rollout/{name}": float(value) for name, value in vars(self).items()}
        vars(self).update(vars(RolloutCounters()))
        return values


class WaitingShare:
    """How much of a step the run waits for generation: from the beginning of one `run` to that of the next."""

    def __init__(self) -> None:
        self.value = 1.0  # of the last whole cycle
        self._cycle_began: float | None = None
        self._waited_s = 0.0

    @contextlib.contextmanager
    def waiting(self, clock: Callable[[], float] = time.monotonic) -> Generator[None]:
        began = clock()
        if self._cycle_began is not None and began > self._cycle_began:
            self.value = self._waited_s / (began - self._cycle_began)
        self._cycle_began, self._waited_s = began, 0.0
        try:
            yield
        finally:
            self._waited_s = clock() - began


class RayRollouts:
    """`Rollouts`: episodes over agent workers, engines as members of a pool.

    Membership: starting → stale → serving → draining | dead. A member serves only after it has proven the current
    manifest. `_watch` sees a death at once (its watched call fails), starts a new actor in the same place, lets it pull
    the published snapshot, and hands the new handles to every agent worker; those ask unfinished turns again elsewhere.
    How many members there should be, and who must leave, is the business of `PoolKeeper`.

    Args:
        make_engine: a new actor in place `index`; places from `rollout.replicas` on have no bundle.
        free_place: called when the engine in a place has left for good.
    """

    def __init__(
        self,
        config: Config,
        make_engine: Callable[[int], ActorHandle],
        workers: Sequence[ActorHandle],
        free_place: Callable[[int], object] = lambda index: None,
    ):
        self._config = config
        self._make_engine, self._free_place = make_engine, free_place
        self._workers = list(workers)
        self._retrieval: Mapping[str, ActorHandle] = {}
        self._members: dict[str, Member] = {}
        self._places = itertools.count()
        self._joins: list[asyncio.Task] = []
        self._watchers: set[asyncio.Task] = set()
        self._background = Background(self.fail)  # the watchers, and whatever else nobody waits for
        self._keeper = PoolKeeper(self, rollout_size(config))
        self._snapshots = Snapshots(config.weight_sync.timeout_s)
        self.waiting_share = WaitingShare()
        self._manifest: WeightManifest | None = None
        self._telling = [asyncio.Lock() for _ in workers]  # what a worker hears last is what is true last
        self._changed = asyncio.Event()  # a member has changed its state
        self._sync_lock = asyncio.Lock()  # a joining engine must not miss a version that is being pushed
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.counters = RolloutCounters()
        colocated = config.placement.layout == "colocated"
        self.turns: Turns = Lease(self._pause_all, self._resume_all) if colocated else SideBySide()
        self.push: PushInto | None = None  # None: engines pull
        self.listeners: list[Callable[[Mapping[str, ActorHandle]], None]] = []  # told, in this process, who serves

    # -- membership -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to start `rollout.replicas` engines side by side; the first `sync` waits for them.

        So an engine's start (20 s on CPU) lies beside the cold start, not before it.
        """
        for _ in range(self._config.rollout.replicas):
            self._joins.append(asyncio.create_task(self._join(self._new_member())))
        self._background.start(self._keeper.keep(), "pool keeper")

    def grow(self, count: int) -> None:
        """Ask for so many more engines; they serve when they have started, pulled and proven the weights."""
        for _ in range(count):
            self._background.start(self._join(member := self._new_member(), is_late=True), f"join-{member.name}")

    def _new_member(self) -> Member:
        index = next(self._places)
        member = Member(f"rollout-{index}", self._make_engine(index), index)
        self._members[member.name] = member
        return member

    def retire(self, name: str, because: str) -> None:
        """Drain an engine at its turns' ends and let it go, in the background."""
        member = self._members[name]
        log.warning("%s leaves: %s", name, because)
        self._set_state(member, "draining")
        self._background.start(self._let_go(member), f"retire-{name}")

    async def _let_go(self, member: Member) -> None:
        with contextlib.suppress(
            InfrastructureError
        ):  # late turns are aborted, those of a dead engine lost: asked again
            await self.drain(member.name)
        await close_actor(member.handle)
        self._forget(member)
        self.counters.engines_left += 1

    def _forget(self, member: Member) -> None:
        """Its place is free, and what it asked Ray for is asked no more."""
        ray.kill(member.handle)
        self._set_state(member, "dead")
        del self._members[member.name]
        self._free_place(member.index)

    @property
    def members(self) -> Sequence[Member]:
        return tuple(self._members.values())

    def engines(self) -> list[EngineStatus]:
        return [
            EngineStatus(m.name, m.state, m.weight_version, num_restarts=m.num_restarts, node=m.node)
            for m in self._members.values()
        ]

    async def drain(self, engine: str) -> None:
        """No new turns for this engine; those in flight end."""
        member = self._members[engine]
        self._set_state(member, "draining")
        await self._announce()
        await answer(
            member.handle.drain.remote(), f"{engine}: drain", self._config.rollout.request_timeout_s, EngineFailed
        )

    def _set_state(self, member: Member, state: str) -> None:
        member.state = state
        self._changed.set()
        self._changed = asyncio.Event()

    def _set_proven(self, member: Member, version: int, gap: float) -> None:
        member.weight_version, member.gap = version, gap
        self._set_state(member, "serving")

    async def _join(self, member: Member, is_late: bool = False) -> None:
        """Its first start. One that fails it is replaced in the background, or given up where enough others are."""
        try:
            await self._load(member)
        except (InfrastructureError, TrainingError) as error:
            member.failure = str(error)
            self._set_state(member, "dead")
            self._background.start(self._replace(member), f"replace-{member.name}")
        else:
            self.counters.engines_joined += is_late
            await self._attend(member)

    async def _load(self, member: Member) -> None:
        """Start its engine; where weights are published already, it pulls and proves them."""
        start = member.handle.start.remote(None)
        status = await answer(start, f"{member.name}: start", self._config.rollout.startup_timeout_s, EngineFailed)
        member.node = status.node
        async with self._sync_lock:
            self._set_state(member, "stale")
            if (manifest := self._manifest) is not None:
                gap = await self._update(member.name, member.handle, member.node, manifest)
                self._set_proven(member, manifest.version, gap)

    async def _attend(self, member: Member) -> None:
        await self._announce()
        self._watchers.add(watcher := self._background.start(self._watch(member), f"watch-{member.name}"))
        watcher.add_done_callback(self._watchers.discard)

    async def _update(self, name: str, handle: ActorHandle, node: str, manifest: WeightManifest) -> float:
        manifest = await self._snapshots.within_reach(manifest, handle, node)
        call = handle.update.remote(manifest)
        return await answer(call, f"{name}: weights", self._config.weight_sync.timeout_s, EngineFailed)

    async def _watch(self, member: Member) -> None:
        with contextlib.suppress(RayError):  # the death that this call waits for
            await member.handle.watch.remote()
        if member.state == "draining" or self._members.get(member.name) is not member:  # it leaves, or has left
            return
        async with self.turns.held_by("engines"):
            await self._restart(member)

    async def _replace(self, member: Member) -> None:
        """It did not start."""
        if self._keeper.can_do_without(member):
            self._give_up(member)
            return
        async with self.turns.held_by("engines"):
            await self._restart(member)

    async def _restart(self, member: Member) -> None:
        """A new actor in the same place; one that fails before it serves is replaced too, up to the ceiling."""
        began = time.monotonic()
        while True:
            member.num_restarts += 1
            self.counters.engine_restarts += 1
            self._set_state(member, "dead")
            await self._announce()
            if sum(m.num_restarts for m in self._members.values()) > self._config.rollout.max_restarts:
                raise EngineFailed(
                    f"{member.name}: engines were restarted more than rollout.max_restarts="
                    f"{self._config.rollout.max_restarts} times; see the engine logs in the run folder"
                    + (f"; last: {member.failure}" if member.failure else "")
                )
            ray.kill(member.handle)
            member.handle = self._make_engine(member.index)
            try:
                await self._load(member)
            except (InfrastructureError, TrainingError) as error:  # it died as well, or its proof failed
                member.failure = str(error)
                if self._keeper.can_do_without(member):
                    self._give_up(member)
                    return
            else:
                break
        await self._attend(member)
        self.counters.recovery_s += time.monotonic() - began

    def _give_up(self, member: Member) -> None:
        log.warning("the pool goes on without %s: %s", member.name, member.failure)
        self.counters.joins_failed += 1
        self._forget(member)

    async def load_of(self, member: Member) -> Mapping[str, float]:
        """`Engine.stats` of one member. Raises EngineFailed, DeadlineExceeded."""
        return await answer(member.handle.stats.remote(), f"{member.name}: stats", CLOSE_S, EngineFailed)

    async def requests_waiting(self) -> int:
        """Turns that no engine has. An agent worker that is being restarted has none."""
        calls = (answer(worker.turns_waiting.remote(), "agent worker", CLOSE_S) for worker in self._workers)
        counts = await asyncio.gather(*calls, return_exceptions=True)
        return sum(count for count in counts if isinstance(count, int))

    def fail(self, error: BaseException) -> None:
        """Something that episodes need is lost for good: those that wait, or the sync that does, end with it."""
        if not self._failure.done():
            self._failure.set_exception(error)
            self._changed.set()

    async def _pause_all(self) -> None:
        """Engines give their GPUs to the policy."""
        await asyncio.gather(*self._joins)
        await self._tell_engines("pause", release_memory=True)

    async def _resume_all(self) -> None:
        await self._tell_engines("resume")

    async def _tell_engines(self, verb: str, **arguments: object) -> None:
        """One that does not obey is ended; its watcher replaces it when it is the engines' turn."""

        async def tell(member: Member) -> None:
            call = getattr(member.handle, verb).remote(**arguments)
            try:
                await answer(call, f"{member.name}: {verb}", self._config.weight_sync.timeout_s, EngineFailed)
            except InfrastructureError:
                ray.kill(member.handle)

        await asyncio.gather(*(tell(m) for m in self._members.values() if m.state in ("stale", "serving")))

    async def connect_retrieval(self, replicas: Mapping[str, ActorHandle]) -> None:
        """These replicas are searched, and no others. Returns when every agent worker knows."""
        self._retrieval = replicas
        await self._announce()

    async def _announce(self) -> None:
        """Tell all who ask engines which ones serve; an agent worker that Ray restarted knows nothing else either."""
        for tell in self.listeners:
            tell(self._serving())
        await asyncio.gather(*(self._tell(*told) for told in zip(self._workers, self._telling, strict=True)))

    def _serving(self) -> dict[str, ActorHandle]:
        return {m.name: m.handle for m in self._members.values() if m.state == "serving"}

    async def _tell(self, worker: ActorHandle, telling: asyncio.Lock) -> None:
        """What holds now, at each try; again while Ray restarts the worker."""
        timeout_s = self._config.policy.startup_timeout_s
        deadline = time.monotonic() + timeout_s
        async with telling:
            while True:
                try:
                    await answer(worker.set_retrieval.remote(self._retrieval), "agent worker: start", timeout_s)
                    await answer(worker.set_engines.remote(self._serving()), "agent worker: engines", timeout_s)
                    return
                except WorkerFailed:
                    if time.monotonic() > deadline:
                        raise
                    await asyncio.sleep(RETRY_S)

    # -- work -------------------------------------------------------------------------------------------

    async def sync(self, manifest: WeightManifest) -> SyncReport:
        """At least `rollout.min_replicas` engines (and one) hold and have proven `manifest.version`.

        One that fails is ended and replaced; with too few left, the replacements are waited for.

        Raises:
            TrainingError: no engine is left and at least one holds other weights than the policy's.
            EngineFailed: too few serve after `rollout.startup_timeout_s`, or `rollout.max_restarts` are used up.
        """
        began = time.monotonic()
        await asyncio.gather(*self._joins)
        self._joins.clear()
        async with self.turns.held_by("engines"), self._sync_lock:
            self._manifest = manifest
            lives = {m.name: m for m in self._members.values() if m.state in ("stale", "serving")}
            handles = {name: member.handle for name, member in lives.items()}
            updates = {
                name: functools.partial(self._update, name, handle, lives[name].node)
                for name, handle in handles.items()
            }
            push = None if self.push is None else functools.partial(_push, self.push, list(lives.values()))
            outcome = await sync_engines(manifest, updates, self._config.weight_sync.timeout_s, push)
            for name, member in lives.items():
                if member.handle is not handles[name] or member.state not in ("stale", "serving"):
                    continue  # it died meanwhile: its successor, which pulls this manifest, is no business of this sync
                if (failure := outcome.failed.get(name)) is None:
                    self._set_proven(member, manifest.version, outcome.gaps[name])
                else:
                    member.failure = failure
                    self._set_state(member, "dead")
                    ray.kill(member.handle)  # its watcher makes a new one
        serving = await self._enough_serving(manifest.version)
        await self._announce()
        gap = max(member.gap for member in serving)
        return SyncReport(manifest.version, time.monotonic() - began, num_engines=len(serving), max_gap=gap)

    async def _enough_serving(self, version: int) -> list[Member]:
        needed, timeout_s = max(1, self._config.rollout.min_replicas), self._config.rollout.startup_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if self._failure.done():
                        self._failure.result()
                    proven = [m for m in self._members.values() if (m.state, m.weight_version) == ("serving", version)]
                    if len(proven) >= needed:
                        return proven
                    await self._changed.wait()
        except TimeoutError:
            reasons = "; ".join(f"{m.name} is {m.state} ({m.failure})" for m in self._members.values() if m.failure)
            raise EngineFailed(
                f"fewer than {needed} engines (rollout.min_replicas) serve weights {version} after "
                f"rollout.startup_timeout_s={timeout_s:g} s: {reasons or 'none has started'}"
            ) from None

    async def run(self, requests: Sequence[EpisodeRequest]) -> AsyncIterator[Finished]:
        """Finished trajectories in order of completion. Siblings of a task go to one worker."""
        ended: asyncio.Queue[Finished] = asyncio.Queue()
        shares: list[list[EpisodeRequest]] = [[] for _ in self._workers]
        group_of = {task_id: i for i, task_id in enumerate(dict.fromkeys(r.task.task_id for r in requests))}
        for request in requests:
            shares[group_of[request.task.task_id] % len(shares)].append(request)
        async with self.turns.held_by("engines"):
            with self.waiting_share.waiting():
                pumps = [asyncio.create_task(self._pump(i, share, ended)) for i, share in enumerate(shares) if share]
                try:
                    for _ in range(len(requests)):
                        yield await self._next(ended, pumps)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)

    async def _next(self, ended: asyncio.Queue[Finished], pumps: Sequence[asyncio.Task]) -> Finished:
        getter = asyncio.ensure_future(ended.get())
        alive = [pump for pump in pumps if not pump.done()]
        try:
            while True:
                await asyncio.wait({getter, self._failure, *alive}, return_when=asyncio.FIRST_COMPLETED)
                if getter.done():
                    return getter.result()
                for waited in (self._failure, *pumps):
                    if waited.done() and waited.exception() is not None:
                        waited.result()
                alive = [pump for pump in alive if not pump.done()]
        finally:
            getter.cancel()

    async def _pump(self, index: int, share: list[EpisodeRequest], ended: asyncio.Queue[Finished]) -> None:
        """Stream one worker's trajectories; after its death, run what had not ended again on its next life."""
        waiting = {(r.task.task_id, r.sibling): r for r in share}
        for _ in range(MAX_WORKER_LIVES):
            try:
                async for finished in self._stream(index, list(waiting.values())):
                    waiting.pop((finished.summary.task_id, finished.summary.sibling))
                    ended.put_nowait(finished)
            except WorkerFailed:
                self.counters.worker_restarts += 1
                await self._announce()
            if not waiting:
                return
        raise WorkerFailed(f"agent worker {index} died again and again; {len(waiting)} episodes never ended")

    async def _stream(self, index: int, share: list[EpisodeRequest]) -> AsyncIterator[Finished]:
        """The worker yields payload, summary, payload, summary, …; both objects are owned by this process."""
        deadline_s = self._config.run.step_timeout_s
        payload = None
        stream = self._workers[index].run.options(num_returns="streaming").remote(share)
        try:
            for _ in range(len(share)):
                try:
                    payload = await answer(anext(stream), "agent worker: next trajectory", deadline_s)
                    ref = await answer(anext(stream), "agent worker: summary", deadline_s)
                except StopAsyncIteration:  # what ended the stream early lies in its last object
                    if payload is not None:
                        await answer(payload, "agent worker", READ_S)
                    raise WorkerFailed(f"agent worker {index}: its stream ended early") from None
                summary: TrajectorySummary = await answer(ref, "agent worker: summary", READ_S)
                key = f"{summary.task_id}/{summary.sibling}"
                yield Finished(summary, PayloadRef(key, payload, summary.num_bytes) if summary.num_turns else None)
        except BaseException:
            ray.cancel(stream)  # nobody waits for its other episodes: they would keep engines and places busy
            raise

    async def stats(self) -> dict[str, float]:
        """Sums of the agent workers' counters and this pool's own, since the last call."""
        calls = [worker.stats.remote() for worker in self._workers]
        shares = await asyncio.gather(*(answer(call, "agent worker: stats", CLOSE_S) for call in calls))
        sums = {key: float(sum(share[key] for share in shares)) for key in shares[0]}
        known, together = sums.pop("turns_of_known_groups"), sums.pop("turns_kept_together")
        return {
            **{f"rollout/{key}": value for key, value in sums.items()},
            **self.counters.take(),
            "rollout/affinity_hit_rate": together / max(known, 1.0),
            "rollout/num_serving": float(len(self._serving())),
            "rollout/num_joining": float(sum(m.state in ("starting", "stale") for m in self.members)),
            "rollout/waiting_share": self.waiting_share.value,
        }

    async def close(self) -> None:
        for task in self._joins:
            task.cancel()
        await asyncio.gather(self._background.close(), *self._joins, return_exceptions=True)
        await asyncio.gather(*(close_actor(m.handle) for m in self._members.values()))


async def _push(into: PushInto, members: Sequence[Member]) -> Mapping[str, str]:
    """The name of an engine's life is new after a restart, so that the trainer forms its group anew."""
    lives = {f"{member.name}/{member.num_restarts}": member for member in members}
    failed = await into({life: member.handle for life, member in lives.items()})
    return {lives[life].name: reason for life, reason in failed.items()}
