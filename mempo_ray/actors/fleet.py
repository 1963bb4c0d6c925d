"""All long-lived actors of a run: made, started and closed here, handed out as the ports that the driver sees.

    open_fleet   config, plan   Fleet: rollouts (rollout_pool.py), policy, rewards, payloads (adapters.py), search
                                on failure: a typed error, and whatever had been started is closed

Only `actors/` holds handles and awaits Ray's references; the driver's loop sees neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import math
import shutil
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from mempo_ray.actors.adapters import KEPT_SNAPSHOTS, Payloads, RayPolicy, RayRewards
from mempo_ray.actors.agent_loop import RemoteAgentLoopWorker
from mempo_ray.actors.batch_executor import BatchExecutorActor, GangRunner
from mempo_ray.actors.calls import answer, close_actor
from mempo_ray.actors.engine_logprobs import EngineLogProbs
from mempo_ray.actors.limiter import JudgeLimiterActor
from mempo_ray.actors.policy import PolicyActor
from mempo_ray.actors.retrieval import RemoteRetrievalActor, index_id, prepare_index
from mempo_ray.actors.retrieval_replicas import RetrievalReplicas, Serving
from mempo_ray.actors.reward import RewardManagerActor
from mempo_ray.actors.reward_model import RewardModelActor
from mempo_ray.actors.rollout import RemoteRolloutActor
from mempo_ray.actors.rollout_pool import RayRollouts
from mempo_ray.actors.search import SearchClient, record_file
from mempo_ray.actors.search_record import merge_record
from mempo_ray.actors.shared_folder import check_shared
from mempo_ray.actors.weight_sync import choose_transport
from mempo_ray.agent.tokenizer import FileTokenizer
from mempo_ray.algo.memory_reward import plan_probes
from mempo_ray.config.models import read_model_shape
from mempo_ray.config.schema import Config
from mempo_ray.contracts import (
    Passage,
)
from mempo_ray.errors import (
    GangLost,
)
from mempo_ray.observability.run_folder import RunFolder
from mempo_ray.placement.plan import Plan
from mempo_ray.placement.reserve import Reservation, reserve
from mempo_ray.training.settings import RankSettings

MEMORY = Path("/dev/shm")
SNAPSHOTS = "mempo-"
"""How folders of published weights in MEMORY begin."""


@dataclass(frozen=True)
class Fleet:
    """The ports of a run. `policy` is None where nothing is trained (`mempo-ray eval`, `ask`); `engine_scorer` is
    None where the policy scores memories itself (`memory_reward.scorer_engine: policy`)."""

    rollouts: RayRollouts
    rewards: RayRewards
    search: SearchClient
    retrieval: RetrievalReplicas
    payloads: Payloads
    policy: RayPolicy | None
    engine_scorer: EngineLogProbs | None = None


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
        ConfigError: the run's folder is not the same one on every node that uses it.
        InfrastructureError: an actor did not start in time.
    """
    tokenizer = FileTokenizer.from_folder(model_dir)
    async with AsyncExitStack() as stack:
        reservation = await reserve(plan, config.placement.timeout_s)
        stack.callback(reservation.release)
        await check_shared(config, folder.root, reservation)
        record = record_file(config.retrieval, folder.root)
        actors = _Actors(config, reservation, model_dir, folder, tokenizer.end_of_turn_id, record)
        index = folder.root / "index"
        if config.retrieval.mode == "record" and record is not None:
            stack.callback(lambda: merge_record(record, index_id(config.retrieval, index)))  # once all are closed

        async def closing(handle: ActorHandle) -> ActorHandle:
            stack.push_async_callback(close_actor, handle)
            return handle

        workers = [await closing(actors.agent_loop(i)) for i in range(config.agent.workers)]
        rollouts = RayRollouts(config, actors.engine, workers, functools.partial(reservation.give_back, "rollout"))
        stack.push_async_callback(rollouts.close)
        colocated = config.placement.layout == "colocated"
        if with_engines and not colocated:
            rollouts.start()
        search = SearchClient(config.retrieval, config.agent.limits.search_s, record)
        stack.push_async_callback(search.close)

        async def announce(replicas: Serving) -> None:
            search.announce(replicas)
            await rollouts.connect_retrieval(replicas)

        if config.retrieval.needs_index:
            index = await asyncio.to_thread(prepare_index, config.retrieval, passages, index)
        retrieval = RetrievalReplicas(
            config,
            functools.partial(actors.retrieval, folder=index),
            announce,
            functools.partial(reservation.give_back, "retrieval"),
            rollouts.waiting_share,
            rollouts.fail,
        )
        stack.push_async_callback(retrieval.close)
        limiter = await closing(actors.limiter()) if config.reward.has_judges else None
        models = {name: await closing(actors.reward_model(i, name)) for i, name in enumerate(config.reward.models)}
        rewards = [await closing(actors.reward(i, limiter, models)) for i in range(config.reward.workers)]
        startup_s = config.policy.startup_timeout_s
        await retrieval.start()
        for name, handles in (("reward model", models.values()), ("reward", rewards)):
            await asyncio.gather(*(answer(h.ping.remote(), f"{name}: start", startup_s) for h in handles))
        await search.check()
        policy = None
        if with_policy:
            one_node = sum(node["Alive"] for node in ray.nodes()) == 1
            snapshots = stack.enter_context(kept_while_alive(weights_dir(config, folder, one_node)))
            gang = GangHost(actors, startup_s)
            stack.push_async_callback(gang.close)
            policy = RayPolicy(gang, await gang.start(), config, snapshots, rollouts.turns)
            rollouts.push = policy.push if choose_transport(config) != "pull" else None
        if with_engines and colocated:
            rollouts.start()  # vLLM measures what the ranks have left it, so they must be there first
        scorer = None
        if config.memory_reward.scorer_engine == "vllm":
            scorer = EngineLogProbs(config.rollout.replicas, rollouts.turns)
            rollouts.listeners.append(scorer.announce)
        yield Fleet(rollouts, RayRewards(rewards, config.reward), search, retrieval, Payloads(), policy, scorer)


class GangHost:
    """The FSDP ranks behind their executor: started together, ended together, started again after a loss."""

    def __init__(self, actors: _Actors, startup_s: float) -> None:
        self._actors, self._startup_s = actors, startup_s
        self._living = AsyncExitStack()
        self.node = ""  # id of rank 0's Ray node, which publishes

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
        self.node = await answer(ranks[0].__ray_call__.remote(_node_of), "policy: node", self._startup_s, GangLost)
        calls = [rank.start.remote(i, len(ranks), master, version) for i, rank in enumerate(ranks)]
        started = (answer(call, f"policy rank {i}: start", self._startup_s, GangLost) for i, call in enumerate(calls))
        await asyncio.gather(*started)
        executor = self._actors.executor(ranks, version)
        self._living.push_async_callback(close_actor, executor)
        return executor

    async def close(self) -> None:
        await self._living.aclose()


def _node_of(actor: object) -> str:
    return ray.get_runtime_context().get_node_id()


def weights_dir(config: Config, folder: RunFolder, one_node: bool, memory: Path = MEMORY) -> Path:
    """Published snapshots: in memory where there is one node and room; else in the (shared) run folder."""
    shape = read_model_shape(config.policy.model)
    num_bytes = shape.num_params * (4 if config.policy.dtype == "float32" else 2) if shape is not None else math.inf
    most = (KEPT_SNAPSHOTS + 1) * num_bytes  # the oldest goes when the next one is complete
    fits = one_node and memory.is_dir() and shutil.disk_usage(memory).free >= most
    root = memory / f"{SNAPSHOTS}{folder.root.name}" if fits else folder.root / "weights"
    root.mkdir(parents=True, exist_ok=True)
    return root


@contextmanager
def kept_while_alive(root: Path) -> Generator[Path]:
    """A folder that is removed at the end of the block, or, where this process is killed, by the next run beside it.

    Whose process lives is told by the lock that it holds on `<root>.lock`; so a killed run leaves no memory in use.
    """
    for left in root.parent.glob(f"{SNAPSHOTS}*.lock"):
        with contextlib.suppress(OSError), left.open("a") as lock:  # held by its run, or another user's
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left.with_name(left.name.removesuffix(".lock")), ignore_errors=True)
            left.unlink()
    own = root.with_name(f"{root.name}.lock")
    with own.open("a") as lock:
        with contextlib.suppress(OSError):  # a network's file system may have no locks, and then nobody takes it away
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield root
        finally:
            shutil.rmtree(root, ignore_errors=True)
            own.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Actors:
    """Makes the actors of each box, with the plan's resources and names that are unique to the run."""

    config: Config
    reservation: Reservation
    model_dir: Path
    folder: RunFolder
    end_of_turn_id: int
    record: Path | None

    lives: Counter[str] = field(default_factory=Counter)  # of a name: Ray may not have freed that of a dead one

    def _options(self, role: str, index: int) -> dict[str, Any]:
        """With the name `<run>/<role>-<index>`, or `<run>/life-2/<role>-<index>` for the first one's successor."""
        run, own = self.folder.root.name, f"{role}-{index}"
        self.lives[own] += 1
        life = self.lives[own]
        name = f"{run}/{own}" if life == 1 else f"{run}/life-{life}/{own}"
        return {**self.reservation.options(role, index), "name": name}

    def engine(self, index: int) -> Any:
        return RemoteRolloutActor.options(**self._options("rollout", index)).remote(
            f"rollout-{index}",
            str(self.model_dir),
            self.config.rollout,
            self.config.weight_sync.model_copy(update={"transport": choose_transport(self.config)}),
            self.end_of_turn_id,
            str(self.folder.logs.resolve()),
            scores=self.config.memory_reward.scorer_engine == "vllm",
        )

    def agent_loop(self, index: int) -> Any:
        options = self._options("agent_loop", index)
        probe_texts = functools.partial(plan_probes, settings=self.config.memory_reward)
        return RemoteAgentLoopWorker.options(**options, max_restarts=-1, max_concurrency=16).remote(
            index,
            self.config.agent,
            self.config.rollout,
            str(self.model_dir),
            probe_texts,
            self.config.plugins,
            self.config.retrieval,
            self.record,
            self.config.reward.sandbox,
        )

    def reward(self, index: int, limiter: ActorHandle | None, models: Mapping[str, ActorHandle]) -> Any:
        options = self._options("reward", index)
        return RewardManagerActor.options(**options, max_restarts=-1).remote(
            self.config.reward, self.config.plugins, limiter, models
        )

    def reward_model(self, index: int, name: str) -> Any:
        options = self._options("reward_model", index)
        return RewardModelActor.options(**options, max_restarts=-1).remote(name, self.config.reward.models[name])

    def limiter(self) -> Any:
        """No bundle of its own: it asks for no CPU."""
        name = f"{self.folder.root.name}/limiter-0"
        return JudgeLimiterActor.options(name=name, max_restarts=-1).remote(self.config.reward.styles)

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
