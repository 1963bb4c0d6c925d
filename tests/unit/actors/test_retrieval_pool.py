"""Searches over replicas, and the metrics of a step from their counters."""

import pytest

from mempo_ray.actors.retrieval import RetrievalActor, prepare_index
from mempo_ray.actors.retrieval_pool import RetrievalPool, retrieval_metrics
from mempo_ray.config.schema import Retrieval
from mempo_ray.contracts import Passage
from mempo_ray.errors import Overloaded, ToolFailed
from retrieval_index.service import ServiceStats
from tests.fakes.handle import FakeHandle, replace_ray

FACTS = [Passage(f"p{n}", "", f"mentor {name} Sari .") for n, name in enumerate(("Boko", "Vela", "Kim"))]
QUERIES = [fact.text for fact in FACTS]
SETTINGS = Retrieval(max_wait_s=0)


class Full:
    """A replica whose queue is full."""

    num_calls = 0

    async def search_each(self, searches):
        self.num_calls += 1
        return [Overloaded("4096 queries wait") for _ in searches]


def named(*handles):
    return {f"retrieval-{index}": handle for index, handle in enumerate(handles)}


@pytest.fixture
async def replicas(tmp_path):
    folder = str(prepare_index(SETTINGS, FACTS, tmp_path / "index"))
    actors = [RetrievalActor(SETTINGS, folder, search_s=60) for _ in range(2)]
    yield [FakeHandle(actor) for actor in actors]
    for actor in actors:
        await actor.close()


async def test_searches_go_on_when_a_replica_dies_and_it_is_counted(replicas, monkeypatch):
    import ray

    replace_ray(monkeypatch)
    pool = RetrievalPool(deadline_s=60)
    pool.announce(named(*replicas))
    before = [await pool([query], 1) for query in QUERIES]
    ray.kill(replicas[0])
    assert [await pool([query], 1) for query in QUERIES] == before
    assert pool.num_failures <= 1, "the dead one is passed over after it has failed once"
    stats = await pool.stats()
    assert stats["retrieval/num_replicas"] == 1


async def test_a_full_replica_s_searches_go_to_the_other(replicas):
    full = Full()
    pool = RetrievalPool(deadline_s=60)
    pool.announce(named(FakeHandle(full), replicas[0]))
    for query in QUERIES * 10:
        assert len(await pool([query], 2)) == 1
    assert full.num_calls <= 1
    pool.announce(named(FakeHandle(full)))
    with pytest.raises(Overloaded):
        await pool(QUERIES, 2)


async def test_without_replicas_a_search_fails_and_an_empty_one_does_not():
    pool = RetrievalPool(deadline_s=60)
    with pytest.raises(ToolFailed, match="no retrieval actor"):
        await pool(["q"], 1)
    assert await pool([], 1) == []
    assert await pool.stats() == {}


async def test_stats_are_those_since_the_last_call(replicas):
    pool = RetrievalPool(deadline_s=60)
    pool.announce(named(*replicas))
    await pool(QUERIES, 1)
    await pool(QUERIES[:1], 1)
    first = await pool.stats()
    assert (first["retrieval/queries"], first["retrieval/hit_rate"]) == (4, 0.25)
    assert (await pool.stats())["retrieval/queries"] == 0


def counters(**values):
    return {**dict.fromkeys(ServiceStats.__slots__, 0.0), **values}


def test_metrics_are_differences_with_their_own_denominators():
    before = {"a": counters(seconds=10, queries=100, cache_hits=50, batches=5, batched_queries=50)}
    now = {
        "a": counters(seconds=20, queries=300, cache_hits=100, shared=20, disk_hits=10, batches=15, batched_queries=130,
                      encode_s=3.0, search_s=1.0, latency_p99_s=0.2),
        "b": counters(seconds=5, queries=100, batches=10, batched_queries=100, latency_p99_s=0.1),
    }  # fmt: skip
    metrics = retrieval_metrics(before, now)
    assert metrics["retrieval/queries"] == 300
    assert metrics["retrieval/queries_per_s"] == 30
    assert metrics["retrieval/hit_rate"] == pytest.approx(80 / 300)
    assert metrics["retrieval/batch_size"] == 9
    assert metrics["retrieval/encode_share"] == 0.75
    assert metrics["retrieval/latency_p99_s"] == 0.2


def test_a_replica_that_started_anew_counts_from_zero():
    before = {"a": counters(seconds=100, queries=1000)}
    metrics = retrieval_metrics(before, {"a": counters(seconds=10, queries=50)})
    assert metrics["retrieval/queries"] == 50
    assert metrics["retrieval/queries_per_s"] == 5
