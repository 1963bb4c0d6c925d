import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from retrieval_index.build import build_index
from retrieval_index.disk_cache import DiskCache, SearchKey
from retrieval_index.encoder import HashEncoder
from retrieval_index.errors import (
    CacheError,
    EncoderMismatch,
    SearchFailed,
    SearchTimeout,
    ServiceClosed,
    ServiceOverloaded,
)
from retrieval_index.index import PassageIndex
from retrieval_index.retriever import DenseRetriever
from retrieval_index.service import RejectedQuery, RetrievalService, ServiceLimits, normalise_query

from .conftest import NAMES, RELATIONS, facts

QUERIES = [f"{relation} {name}" for name in NAMES for relation in RELATIONS]
PATIENCE_S = 10.0


class GatedEncoder(HashEncoder):
    """Encodes while its gate is open, remembers the batches, and fails on a query that says "poison"."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[str]] = []
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        self.batches.append(list(texts))
        self.entered.set()
        assert self.gate.wait(PATIENCE_S), "the test never opened the gate"
        if any("poison" in text for text in texts):
            raise RuntimeError("cannot encode poison")
        return super().encode_queries(texts)

    async def until_busy(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, PATIENCE_S)


@pytest.fixture
def encoder() -> GatedEncoder:
    return GatedEncoder()


@pytest.fixture
async def service(index_folder: Path, encoder: GatedEncoder) -> AsyncIterator[RetrievalService]:
    service = RetrievalService(
        DenseRetriever(encoder, PassageIndex.open(index_folder, num_threads=1)), ServiceLimits(max_wait_s=0)
    )
    yield service
    encoder.gate.set()
    await service.close()


async def hold_the_executor(service: RetrievalService, encoder: GatedEncoder) -> asyncio.Task:
    """A search that keeps the executor busy until the gate opens; whatever comes now has to queue."""
    encoder.gate.clear()
    task = asyncio.create_task(service.search(["hold"], 1))
    await encoder.until_busy()
    return task


async def let_them_queue() -> None:
    """One round of the event loop: each new task runs up to its wait."""
    await asyncio.sleep(0)


async def test_result_i_belongs_to_query_i(service: RetrievalService) -> None:
    results = await service.search(QUERIES, 3)
    assert [result[0].id for result in results] == [query.replace(" ", "-") for query in QUERIES]
    assert all(len(result) == 3 for result in results)


async def test_queries_of_many_callers_share_one_batch(service: RetrievalService, encoder: GatedEncoder) -> None:
    held = await hold_the_executor(service, encoder)
    tasks = [asyncio.create_task(service.search([query], 2)) for query in QUERIES]
    await let_them_queue()
    encoder.gate.set()
    results = await asyncio.gather(*tasks)
    await held
    assert [len(batch) for batch in encoder.batches] == [1, len(QUERIES)]
    assert [result[0][0].id for result in results] == [query.replace(" ", "-") for query in QUERIES]
    stats = service.stats()
    assert (stats.queries, stats.batches, stats.batched_queries) == (25, 2, 25)


async def test_no_batch_is_larger_than_the_limit(index_folder: Path, encoder: GatedEncoder) -> None:
    limits = ServiceLimits(max_batch=10, max_wait_s=0)
    service = RetrievalService(DenseRetriever(encoder, PassageIndex.open(index_folder)), limits)
    held = await hold_the_executor(service, encoder)
    task = asyncio.create_task(service.search(QUERIES, 2))
    await let_them_queue()
    encoder.gate.set()
    await asyncio.gather(held, task)
    assert [len(batch) for batch in encoder.batches] == [1, 10, 10, 4]
    await service.close()


async def test_a_full_batch_does_not_wait_for_the_longest_wait(index_folder: Path, encoder: GatedEncoder) -> None:
    limits = ServiceLimits(max_batch=2, max_wait_s=3600)
    service = RetrievalService(DenseRetriever(encoder, PassageIndex.open(index_folder)), limits)
    await asyncio.gather(service.search(["Boko"], 1), service.search(["Sari"], 1))
    assert encoder.batches == [["Boko", "Sari"]]
    await service.close()


async def test_a_lonely_query_leaves_after_the_longest_wait(index_folder: Path, encoder: GatedEncoder) -> None:
    limits = ServiceLimits(max_batch=64, max_wait_s=0.01)
    service = RetrievalService(DenseRetriever(encoder, PassageIndex.open(index_folder)), limits)
    await service.search(["Boko"], 1, deadline_s=PATIENCE_S)
    assert service.stats().queue_wait_s >= 0.01
    await service.close()


async def test_who_got_an_answer_and_asks_again_joins_those_who_waited_meanwhile(
    index_folder: Path, encoder: GatedEncoder
) -> None:
    retriever = DenseRetriever(encoder, PassageIndex.open(index_folder, num_threads=1))
    service = RetrievalService(retriever, ServiceLimits(max_wait_s=1.0, max_batch=2))
    held = asyncio.gather(*(service.search([query], 1) for query in QUERIES[:2]))
    encoder.gate.clear()
    waiting = asyncio.create_task(service.search([QUERIES[2]], 1))
    await encoder.until_busy()
    await asyncio.sleep(1.0)  # the one who waits has waited as long as it may while the executor is free
    encoder.gate.set()
    await held
    await asyncio.gather(waiting, service.search([QUERIES[3]], 1))
    assert encoder.batches == [QUERIES[:2], QUERIES[2:4]]
    await service.close()


async def test_equal_queries_in_flight_are_searched_once(service: RetrievalService, encoder: GatedEncoder) -> None:
    held = await hold_the_executor(service, encoder)
    siblings = [asyncio.create_task(service.search(["mentor Boko"], 2)) for _ in range(16)]
    await let_them_queue()
    encoder.gate.set()
    results = await asyncio.gather(*siblings)
    await held
    assert encoder.batches == [["hold"], ["mentor Boko"]]
    assert all(result == results[0] for result in results)
    assert service.stats().shared == 15


async def test_a_query_seen_before_comes_from_the_cache_however_it_is_spaced(
    service: RetrievalService, encoder: GatedEncoder
) -> None:
    first = await service.search(["mentor Boko"], 2)
    assert await service.search(["  mentor \n Boko "], 2) == first
    assert service.stats().cache_hits == 1
    await service.search(["mentor Boko"], 3)
    assert encoder.batches == [["mentor Boko"], ["mentor Boko"]], "another k is another search"


async def test_the_cache_forgets_what_was_used_longest_ago(index_folder: Path, encoder: GatedEncoder) -> None:
    limits = ServiceLimits(max_wait_s=0, cache_size=2)
    service = RetrievalService(DenseRetriever(encoder, PassageIndex.open(index_folder)), limits)
    for query in ("a", "b", "a", "c", "a", "b"):
        await service.search([query], 1)
    assert encoder.batches == [["a"], ["b"], ["c"], ["b"]]
    await service.close()


async def test_empty_and_over_long_queries_are_rejected_beside_good_ones(service: RetrievalService) -> None:
    empty, good, over_long = await service.search([" \n", "mentor Boko", "x" * 100_000], 1)
    assert empty == RejectedQuery(" \n", "the query is empty")
    assert good[0].id == "mentor-Boko"
    assert isinstance(over_long, RejectedQuery)
    assert over_long.reason == "the query has 100000 characters, at most 4096 are searched"
    assert service.stats().rejected == 2


async def test_a_query_that_fails_fails_alone(service: RetrievalService, encoder: GatedEncoder) -> None:
    held = await hold_the_executor(service, encoder)
    good = [asyncio.create_task(service.search([query], 1)) for query in QUERIES[:7]]
    bad = asyncio.create_task(service.search(["poison"], 1))
    await let_them_queue()
    encoder.gate.set()
    results = await asyncio.gather(*good)
    await held
    assert [result[0][0].id for result in results] == [query.replace(" ", "-") for query in QUERIES[:7]]
    with pytest.raises(SearchFailed, match="'poison' failed: RuntimeError"):
        await bad
    assert (service.stats().failed, service.stats().batches_failed) == (1, 1)
    with pytest.raises(SearchFailed):
        await service.search(["poison"], 1)  # a failure is not cached
    assert service.stats().failed == 2


async def test_an_encoder_that_returns_too_few_vectors_fails_the_search_and_hangs_nobody(
    index_folder: Path,
) -> None:
    class ShortEncoder(HashEncoder):
        def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
            return super().encode_queries(texts)[:-1]

    service = RetrievalService(
        DenseRetriever(ShortEncoder(), PassageIndex.open(index_folder)), ServiceLimits(max_wait_s=0)
    )
    with pytest.raises(SearchFailed):
        await service.search(["a", "b"], 1, deadline_s=PATIENCE_S)
    await service.close()


async def test_a_caller_that_is_cancelled_takes_nothing_from_the_others(
    service: RetrievalService, encoder: GatedEncoder
) -> None:
    held = await hold_the_executor(service, encoder)
    leaves = asyncio.create_task(service.search(["mentor Boko"], 1))
    stays = asyncio.create_task(service.search(["mentor Boko"], 1))
    await let_them_queue()
    leaves.cancel()
    encoder.gate.set()
    assert (await stays)[0][0].id == "mentor-Boko"
    await held


async def test_a_deadline_is_kept_and_the_late_result_serves_the_next_caller(
    service: RetrievalService, encoder: GatedEncoder
) -> None:
    encoder.gate.clear()
    with pytest.raises(SearchTimeout, match=r"1 of 1 queries had no result after 0\.01 s"):
        await service.search(["mentor Boko"], 1, deadline_s=0.01)
    assert service.stats().timeouts == 1
    encoder.gate.set()
    assert (await service.search(["mentor Boko"], 1))[0][0].id == "mentor-Boko"
    assert encoder.batches == [["mentor Boko"]]


async def test_draining_ends_when_those_in_flight_have_their_results_and_refuses_nobody(
    service: RetrievalService, encoder: GatedEncoder
) -> None:
    held = await hold_the_executor(service, encoder)
    late = asyncio.create_task(service.search(["mentor Vela"], 1))
    await let_them_queue()
    assert service.stats().num_in_flight == 2
    draining = asyncio.create_task(service.drain())
    await let_them_queue()
    assert not draining.done()
    encoder.gate.set()
    await asyncio.wait_for(draining, PATIENCE_S)
    assert service.stats().num_in_flight == 0
    assert [len(results) for results in await asyncio.gather(held, late)] == [1, 1]
    await service.drain()


async def test_closing_fails_those_who_wait_and_those_who_come_later(
    service: RetrievalService, encoder: GatedEncoder
) -> None:
    held = await hold_the_executor(service, encoder)
    await service.close()
    with pytest.raises(ServiceClosed):
        await held
    with pytest.raises(ServiceClosed):
        await service.search(["Boko"], 1)


async def test_a_batching_task_that_ends_is_told_to_everybody(service: RetrievalService, encoder: GatedEncoder) -> None:
    held = await hold_the_executor(service, encoder)
    (batcher,) = [task for task in asyncio.all_tasks() if task.get_name() == "retrieval-batcher"]
    batcher.cancel()
    with pytest.raises(ServiceClosed, match="batching task ended"):
        await held
    with pytest.raises(ServiceClosed, match="batching task ended"):
        await service.search(["Boko"], 1)


async def test_a_result_does_not_depend_on_its_batch_mates(service: RetrievalService, index_folder: Path) -> None:
    together = await service.search(QUERIES, 3)
    lonely = RetrievalService(
        DenseRetriever(HashEncoder(), PassageIndex.open(index_folder)), ServiceLimits(max_batch=1)
    )
    for query, expected in zip(QUERIES, together, strict=True):
        (alone,) = await lonely.search([query], 3)
        assert [passage.id for passage in alone] == [passage.id for passage in expected]
        np.testing.assert_allclose([p.score for p in alone], [p.score for p in expected], atol=1e-6)
    await lonely.close()


async def test_open_makes_the_encoder_of_the_manifest_and_refuses_another(index_folder: Path) -> None:
    service = RetrievalService.open(index_folder, num_threads=1)
    await service.warm_up()
    assert service.manifest.count == len(QUERIES)
    await service.close()
    manifest = index_folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace(HashEncoder().fingerprint, "0" * 64))
    with pytest.raises(EncoderMismatch):
        RetrievalService.open(index_folder)


async def test_a_k_below_one_is_the_callers_mistake(service: RetrievalService) -> None:
    with pytest.raises(ValueError, match="top_k is 0"):
        await service.search(["Boko"], 0)


def test_composed_and_decomposed_letters_are_one_query() -> None:
    assert normalise_query("Se\u00f1ora") == normalise_query(" Sen\u0303ora")


async def test_half_of_a_utf16_pair_is_no_query(service: RetrievalService) -> None:
    (result,) = await service.search(["mentor \ud800"], 1)
    assert isinstance(result, RejectedQuery)
    assert "UTF-16" in result.reason


# --- back-pressure -------------------------------------------------------------------------------------------


async def test_a_full_queue_refuses_a_call_whole_but_serves_what_it_knows(
    index_folder: Path, encoder: GatedEncoder
) -> None:
    limits = ServiceLimits(max_wait_s=0, max_queued=2)
    service = RetrievalService(DenseRetriever(encoder, PassageIndex.open(index_folder)), limits)
    known = await service.search(["known"], 1)
    encoder.entered.clear()
    held = await hold_the_executor(service, encoder)
    waiting = asyncio.create_task(service.search(["a", "b"], 1))
    await let_them_queue()
    with pytest.raises(ServiceOverloaded, match="2 queries wait and 1 more would exceed 2"):
        await service.search(["known", "a", "", "c"], 1)
    assert await service.search(["known"], 1) == known
    shared = asyncio.create_task(service.search(["b"], 1))
    await let_them_queue()
    encoder.gate.set()
    assert (await waiting)[1:] == await shared
    await held
    stats = service.stats()
    assert (stats.overloaded, stats.queries) == (1, 6), "a refused call counts none of its queries"
    await service.close()


async def test_a_call_larger_than_the_queue_is_served_when_nothing_waits(
    index_folder: Path, encoder: GatedEncoder
) -> None:
    limits = ServiceLimits(max_wait_s=0, max_queued=2)
    service = RetrievalService(DenseRetriever(encoder, PassageIndex.open(index_folder)), limits)
    assert len(await service.search(QUERIES, 1)) == len(QUERIES)
    await service.close()


# --- the disk cache ------------------------------------------------------------------------------------------


def on_disk(index_folder: Path, encoder: HashEncoder, **limits: int) -> RetrievalService:
    limits_ = ServiceLimits(max_wait_s=0, disk_cache=str(index_folder.parent / "cache" / "searches.sqlite"), **limits)
    return RetrievalService(DenseRetriever(encoder, PassageIndex.open(index_folder)), limits_)


async def test_a_search_survives_its_process_on_disk_and_is_equal_to_the_bit(
    index_folder: Path, encoder: GatedEncoder
) -> None:
    first = on_disk(index_folder, encoder)
    found = await first.search(QUERIES, 3)
    await first.close()
    second = on_disk(index_folder, encoder, cache_size=0)
    assert await second.search(QUERIES, 3) == found
    assert await second.search([*QUERIES[:2], "new"], 3) == [*found[:2], *await second.search(["new"], 3)]
    assert encoder.batches == [QUERIES, ["new"]], "only what the disk lacked was encoded"
    assert second.stats().disk_hits == len(QUERIES) + 3
    await second.close()


async def test_another_k_or_another_index_is_another_search_on_disk(
    index_folder: Path, encoder: GatedEncoder, tmp_path: Path
) -> None:
    service = on_disk(index_folder, encoder)
    await service.search(["mentor Boko"], 3)
    await service.search(["mentor Boko"], 2)
    await service.close()
    build_index(facts()[:5], HashEncoder(), "flat", index_folder, overwrite=True)
    service = on_disk(index_folder, encoder)
    await service.search(["mentor Boko"], 3)
    assert service.stats().disk_hits == 0
    await service.close()


def test_the_disk_cache_is_bounded_and_the_oldest_leave_it(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "searches.sqlite", max_entries=2)
    keys = [SearchKey(query, 3, "i") for query in "abc"]
    found = np.arange(3), np.arange(3, dtype=np.float32)
    for key in (*keys[:2], keys[0], keys[2]):
        cache.put({key: found})
    assert set(cache.get(keys)) == {keys[0], keys[2]}, "writing it again made the first one young"
    np.testing.assert_array_equal(cache.get(keys)[keys[2]], found)
    cache.close()


async def test_a_disk_cache_that_fails_slows_searches_down_and_fails_none(
    index_folder: Path, encoder: GatedEncoder, caplog: pytest.LogCaptureFixture
) -> None:
    service = on_disk(index_folder, encoder)
    await service.search(["Boko"], 1)
    with sqlite3.connect(index_folder.parent / "cache" / "searches.sqlite") as other:
        other.execute("DROP TABLE hits")
    assert len((await service.search(["Sari"], 1))[0]) == 1
    assert service.stats().disk_failures == 1
    assert "out of use: no such table" in caplog.text
    await service.close()


def test_a_file_that_is_no_cache_is_named(index_folder: Path, encoder: GatedEncoder) -> None:
    (index_folder.parent / "cache").mkdir()
    (index_folder.parent / "cache" / "searches.sqlite").write_text("not a database" * 100)
    with pytest.raises(CacheError, match=r"disk_cache: .*searches\.sqlite"):
        on_disk(index_folder, encoder)


async def test_latencies_are_those_of_calls_without_the_warm_up(service: RetrievalService) -> None:
    await service.warm_up()
    assert service.stats().latency_p99_s == 0
    await service.search(["Boko"], 1)
    stats = service.stats()
    assert 0 < stats.latency_p50_s == stats.latency_p99_s <= stats.seconds
