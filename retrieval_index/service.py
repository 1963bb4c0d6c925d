"""Many concurrent searches, few encoder and FAISS calls.

    callers ──search──▶ reject empty or over-long ──▶ cache ──▶ in flight already? share ──▶ queue
                                                                                              │
    results ◀── future per query ◀── one executor thread: encode, search, look up ◀── micro-batch, when it is full
                                                                                     or the longest wait is over
    waits for      an executor thread that is free, `max_wait_s`, `max_batch`
    unblocked by   every future of the batch at once
    on failure     a batch that fails is run again query by query, so that only the culprit fails;
                   a caller that leaves or times out takes nothing from the others

A query's result depends on the query alone, not on its batch mates (scores to within 1e-6: other batch
sizes round otherwise).
"""

from __future__ import annotations

import asyncio
import time
import unicodedata
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from retrieval_index import manifest as manifests
from retrieval_index.corpus import Passage
from retrieval_index.encoder import Encoder, make_recorded_encoder
from retrieval_index.errors import RetrievalIndexError, SearchFailed, SearchTimeout, ServiceClosed
from retrieval_index.manifest import Manifest

WARM_UP_DEADLINE_S = 300.0  # a large encoder is read from disk

Passages = tuple[Passage, ...]


class Index(Protocol):
    """What the service needs of an index; `index.PassageIndex` is one."""

    manifest: Manifest

    def search(self, queries_SD: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]: ...

    def passages(self, rows: Sequence[int], scores: Sequence[float]) -> Passages: ...


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
    """Longest time that a query waits for batch mates while the executor is free."""
    deadline_s: float = 30.0
    """Deadline of a `search` that names none."""
    cache_size: int = 10_000
    """Results kept, least recently used out first; 0 keeps none."""
    max_query_chars: int = 4_096
    """Longer queries are rejected."""


@dataclass(frozen=True, slots=True)
class ServiceStats:
    """Counters since the start. `queries` = rejected + cache_hits + shared + those put in the queue."""

    queries: int = 0
    rejected: int = 0
    cache_hits: int = 0
    shared: int = 0
    """Joined an equal query in flight."""
    failed: int = 0
    timeouts: int = 0
    """Calls (not queries) that reached their deadline."""
    batches: int = 0
    batched_queries: int = 0
    """Over `batches`: the mean batch size."""
    queue_wait_s: float = 0.0
    """Time in the queue, summed over `batched_queries`."""
    encode_s: float = 0.0
    search_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Key:
    """One distinct search. The index id keeps results of one index from answering for another."""

    query: str
    top_k: int
    index_id: str


@dataclass(frozen=True, slots=True)
class _Request:
    key: _Key
    future: asyncio.Future[Passages]
    since_s: float


def normalise_query(query: str) -> str:
    """The form that is searched and cached: NFC, outer whitespace off, inner whitespace single."""
    return " ".join(unicodedata.normalize("NFC", query).split())


class RetrievalService:
    """Batching, single-flight and cache around one encoder and one index. Lives in one event loop."""

    def __init__(self, encoder: Encoder, index: Index, limits: ServiceLimits | None = None) -> None:
        self._encoder, self._index = encoder, index
        self._limits = limits or ServiceLimits()
        self._index_id = index.manifest.index_id
        self._cache: OrderedDict[_Key, Passages] = OrderedDict()
        self._in_flight: dict[_Key, asyncio.Future[Passages]] = {}
        self._queue: asyncio.Queue[_Request] = asyncio.Queue()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="retrieval")
        self._batcher: asyncio.Task[None] | None = None
        self._closed_because: str | None = None
        self._stats = ServiceStats()  # written by the event loop only
        self._encode_s = self._search_s = 0.0  # written by the executor thread only

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
        """Open an index folder with the encoder that built it.

        Args:
            encoder: its name or folder where it is not the one that the manifest names (a folder that moved).
            device: `cpu` or `cuda`, of encoder and index.
            num_threads: of encoder and FAISS each, which run one after the other; None leaves their defaults.

        Raises:
            EncoderError and the errors of `manifest.check`.
        """
        from retrieval_index.index import PassageIndex  # here, so that importing this module loads no FAISS

        record = manifests.load(folder).encoder
        chosen = make_recorded_encoder(record, encoder, device=device, num_threads=num_threads)
        index = PassageIndex.open(
            folder, encoder_fingerprint=chosen.fingerprint, device=device, num_threads=num_threads
        )
        return cls(chosen, index, limits)

    @property
    def manifest(self) -> Manifest:
        """Of the index that is served."""
        return self._index.manifest

    def stats(self) -> ServiceStats:
        """A snapshot of the counters."""
        return replace(self._stats, encode_s=self._encode_s, search_s=self._search_s)

    async def warm_up(self) -> None:
        """One search, so that the model is loaded before somebody's deadline runs. Raises as `search`."""
        await self.search(["warm up"], 1, deadline_s=WARM_UP_DEADLINE_S)

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
            ValueError: top_k below 1.
        """
        if top_k < 1:
            raise ValueError(f"top_k is {top_k}, must be at least 1")
        self._ensure_serving()
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
        return [slot.result() if isinstance(slot, asyncio.Future) else slot for slot in slots]

    async def close(self) -> None:
        """Fail what waits. A batch that runs is not waited for: its thread may hang."""
        self._closed_because = self._closed_because or "it was closed"
        if self._batcher is not None:
            self._batcher.cancel()
            await asyncio.wait([self._batcher])
        self._fail_in_flight()
        self._executor.shutdown(wait=False, cancel_futures=True)

    # --- the caller's side -----------------------------------------------------------------------------------

    def _submit(self, query: str, top_k: int) -> Result | asyncio.Future[Passages]:
        """Decide what becomes of one query: rejected, cached, shared, or queued."""
        self._count(queries=1)
        if reason := self._reason_to_reject(query):
            self._count(rejected=1)
            return RejectedQuery(query, reason)
        key = _Key(normalise_query(query), top_k, self._index_id)
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

    def _reason_to_reject(self, query: str) -> str | None:
        if not query.strip():
            return "the query is empty"
        if len(query) > self._limits.max_query_chars:
            return f"the query has {len(query)} characters, at most {self._limits.max_query_chars} are searched"
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
        while True:
            batch = await self._next_batch()
            now_s = time.monotonic()
            self._count(
                batches=1, batched_queries=len(batch), queue_wait_s=sum(now_s - request.since_s for request in batch)
            )
            outcomes = await loop.run_in_executor(self._executor, self._run, [request.key for request in batch])
            for request, outcome in zip(batch, outcomes, strict=True):
                self._settle(request.key, outcome)

    async def _next_batch(self) -> list[_Request]:
        """The first request and whoever joins it before the batch is full or the longest wait is over."""
        batch = [await self._queue.get()]
        ends_s = batch[0].since_s + self._limits.max_wait_s
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

    def _settle(self, key: _Key, outcome: Passages | RetrievalIndexError) -> None:
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

    def _run(self, keys: Sequence[_Key]) -> list[Passages | RetrievalIndexError]:
        """In the executor thread: one outcome per key, whatever happens."""
        try:
            return list(self._search(keys))
        except Exception as error:  # noqa: BLE001 - becomes the typed outcome of the query, and is counted
            if len(keys) > 1:
                return [outcome for key in keys for outcome in self._run([key])]
            failure = SearchFailed(f"the search for {keys[0].query[:80]!r} failed: {error!r}", "retrieval")
            failure.__cause__ = error
            return [failure]

    def _search(self, keys: Sequence[_Key]) -> list[Passages]:
        started_s = time.monotonic()
        vectors_SD = self._encoder.encode_queries([key.query for key in keys])
        encoded_s = time.monotonic()
        found: dict[int, Passages] = {}
        # One FAISS call per distinct k: an approximate index may visit other nodes for a larger k.
        for top_k in {key.top_k for key in keys}:
            positions = [i for i, key in enumerate(keys) if key.top_k == top_k]
            rows_SK, scores_SK = self._index.search(vectors_SD[positions], top_k)
            for i, rows, scores in zip(positions, rows_SK, scores_SK, strict=True):
                found[i] = self._index.passages(rows, scores)
        self._encode_s += encoded_s - started_s
        self._search_s += time.monotonic() - encoded_s
        return [found[i] for i in range(len(keys))]

    def _count(self, **increments: float) -> None:
        self._stats = replace(
            self._stats, **{name: getattr(self._stats, name) + value for name, value in increments.items()}
        )
