"""Many concurrent searches, few encoder and FAISS calls.

    callers ──search──▶ reject empty or over-long ──▶ cache ──▶ in flight already? share ──▶ queue, if it has room
                                                                                              │
    results ◀── future per query ◀── one executor thread: disk cache, else find ◀── micro-batch, when it is full
                                                                                   or the longest wait is over
    waits for      an executor thread that is free, `max_wait_s`, `max_batch`
    unblocked by   every future of the batch at once
    on failure     a batch that fails is run again query by query, so that only the culprit fails;
                   a caller that leaves or times out takes nothing from the others;
                   a full queue refuses the whole call, which another replica may take;
                   a disk cache that fails is left alone from then on, and counted

There is one executor thread, so nothing is encoded while FAISS searches: on two cores both would share the same
cores, and beside a sentence encoder the search of a batch is a few per cent of its time (`encode_s`, `search_s`).

A query's result depends on the query alone, not on its batch mates (scores to within 1e-6: other batch
sizes round otherwise).
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import gc
import logging
import sqlite3
import time
import unicodedata
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from retrieval_index.corpus import Passage
from retrieval_index.disk_cache import DiskCache, RowsAndScores, SearchKey
from retrieval_index.errors import (
    RetrievalIndexError,
    SearchFailed,
    SearchTimeout,
    ServiceClosed,
    ServiceOverloaded,
)
from retrieval_index.manifest import Manifest
from retrieval_index.retriever import Retriever, open_retriever

log = logging.getLogger(__name__)

WARM_UP_DEADLINE_S = 300.0  # a large encoder is read from disk
LATENCIES_KEPT = 4096
RETURN_SHARE = 0.05
"""Of a batch's time, in which those who had its answers may come back before the next one leaves."""

Passages = tuple[Passage, ...]


@dataclass(frozen=True, slots=True)
class RejectedQuery:
    """The result of a query that cannot be searched, in the place of its passages. `reason` is one sentence."""

    query: str
    reason: str


Result = Passages | RejectedQuery


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """Sizes and waits of the service."""

    max_batch: int = 64
    """Queries in one encoder and FAISS call."""
    max_wait_s: float = 0.005
    """Longest time that a query waits for batch mates while the executor is free (or 1/20 of the last batch's time)."""
    max_queued: int = 4_096
    """Queries that may wait; a call that would bring more is refused, unless nothing waits."""
    deadline_s: float = 30.0
    """Deadline of a `search` that names none."""
    cache_size: int = 10_000
    """Results kept, least recently used out first; 0 keeps none."""
    max_query_chars: int = 4_096
    """Longer queries are rejected."""
    disk_cache: str = ""
    """SQLite file of a second cache, which outlives the process and may be shared by replicas; '' = none."""
    disk_cache_size: int = 1_000_000
    """Results kept there, the oldest out first."""


@dataclass(frozen=True, slots=True)
class ServiceStats:
    """Counters since the start. `queries` = rejected + cache_hits + shared + those put in the queue."""

    seconds: float = 0.0
    """Since the start: `queries / seconds` are queries a second."""
    num_queued: int = 0
    """Waiting for a batch now."""
    num_in_flight: int = 0
    """Different queries without a result: those that wait, and those of the batch that runs."""
    queries: int = 0
    rejected: int = 0
    cache_hits: int = 0
    shared: int = 0
    """Joined an equal query in flight."""
    disk_hits: int = 0
    """Of those put in the queue, answered by the disk cache."""
    disk_failures: int = 0
    """1: the disk cache failed and is out of use."""
    overloaded: int = 0
    """Calls (not queries) refused because the queue was full; their queries are not in `queries`."""
    failed: int = 0
    timeouts: int = 0
    """Calls (not queries) that reached their deadline."""
    batches: int = 0
    batched_queries: int = 0
    """Over `batches`: the mean batch size."""
    batches_failed: int = 0
    """Of several queries; they were searched again one by one."""
    queue_wait_s: float = 0.0
    """Time in the queue, summed over `batched_queries`."""
    encode_s: float = 0.0
    search_s: float = 0.0
    latency_p50_s: float = 0.0
    """Of the last 4,096 calls that were answered; of a call, not of a query."""
    latency_p99_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Request:
    key: SearchKey
    future: asyncio.Future[Passages]
    since_s: float


def normalise_query(query: str) -> str:
    """The form that is searched and cached: NFC, outer whitespace off, inner whitespace single."""
    return " ".join(unicodedata.normalize("NFC", query).split())


def is_text(query: str) -> bool:
    """Whether UTF-8 has a form for it. Half of a UTF-16 pair has none: JSON may escape one, and Python makes them of an
    argument's bytes that are not UTF-8."""
    return query.isprintable() or not any("\ud800" <= letter <= "\udfff" for letter in query)


@functools.cache
def _spare_the_encoder() -> None:
    """Once a process: its garbage collector leaves alone what is there now. Of a sentence encoder's half a million
    objects none is garbage, and each full collection would stop all searches for a quarter of a second."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # extensions complain of objects that outlive them


class RetrievalService:
    """Batching, single-flight and two caches around one retriever. Lives in one event loop.

    Raises:
        CacheError: `limits.disk_cache` cannot be used.
    """

    def __init__(self, retriever: Retriever, limits: ServiceLimits | None = None) -> None:
        self._retriever = retriever
        self._limits = limits or ServiceLimits()
        self._index_id = retriever.manifest.index_id
        self._cache: OrderedDict[SearchKey, Passages] = OrderedDict()
        self._in_flight: dict[SearchKey, asyncio.Future[Passages]] = {}
        self._queue: asyncio.Queue[_Request] = asyncio.Queue()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="retrieval")
        self._batcher: asyncio.Task[None] | None = None
        self._closed_because: str | None = None
        self._started_s = time.monotonic()
        self._latencies_s: deque[float] = deque(maxlen=LATENCIES_KEPT)
        self._stats = ServiceStats()  # written by the event loop only
        self._encode_s = self._search_s = 0.0  # these five by the executor thread only
        self._disk_hits = self._disk_failures = self._batches_failed = 0
        limits = self._limits
        self._disk = DiskCache(limits.disk_cache, limits.disk_cache_size) if limits.disk_cache else None

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        encoder: str | None = None,
        device: str = "cpu",
        num_threads: int | None = None,
        limits: ServiceLimits | None = None,
    ) -> RetrievalService:
        """The service over `retriever.open_retriever`, which says what the arguments mean.

        Raises:
            EncoderError, CacheError and the errors of `manifest.check`.
        """
        return cls(open_retriever(folder, encoder=encoder, device=device, num_threads=num_threads), limits)

    @property
    def manifest(self) -> Manifest:
        """Of the index that is served."""
        return self._retriever.manifest

    def stats(self) -> ServiceStats:
        """A snapshot of the counters."""
        p50_s, p99_s = np.percentile(self._latencies_s or [0.0], [50, 99])
        return replace(
            self._stats,
            seconds=time.monotonic() - self._started_s,
            num_queued=self._queue.qsize(),
            num_in_flight=len(self._in_flight),
            encode_s=self._encode_s,
            search_s=self._search_s,
            disk_hits=self._disk_hits,
            disk_failures=self._disk_failures,
            batches_failed=self._batches_failed,
            latency_p50_s=float(p50_s),
            latency_p99_s=float(p99_s),
        )

    async def counters(self) -> dict[str, float]:
        """`stats` as plain numbers."""
        return {name: float(value) for name, value in asdict(self.stats()).items()}

    async def warm_up(self) -> None:
        """One search, so that the model is loaded before somebody's deadline runs. Raises as `search`.

        Changes the process, see `_spare_the_encoder`.
        """
        await self.search(["warm up"], 1, deadline_s=WARM_UP_DEADLINE_S)
        self._latencies_s.clear()  # it waited for the model, as no later call will
        _spare_the_encoder()

    async def search(self, queries: Sequence[str], top_k: int, *, deadline_s: float | None = None) -> list[Result]:
        """Search all queries; result i belongs to query i.

        Args:
            top_k: passages per query, at least 1; an index of fewer passages returns all of them.
            deadline_s: seconds from now; default `limits.deadline_s`.

        Returns:
            A tuple of passages for each query, best first, or a `RejectedQuery` where it is empty or longer
            than `limits.max_query_chars`.

        Raises:
            SearchFailed, SearchTimeout, ServiceClosed: nothing is known of the queries; ask again.
            ServiceOverloaded: the queue has no room; ask another replica, or later.
            ValueError: top_k below 1.
        """
        if top_k < 1:
            raise ValueError(f"top_k is {top_k}, must be at least 1")
        since_s = time.monotonic()
        self._ensure_serving()
        self._ensure_room(queries, top_k)
        slots = [self._submit(query, top_k) for query in queries]
        waiting = [slot for slot in slots if isinstance(slot, asyncio.Future)]
        if waiting:
            timeout_s = self._limits.deadline_s if deadline_s is None else deadline_s
            # asyncio.wait cancels nothing: a future may be shared with other callers.
            _, late = await asyncio.wait(waiting, timeout=timeout_s)
            if late:
                self._count(timeouts=1)
                raise SearchTimeout(
                    f"{len(late)} of {len(queries)} queries had no result after {timeout_s:g} s",
                    "retrieval",
                    "add replicas, or raise the deadline",
                )
        results = [slot.result() if isinstance(slot, asyncio.Future) else slot for slot in slots]
        self._latencies_s.append(time.monotonic() - since_s)
        return results

    async def drain(self) -> None:
        """Returns when no query is in flight. Whoever drains has sent new ones elsewhere: they are still taken."""
        while self._in_flight:
            await asyncio.wait(self._in_flight.values())

    async def close(self) -> None:
        """Fail what waits. A batch that runs is not waited for: its thread may hang."""
        self._closed_because = self._closed_because or "it was closed"
        if self._batcher is not None:
            self._batcher.cancel()
            await asyncio.wait([self._batcher])
        self._fail_in_flight()
        if self._disk is not None:
            self._executor.submit(self._disk.close)
        self._executor.shutdown(wait=False)

    # --- the caller's side -----------------------------------------------------------------------------------

    def _submit(self, query: str, top_k: int) -> Result | asyncio.Future[Passages]:
        """Decide what becomes of one query: rejected, cached, shared, or queued."""
        self._count(queries=1)
        if reason := self._reason_to_reject(query):
            self._count(rejected=1)
            return RejectedQuery(query, reason)
        key = self._key(query, top_k)
        if key in self._cache:
            self._count(cache_hits=1)
            self._cache.move_to_end(key)
            return self._cache[key]
        if key in self._in_flight:
            self._count(shared=1)
            return self._in_flight[key]
        future: asyncio.Future[Passages] = asyncio.get_running_loop().create_future()
        self._in_flight[key] = future
        self._queue.put_nowait(_Request(key, future, time.monotonic()))
        return future

    def _key(self, query: str, top_k: int) -> SearchKey:
        return SearchKey(normalise_query(query), top_k, self._index_id)

    def _ensure_room(self, queries: Sequence[str], top_k: int) -> None:
        """A call is taken or refused whole; what costs nothing (cached, shared, rejected) is never refused."""
        num_queued, most = self._queue.qsize(), self._limits.max_queued
        if num_queued == 0 or num_queued + len(queries) <= most:
            return
        keys = {self._key(query, top_k) for query in queries if not self._reason_to_reject(query)}
        num_new = sum(key not in self._cache and key not in self._in_flight for key in keys)
        if num_queued + num_new > most:
            self._count(overloaded=1)
            raise ServiceOverloaded(
                f"{num_queued} queries wait and {num_new} more would exceed {most}",
                "retrieval",
                "ask another replica, or later; add replicas",
            )

    def _reason_to_reject(self, query: str) -> str | None:
        if not query.strip():
            return "the query is empty"
        if len(query) > self._limits.max_query_chars:
            return f"the query has {len(query)} characters, at most {self._limits.max_query_chars} are searched"
        if not is_text(query):
            return "the query is not text: it holds half of a UTF-16 pair"
        return None

    def _ensure_serving(self) -> None:
        if self._closed_because is None and self._batcher is None:
            self._batcher = asyncio.get_running_loop().create_task(self._serve(), name="retrieval-batcher")
            self._batcher.add_done_callback(self._batcher_ended)
        if self._closed_because is not None:
            raise ServiceClosed(f"the service does not serve: {self._closed_because}", "retrieval")

    def _batcher_ended(self, task: asyncio.Task[None]) -> None:
        """A batching task that ends is an incident unless `close` ended it; whoever waits is told."""
        if self._closed_because is None:
            cause = "cancelled" if task.cancelled() else repr(task.exception())
            self._closed_because = f"its batching task ended: {cause}"
        self._fail_in_flight()

    def _fail_in_flight(self) -> None:
        for key in list(self._in_flight):
            self._settle(key, ServiceClosed(f"the search was dropped: {self._closed_because}", "retrieval"))

    # --- the batching side -----------------------------------------------------------------------------------

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        not_before_s = 0.0
        while True:
            batch = await self._next_batch(not_before_s)
            now_s = time.monotonic()
            self._count(
                batches=1, batched_queries=len(batch), queue_wait_s=sum(now_s - request.since_s for request in batch)
            )
            outcomes = await loop.run_in_executor(self._executor, self._run, [request.key for request in batch])
            ended_s = time.monotonic()
            not_before_s = ended_s + RETURN_SHARE * (ended_s - now_s)
            for request, outcome in zip(batch, outcomes, strict=True):
                self._settle(request.key, outcome)

    async def _next_batch(self, not_before_s: float) -> list[_Request]:
        """The first request and whoever joins it before the batch is full or the longest wait is over.

        Args:
            not_before_s: until then those may come back who got the last batch's answers, however long the first has
                waited: two half batches in turns would take longer than a whole one.
        """
        batch = [await self._queue.get()]
        ends_s = max(batch[0].since_s + self._limits.max_wait_s, not_before_s)
        while len(batch) < self._limits.max_batch:
            if not self._queue.empty():
                batch.append(self._queue.get_nowait())
                continue
            try:
                async with asyncio.timeout(ends_s - time.monotonic()):
                    batch.append(await self._queue.get())
            except TimeoutError:
                break
        return batch

    def _settle(self, key: SearchKey, outcome: Passages | RetrievalIndexError) -> None:
        future = self._in_flight.pop(key)
        if isinstance(outcome, RetrievalIndexError):
            self._count(failed=1)
            future.set_exception(outcome)
            future.exception()  # marks it as seen: every caller may have left
            return
        if self._limits.cache_size:
            self._cache[key] = outcome
            while len(self._cache) > self._limits.cache_size:
                self._cache.popitem(last=False)
        future.set_result(outcome)

    def _run(self, keys: Sequence[SearchKey]) -> list[Passages | RetrievalIndexError]:
        """In the executor thread: one outcome per key, whatever happens."""
        try:
            return list(self._search(keys))
        except Exception as error:  # noqa: BLE001 - becomes the typed outcome of the query, and is counted
            if len(keys) > 1:
                log.warning("retrieval: %d queries are searched one by one, together they failed: %r", len(keys), error)
                self._batches_failed += 1
                return [outcome for key in keys for outcome in self._run([key])]
            failure = SearchFailed(f"the search for {keys[0].query[:80]!r} failed: {error!r}", "retrieval")
            failure.__cause__ = error
            return [failure]

    def _search(self, keys: Sequence[SearchKey]) -> list[Passages]:
        known = self._from_disk(keys)
        new: dict[SearchKey, RowsAndScores] = {}
        # One call per distinct k: an approximate index may visit other nodes for a larger k.
        for top_k in {key.top_k for key in keys}:
            wanted = [key for key in keys if key.top_k == top_k and key not in known]
            if not wanted:
                continue
            hits = self._retriever.find([key.query for key in wanted], top_k)
            new |= dict(zip(wanted, zip(hits.rows, hits.scores, strict=True), strict=True))
            self._encode_s += hits.encode_s
            self._search_s += hits.search_s
        self._to_disk(new)
        found = known | new
        in_order = (found[key] for key in keys)
        return [self._retriever.passages(rows.tolist(), scores.tolist()) for rows, scores in in_order]

    def _from_disk(self, keys: Sequence[SearchKey]) -> dict[SearchKey, RowsAndScores]:
        if self._disk is None:
            return {}
        try:
            known = self._disk.get(keys)
        except sqlite3.Error as error:
            self._give_up_disk(error)
            return {}
        self._disk_hits += len(known)
        return known

    def _to_disk(self, new: dict[SearchKey, RowsAndScores]) -> None:
        if self._disk is None or not new:
            return
        try:
            self._disk.put(new)
        except sqlite3.Error as error:
            self._give_up_disk(error)

    def _give_up_disk(self, error: sqlite3.Error) -> None:
        """A cache that fails (full disk, removed file) must not fail searches; without it they are only slower."""
        log.warning("retrieval: the disk cache %s is out of use: %s", self._limits.disk_cache, error)
        self._disk, self._disk_failures = None, 1

    def _count(self, **increments: float) -> None:
        self._stats = replace(
            self._stats, **{name: getattr(self._stats, name) + value for name, value in increments.items()}
        )
