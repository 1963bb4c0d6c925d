"""The pool of retrieval replicas on real Ray: it follows its load; whoever joins, dies or leaves, no search is lost."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import ray
from ray.actor import ActorHandle

from mempo_ray.actors.calls import answer
from mempo_ray.actors.cluster import connected
from mempo_ray.actors.fleet import open_fleet
from mempo_ray.actors.retrieval import RetrievalActor, prepare_index
from mempo_ray.actors.retrieval_pool import RetrievalPool
from mempo_ray.actors.retrieval_replicas import RetrievalReplicas
from mempo_ray.actors.rollout_pool import WaitingShare
from mempo_ray.agent.group import siblings
from mempo_ray.config.load import load_file
from mempo_ray.config.models import model_folder
from mempo_ray.config.schema import Retrieval
from mempo_ray.contracts import Passage
from mempo_ray.data.tasks import read_tasks
from mempo_ray.data.world import AtlasSpec, build_atlas, same_atlas
from mempo_ray.generation.engine import unproven
from mempo_ray.observability.run_folder import RunFolder
from mempo_ray.placement.plan import make_plan
from mempo_ray.placement.ray_state import largest_shape

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WAIT_S = 90
BATCH, BATCH_S = 4, 0.1
BUSY, CALM = 3 * BATCH, 2  # callers: more than a replica's batch, and few enough for one replica
ELASTIC = [
    "retrieval.max_replicas=2",
    f"retrieval.max_batch={BATCH}",
    "retrieval.cache_entries=0",
    "retrieval.scaling.up_wait_s=1",
    "retrieval.scaling.down_idle_s=3",
    "retrieval.scaling.cooldown_s=1",
]


@ray.remote(num_cpus=0.1, max_concurrency=4096, max_restarts=-1)
class SlowReplica(RetrievalActor):
    """A real one, whose index takes BATCH_S for a batch."""

    def __init__(self, settings: Retrieval, folder: str, search_s: float) -> None:
        super().__init__(settings, folder, search_s)
        find = self._service._retriever.find

        def slowly(queries: Sequence[str], top_k: int) -> object:
            time.sleep(BATCH_S)
            return find(queries, top_k)

        self._service._retriever.find = slowly


class Callers:
    """Ask for facts, each one after its last answer, until told to stop; every answer must be the right one."""

    def __init__(self, pool: RetrievalPool, facts: Sequence[Passage]) -> None:
        self._pool, self._facts = pool, itertools.cycle(facts)
        self._stop = asyncio.Event()
        self._calling: list[asyncio.Task[None]] = []
        self.num_answers = 0

    def add(self, count: int) -> None:
        self._calling += [asyncio.create_task(self._call()) for _ in range(count)]

    async def _call(self) -> None:
        while not self._stop.is_set():
            fact = next(self._facts)
            (found,) = await self._pool([fact.text], 3)
            assert found[0].id == fact.id
            self.num_answers += 1

    async def stop(self) -> None:
        """Raises what a search has raised."""
        self._stop.set()
        await asyncio.wait_for(asyncio.gather(*self._calling), WAIT_S)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.05)


@pytest.fixture
def facts() -> list[Passage]:
    return list(build_atlas(AtlasSpec()).passages())


@pytest.fixture
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
    yield
    ray.shutdown()


async def test_the_pool_goes_from_one_replica_to_two_and_back_under_searches_and_loses_none(
    cluster: None, facts: list[Passage], tmp_path: Path
) -> None:
    config = load_file(None, ELASTIC)
    folder = str(prepare_index(config.retrieval, facts, tmp_path / "index"))
    failures: list[BaseException] = []
    router, freed = RetrievalPool(WAIT_S), []

    def make(index: int) -> ActorHandle:
        return SlowReplica.remote(config.retrieval, folder, WAIT_S)

    async def tell(replicas: Mapping[str, ActorHandle]) -> None:
        router.announce(replicas)

    pool = RetrievalReplicas(config, make, tell, freed.append, WaitingShare(), failures.append)
    await pool.start()

    def serving() -> list[str]:
        return [replica.name for replica in pool.members if replica.state == "serving"]

    calm, crowd = Callers(router, facts), Callers(router, facts[::-1])
    calm.add(CALM)
    crowd.add(BUSY - CALM)
    await until(lambda: len(serving()) == 2)
    first = pool.members[0]
    ray.kill(first.handle, no_restart=False)  # as if its process had crashed
    await until(lambda: first.state != "serving")
    before = calm.num_answers
    await until(lambda: calm.num_answers > before + BATCH)  # the other one answers meanwhile
    await until(lambda: len(serving()) == 2)
    assert first.name in serving()
    await crowd.stop()
    await until(lambda: serving() == ["retrieval-0"])
    await until(lambda: freed == [1])
    before = calm.num_answers
    await until(lambda: calm.num_answers > before + BATCH)
    await calm.stop()
    stats = pool.stats()
    assert [stats[f"retrieval/{name}"] for name in ("replicas_joined", "replicas_left", "joins_failed")] == [1, 1, 0]
    assert failures == []
    await pool.close()


def test_every_agent_worker_searches_those_who_serve_and_no_episode_is_lost_when_they_change(tmp_path: Path) -> None:
    words = ["rollout.engine=fake", "agent.workers=2", "agent.max_resamples=0", "retrieval.max_replicas=2"]
    config = load_file(None, words)

    async def run() -> None:
        passages = same_atlas(config.data.train, config.data.eval).passages()
        model_dir = model_folder(config.policy.model)
        plan = make_plan(config, largest_shape())
        folder = RunFolder.create(tmp_path, "elastic-retrieval")
        async with open_fleet(config, plan, model_dir, folder, passages, with_policy=False) as fleet:
            await fleet.rollouts.sync(unproven(str(model_dir)))
            tasks = iter(read_tasks(config.data.train))
            pool = fleet.retrieval

            async def step() -> float:
                """Queries that `retrieval-1` has had when all episodes have ended, well."""
                requests = [r for task in itertools.islice(tasks, 16) for r in siblings(task, 2, run_seed=0)]
                ended = [finished.summary async for finished in fleet.rollouts.run(requests)]
                assert len(ended) == len(requests)
                assert not any(summary.end_reason.is_infrastructure for summary in ended)
                (second,) = [replica for replica in pool.members if replica.name == "retrieval-1"]
                return (await answer(second.handle.stats.remote(), "stats", WAIT_S))["queries"]

            pool.grow(1)
            await until(lambda: pool.stats()["retrieval/num_serving"] == 2)
            assert await step() > 1  # one to warm up
            pool.retire("retrieval-0", "a test")
            await until(lambda: [replica.name for replica in pool.members] == ["retrieval-1"])
            await step()
            assert (await fleet.search.stats())["retrieval/num_replicas"] == 1

    with connected(config, "elastic-retrieval"):
        asyncio.run(run())
