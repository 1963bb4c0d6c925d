"""All long-lived actors of a run, and the ports that the driver sees instead of them.

    stage        consumes                    produces                    waits for         on failure
    open_fleet   config, plan                actors, started             ranks, index      typed error, all closed
    Rollouts     EpisodeRequest              Finished, as they end       agent workers     worker: its episodes again
                                                                                           engine: a new one, proven
    Rewards      PayloadRef                  Scored | Unscored           reward workers    Unscored(infrastructure)
    Policy       TrainPlan, LogProbRequest   StepReport, LogProbResult   batch executor    GangLost: `restart`

Only this file holds handles and awaits Ray's references; the driver's loop sees neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import shutil
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from mempo_ray.actors.agent_loop import RemoteAgentLoopWorker, RetrievalPool
from mempo_ray.actors.batch_executor import BatchExecutorActor, GangRunner
from mempo_ray.actors.calls import answer
from mempo_ray.actors.lease import Lease, SideBySide, Turns
from mempo_ray.actors.policy import PolicyActor
from mempo_ray.actors.retrieval import RemoteRetrievalActor, prepare_index
from mempo_ray.actors.reward import NUM_THREADS, RewardManagerActor
from mempo_ray.actors.rollout import RemoteRolloutActor, max_concurrency
from mempo_ray.actors.weight_sync import PushInto, choose_transport, sync_engines
from mempo_ray.agent.tokenizer import FileTokenizer
from mempo_ray.algo.memory_reward import plan_probes
from mempo_ray.config.models import read_model_shape
from mempo_ray.config.schema import Config
from mempo_ray.contracts import (
    EpisodeRequest,
    Finished,
    LogProbRequest,
    LogProbResult,
    Passage,
    PayloadRef,
    PushCommand,
    Score,
    SftBatch,
    StepReport,
    TrainPlan,
    TrajectoryBatch,
    TrajectorySummary,
    Unscored,
    WeightManifest,
)
from mempo_ray.errors import (
    DeadlineExceeded,
    EngineFailed,
    GangLost,
    InfrastructureError,
    PayloadLost,
    TrainingError,
    WorkerFailed,
)
from mempo_ray.observability.run_folder import RunFolder
from mempo_ray.placement.plan import Plan
from mempo_ray.placement.reserve import Reservation, reserve
from mempo_ray.ports import EngineStatus, SyncReport
from mempo_ray.training.settings import RankSettings

REPLACED_ROLES = ("rollout", "policy", "batch_executor")
"""Their actors are made again in a run, maybe before Ray has freed the name of the dead one; so they have none."""

KEPT_SNAPSHOTS = 2
"""Published weights that stay: the newest, and the one before, which a restarting engine may still be pulling."""

MAX_WORKER_LIVES = 4
"""Streams that a share of episodes gets: a worker that dies more often in one step dies of its episodes."""

MEMORY = Path("/dev/shm")

CLOSE_S = 20.0  # for one actor to close by itself before it is killed
RETRY_S = 0.5  # between two tries to reach an actor that Ray restarts
READ_S = 60.0  # for a payload to be read from the object store


class Payloads:
    """Reads payloads in the driver's process, for those few who must open them: the log and the evaluation."""

    async def read(self, ref: PayloadRef) -> TrajectoryBatch:
        return await answer(ref.handle, f"payload {ref.key}", READ_S, PayloadLost)


class TokenRoom:
    """At most `limit` tokens at once; a request that is larger than that has it all to itself."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def held(self, tokens: int) -> AsyncGenerator[None]:
        """Waits until there is room; whoever has it has a deadline of its own."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._held == 0 or self._held + tokens <= self._limit)
            self._held += tokens
        try:
            yield
        finally:
            async with self._changed:
                self._held -= tokens
                self._changed.notify_all()


class RayPolicy:
    """`Policy` and `LogProbs` over the batch executor, the gang's only caller. Commands wait for the policy's turn."""

    def __init__(self, gang: GangHost, executor: ActorHandle, config: Config, weights_dir: Path, turns: Turns):
        self._gang = gang
        self._executor = executor
        self._turns = turns
        self._transport = choose_transport(config)
        self._gpus_per_engine = config.rollout.tensor_parallel
        self._sync_s = config.weight_sync.timeout_s
        self._command_s = config.batch_executor.command_timeout_s
        self._grace_s = 10.0  # the executor's own deadline fires first and says more
        self._weights_dir = weights_dir
        self._numbers = itertools.count()
        self._snapshots: deque[Path] = deque(maxlen=KEPT_SNAPSHOTS)
        self._room = TokenRoom(config.batch_executor.max_queued_tokens)
        self._set_missing = 0

    async def __call__(self, request: LogProbRequest) -> LogProbResult:
        """The request's deadline counts from its admission: until the executor's queue has room, it waits here."""
        in_set, self._set_missing = self._set_missing > 0, max(0, self._set_missing - 1)
        room = nullcontext() if in_set else self._room.held(request.num_plain_tokens)  # a set waits for all its members
        async with room, self._turns.held_by("policy"):
            call = self._executor.logprobs.remote(request)
            return await answer(call, f"log-probs {request.id}", request.deadline_s + self._grace_s, GangLost)

    async def restart(self, version: int) -> None:
        """A new gang in the place of a lost one; it holds the model folder's weights and stays above `version`."""
        async with self._turns.held_by("policy"):
            self._executor = await self._gang.start(version)
            self._set_missing = 0

    async def train(self, plan: TrainPlan) -> StepReport:
        return await self._command("train", plan)

    async def fit(self, batch: SftBatch, lr: float, num_target_tokens: int) -> Mapping[str, float]:
        """One supervised optimiser step; `num_target_tokens` is the loss's denominator."""
        return await self._command("fit", batch, lr, num_target_tokens)

    async def freeze_reference(self) -> None:
        """Keep the present weights as π_ref and start RL with a fresh optimiser."""
        await self._command("freeze_reference")

    async def publish(self) -> WeightManifest:
        """Export this version once into a folder of its own, and remove all but the newest `KEPT_SNAPSHOTS`."""
        manifest = await self._command("publish", str(self._weights_dir / f"{next(self._numbers):06d}"))
        self._snapshots.append(Path(manifest.uri))
        for old in self._weights_dir.iterdir():
            if old not in self._snapshots:
                shutil.rmtree(old, ignore_errors=True)
        return manifest

    async def push(self, engines: Mapping[str, ActorHandle]) -> Mapping[str, str]:
        """Send the published version into these engines (by the names of their lives), in the engines' turn.

        Returns those that failed it, with the reason.
        """
        return await self._ask("push", PushCommand(self._transport, engines, self._gpus_per_engine, self._sync_s))

    async def save(self, uri: str, extra: Mapping[str, object]) -> None:
        await self._command("save", uri, extra)

    async def load(self, uri: str) -> Mapping[str, Any]:
        return await self._command("load", uri)

    async def begin(self, num_requests: int) -> None:
        """Deterministic mode: serve the next requests only when this many have come, in the order of their ids."""
        await self._command("begin", num_requests)
        self._set_missing = num_requests

    async def stats(self) -> Mapping[str, float]:
        return await self._ask("stats")

    async def _command(self, name: str, *arguments: object) -> Any:
        async with self._turns.held_by("policy"):
            return await self._ask(name, *arguments)

    async def _ask(self, name: str, *arguments: object) -> Any:
        call = getattr(self._executor, name).remote(*arguments)
        return await answer(call, f"batch executor: {name}", self._command_s + self._grace_s, GangLost)


class RayRewards:
    """`Rewards` over the pool, round robin. A worker that dies is asked again elsewhere once.

    A worker is sent no more than it scores at once, so that `reward.timeout_s` and the caller's deadline count the same
    wait: a queue of slow scorers is no failure.
    """

    def __init__(self, workers: Sequence[ActorHandle], timeout_s: float):
        self._workers = itertools.cycle([(worker, asyncio.Semaphore(NUM_THREADS)) for worker in workers])
        self._deadline_s = timeout_s + CLOSE_S

    async def score(self, payload: PayloadRef) -> Score:
        failure = ""
        for _ in range(2):
            worker, places = next(self._workers)
            async with places:
                call = worker.score.remote(payload.handle)
                try:
                    return await answer(call, f"reward of {payload.key}", self._deadline_s)
                except PayloadLost as error:  # no other worker could read it either
                    return Unscored(str(error), kind="infrastructure")
                except WorkerFailed as error:
                    failure = str(error)
                except DeadlineExceeded as error:
                    failure = str(error)
                    ray.cancel(call)
                except asyncio.CancelledError:
                    ray.cancel(call)  # nobody waits any more
                    raise
        return Unscored(failure, kind="infrastructure")


@dataclass
class Member:
    """One engine of the pool. `handle` changes at a restart; `name` does not."""

    name: str
    handle: ActorHandle
    state: str = "starting"  # see ports.EngineStatus
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

    def take(self) -> dict[str, float]:
        values = {
            "rollout/engine_restarts": float(self.engine_restarts),
            "rollout/recovery_s": self.recovery_s,
            "rollout/worker_restarts": float(self.worker_restarts),
        }
        self.engine_restarts, self.recovery_s, self.worker_restarts = 0, 0.0, 0
        return values


class RayRollouts:
    """`Rollouts`: episodes over agent workers, engines as members of a pool.

    Membership: starting → stale → serving → draining | dead. A member serves only after it has proven the current
    manifest. `_watch` sees a death at once (its watched call fails), starts a new actor in the same place, lets it pull
    the published snapshot, and hands the new handles to every agent worker; those ask unfinished turns again elsewhere.
    """

    def __init__(self, config: Config, make_engine: Callable[[int], ActorHandle], workers: Sequence[ActorHandle]):
        self._config = config
        self._make_engine = make_engine
        self._workers = list(workers)
        self._retrieval: list[ActorHandle] = []
        self._members: dict[str, Member] = {}
        self._joins: list[asyncio.Task] = []
        self._watchers: set[asyncio.Task] = set()
        self._manifest: WeightManifest | None = None
        self._telling = [asyncio.Lock() for _ in workers]  # what a worker hears last is what is true last
        self._changed = asyncio.Event()  # a member has changed its state
        self._sync_lock = asyncio.Lock()  # a joining engine must not miss a version that is being pushed
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.counters = RolloutCounters()
        colocated = config.placement.layout == "colocated"
        self.turns: Turns = Lease(self._pause_all, self._resume_all) if colocated else SideBySide()
        self.push: PushInto | None = None  # None: engines pull

    # -- membership -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to start `rollout.replicas` engines side by side; the first `sync` waits for them.

        So an engine's start (20 s on CPU) lies beside the cold start, not before it.
        """
        for index in range(self._config.rollout.replicas):
            member = Member(f"rollout-{index}", self._make_engine(index))
            self._members[member.name] = member
            self._joins.append(asyncio.create_task(self._join(member), name=f"join-{member.name}"))

    def engines(self) -> list[EngineStatus]:
        return [
            EngineStatus(m.name, m.state, m.weight_version, num_restarts=m.num_restarts) for m in self._members.values()
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

    async def _join(self, member: Member) -> None:
        await self._load(member)
        await self._attend(member)

    async def _load(self, member: Member) -> None:
        """Start its engine; where weights are published already, it pulls and proves them."""
        start = member.handle.start.remote(None)
        await answer(start, f"{member.name}: start", self._config.rollout.startup_timeout_s, EngineFailed)
        async with self._sync_lock:
            self._set_state(member, "stale")
            if (manifest := self._manifest) is not None:
                gap = await self._update(member.name, member.handle, manifest)
                self._set_proven(member, manifest.version, gap)

    async def _attend(self, member: Member) -> None:
        await self._announce()
        watcher = asyncio.create_task(self._watch(member), name=f"watch-{member.name}")
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watcher_ended)

    async def _update(self, name: str, handle: ActorHandle, manifest: WeightManifest) -> float:
        call = handle.update.remote(manifest)
        return await answer(call, f"{name}: weights", self._config.weight_sync.timeout_s, EngineFailed)

    async def _watch(self, member: Member) -> None:
        with contextlib.suppress(RayError):  # the death that this call waits for
            await member.handle.watch.remote()
        if member.state == "draining":
            self._set_state(member, "dead")
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
            member.handle = self._make_engine(int(member.name.rpartition("-")[2]))
            try:
                await self._load(member)
            except (InfrastructureError, TrainingError) as error:  # it died as well, or its proof failed
                member.failure = str(error)
            else:
                break
        await self._attend(member)
        self.counters.recovery_s += time.monotonic() - began

    def _watcher_ended(self, watcher: asyncio.Task) -> None:
        self._watchers.discard(watcher)
        if not watcher.cancelled() and (error := watcher.exception()) and not self._failure.done():
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

    async def connect_retrieval(self, actors: Sequence[ActorHandle]) -> None:
        self._retrieval = list(actors)
        await self._announce()

    async def _announce(self) -> None:
        """Tell every agent worker what it works with; one that Ray restarted knows nothing."""
        await asyncio.gather(*(self._tell(*told) for told in zip(self._workers, self._telling, strict=True)))

    async def _tell(self, worker: ActorHandle, telling: asyncio.Lock) -> None:
        """What holds now, at each try; again while Ray restarts the worker."""
        timeout_s = self._config.policy.startup_timeout_s
        deadline = time.monotonic() + timeout_s
        async with telling:
            while True:
                try:
                    await answer(worker.set_retrieval.remote(self._retrieval), "agent worker: start", timeout_s)
                    serving = {m.name: m.handle for m in self._members.values() if m.state == "serving"}
                    await answer(worker.set_engines.remote(serving), "agent worker: engines", timeout_s)
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
            updates = {name: functools.partial(self._update, name, handle) for name, handle in handles.items()}
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
        while True:
            await asyncio.wait({getter, self._failure, *alive}, return_when=asyncio.FIRST_COMPLETED)
            if getter.done():
                return getter.result()
            for waited in (self._failure, *pumps):
                if waited.done() and waited.exception() is not None:
                    getter.cancel()
                    waited.result()
            alive = [pump for pump in alive if not pump.done()]

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
                yield Finished(summary, PayloadRef(key, payload) if summary.num_turns else None)
        except BaseException:
            ray.cancel(stream)  # nobody waits for its other episodes: they would keep engines and places busy
            raise

    async def stats(self) -> dict[str, float]:
        """Sums of the agent workers' counters and this pool's own, since the last call."""
        calls = [worker.stats.remote() for worker in self._workers]
        shares = await asyncio.gather(*(answer(call, "agent worker: stats", CLOSE_S) for call in calls))
        sums = {key: float(sum(share[key] for share in shares)) for key in shares[0]}
        return {**{f"rollout/{key}": value for key, value in sums.items()}, **self.counters.take()}

    async def close(self) -> None:
        background = [*self._watchers, *self._joins]
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await asyncio.gather(*(close_actor(m.handle) for m in self._members.values()))


async def _push(into: PushInto, members: Sequence[Member]) -> Mapping[str, str]:
    """The name of an engine's life is new after a restart, so that the trainer forms its group anew."""
    lives = {f"{member.name}/{member.num_restarts}": member for member in members}
    failed = await into({life: member.handle for life, member in lives.items()})
    return {lives[life].name: reason for life, reason in failed.items()}


async def close_actor(handle: ActorHandle) -> None:
    """Let an actor close by itself, then make sure that it is gone."""
    with contextlib.suppress(InfrastructureError):  # it is dead or stuck: the kill below is what counts
        await answer(handle.close.remote(), "close", CLOSE_S)
    ray.kill(handle)


@dataclass(frozen=True)
class Fleet:
    """The ports of a run. `policy` is None where nothing is trained (`mempo-ray eval`, `ask`)."""

    rollouts: RayRollouts
    rewards: RayRewards
    search: RetrievalPool
    payloads: Payloads
    policy: RayPolicy | None


@asynccontextmanager
async def open_fleet(
    config: Config,
    plan: Plan,
    model_dir: Path,
    folder: RunFolder,
    passages: Iterable[Passage],
    *,
    with_policy: bool = True,
    with_engines: bool = True,
) -> AsyncGenerator[Fleet]:
    """Reserve, start and finally close all actors. Engines start in the background (see `RayRollouts.start`).

    Args:
        passages: of the synthetic corpus; read only where `retrieval.corpus` is synthetic and no index is given.
        with_policy: False for those who only generate (`mempo-ray eval`, `ask`); the plan may then leave the ranks out.
        with_engines: False for those who only train (`mempo-ray sft`).

    Raises:
        PlacementError: the cluster did not hold the plan in time.
        InfrastructureError: an actor did not start in time.
    """
    tokenizer = FileTokenizer.from_folder(model_dir)
    async with AsyncExitStack() as stack:
        reservation = await reserve(plan, config.placement.timeout_s)
        stack.callback(reservation.release)
        actors = _Actors(config, reservation, model_dir, folder, tokenizer.end_of_turn_id)

        async def closing(handle: ActorHandle) -> ActorHandle:
            stack.push_async_callback(close_actor, handle)
            return handle

        workers = [await closing(actors.agent_loop(i)) for i in range(config.agent.workers)]
        rollouts = RayRollouts(config, actors.engine, workers)
        stack.push_async_callback(rollouts.close)
        colocated = config.placement.layout == "colocated"
        if with_engines and not colocated:
            rollouts.start()
        index = await asyncio.to_thread(prepare_index, config.retrieval, passages, folder.root / "index")
        retrieval = [await closing(actors.retrieval(i, index)) for i in range(config.retrieval.replicas)]
        rewards = [await closing(actors.reward(i)) for i in range(config.reward.workers)]
        startup_s = config.policy.startup_timeout_s
        for name, handles in (("retrieval", retrieval), ("reward", rewards)):
            await asyncio.gather(*(answer(h.ping.remote(), f"{name}: start", startup_s) for h in handles))
        await rollouts.connect_retrieval(retrieval)
        policy = None
        if with_policy:
            one_node = sum(node["Alive"] for node in ray.nodes()) == 1
            snapshots = weights_dir(config, folder, one_node)
            stack.callback(shutil.rmtree, snapshots, ignore_errors=True)
            gang = GangHost(actors, startup_s)
            stack.push_async_callback(gang.close)
            policy = RayPolicy(gang, await gang.start(), config, snapshots, rollouts.turns)
            rollouts.push = policy.push if choose_transport(config) != "pull" else None
        if with_engines and colocated:
            rollouts.start()  # vLLM measures what the ranks have left it, so they must be there first
        search = RetrievalPool(retrieval, config.agent.limits.search_s)
        yield Fleet(rollouts, RayRewards(rewards, config.reward.timeout_s), search, Payloads(), policy)


class GangHost:
    """The FSDP ranks behind their executor: started together, ended together, started again after a loss."""

    def __init__(self, actors: _Actors, startup_s: float) -> None:
        self._actors, self._startup_s = actors, startup_s
        self._living = AsyncExitStack()

    async def start(self, version: int = 0) -> ActorHandle:
        """The executor of a new gang; what is left of an earlier one is ended first.

        Args:
            version: the highest weight version so far.
        """
        await self.close()
        ranks = [self._actors.policy(i) for i in range(self._actors.config.policy.ranks)]
        for rank in ranks:
            self._living.callback(ray.kill, rank)
        master = await answer(ranks[0].rendezvous.remote(), "policy: rendezvous", self._startup_s, GangLost)
        calls = [rank.start.remote(i, len(ranks), master, version) for i, rank in enumerate(ranks)]
        started = (answer(call, f"policy rank {i}: start", self._startup_s, GangLost) for i, call in enumerate(calls))
        await asyncio.gather(*started)
        executor = self._actors.executor(ranks, version)
        self._living.push_async_callback(close_actor, executor)
        return executor

    async def close(self) -> None:
        await self._living.aclose()


def weights_dir(config: Config, folder: RunFolder, one_node: bool, memory: Path = MEMORY) -> Path:
    """Published snapshots: in memory where there is one node and room; else in the (shared) run folder."""
    shape = read_model_shape(config.policy.model)
    num_bytes = shape.num_params * (4 if config.policy.dtype == "float32" else 2) if shape is not None else math.inf
    most = (KEPT_SNAPSHOTS + 1) * num_bytes  # the oldest goes when the next one is complete
    fits = one_node and memory.is_dir() and shutil.disk_usage(memory).free >= most
    root = memory / f"mempo-{folder.root.name}" if fits else folder.root / "weights"
    root.mkdir(parents=True, exist_ok=True)
    return root


@dataclass(frozen=True)
class _Actors:
    """Makes the actors of each box, with the plan's resources and names that are unique to the run."""

    config: Config
    reservation: Reservation
    model_dir: Path
    folder: RunFolder
    end_of_turn_id: int

    def _options(self, role: str, index: int) -> dict[str, Any]:
        name = f"{self.folder.root.name}/{role}-{index}"
        return {**self.reservation.options(role, index), "name": None if role in REPLACED_ROLES else name}

    def engine(self, index: int) -> Any:
        concurrency = max_concurrency(self.config.rollout)
        return RemoteRolloutActor.options(**self._options("rollout", index), max_concurrency=concurrency).remote(
            f"rollout-{index}",
            str(self.model_dir),
            self.config.rollout,
            self.config.weight_sync.model_copy(update={"transport": choose_transport(self.config)}),
            self.end_of_turn_id,
            str(self.folder.logs.resolve()),
        )

    def agent_loop(self, index: int) -> Any:
        options = self._options("agent_loop", index)
        probe_texts = functools.partial(plan_probes, settings=self.config.memory_reward)
        return RemoteAgentLoopWorker.options(**options, max_restarts=-1, max_concurrency=16).remote(
            index, self.config.agent, self.config.rollout, str(self.model_dir), probe_texts, self.config.plugins
        )

    def reward(self, index: int) -> Any:
        options = self._options("reward", index)
        return RewardManagerActor.options(**options, max_restarts=-1).remote(self.config.reward, self.config.plugins)

    def retrieval(self, index: int, folder: Path) -> Any:
        options = self._options("retrieval", index)
        return RemoteRetrievalActor.options(**options, max_restarts=-1).remote(
            self.config.retrieval, str(folder), self.config.agent.limits.search_s
        )

    def policy(self, index: int) -> Any:
        return PolicyActor.options(**self._options("policy", index)).remote(RankSettings.from_config(self.config))

    def executor(self, ranks: Sequence[ActorHandle], version: int) -> Any:
        gang = GangRunner(ranks, self.config.batch_executor.command_timeout_s, version)
        return BatchExecutorActor.options(**self._options("batch_executor", 0)).remote(self.config.batch_executor, gang)
