"""RetrievalActor: the search environment behind an async actor (S10; the logic is in `retrieval_index`).

consumes   queries of many episodes
produces   passages for each query, best first
waits      its service: a micro-batch that fills, or `retrieval.max_wait_s`; then encoder and FAISS in one thread
on failure ToolFailed, Overloaded or DeadlineExceeded to the callers concerned; a query that cannot be searched
           (empty, over-long) is the policy's doing and finds nothing
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import ray

from mempo_ray.actors.metrics_sink import ActorGauges
from mempo_ray.actors.names import own_name
from mempo_ray.actors.outbox import Asked, Outcome
from mempo_ray.actors.retrieval_errors import typed_errors
from mempo_ray.config.schema import Retrieval
from mempo_ray.contracts import Passage
from mempo_ray.data.world import is_synthetic
from mempo_ray.errors import MempoError
from retrieval_index import manifest
from retrieval_index.build import build_index, stamp_sources
from retrieval_index.encoder import Encoder, make_encoder
from retrieval_index.errors import ManifestError
from retrieval_index.progress import TimeLeft
from retrieval_index.retriever import check_index
from retrieval_index.service import RejectedQuery, RetrievalService, ServiceLimits

log = logging.getLogger(__name__)


def prepare_index(settings: Retrieval, passages: Iterable[Passage], folder: Path) -> Path:
    """The index folder of a run: `retrieval.index`, checked, or one built in `folder`.

    A folder that is already there (a resumed run) is used again if encoder, kind and input files are the same.

    Args:
        passages: of the synthetic worlds; read only where `retrieval.corpus` is synthetic and no index is given.

    Raises:
        ConfigError: index, encoder or embeddings do not fit. DataError: the corpus is missing or has a bad line.
    """
    with typed_errors():
        if settings.index:
            check_index(settings.index, encoder=settings.encoder)
            return Path(settings.index)
        encoder = make_encoder(settings.encoder, device=settings.device, num_threads=settings.threads)
        corpus = passages if is_synthetic(settings.corpus) else settings.corpus
        if not _is_current(folder, settings, encoder):
            embeddings = settings.embeddings or None
            progress = TimeLeft(lambda line, last: log.info("index: %s", line))
            build_index(
                corpus, encoder, settings.kind, folder, embeddings=embeddings, overwrite=True, progress=progress
            )
        return folder


def _is_current(folder: Path, settings: Retrieval, encoder: Encoder) -> bool:
    if is_synthetic(settings.corpus):
        return False  # built in a second, and no file tells whether the worlds are the same
    try:
        found = manifest.check(folder, encoder_fingerprint=encoder.fingerprint, dim=encoder.dim)
        return found.kind == settings.kind and found.sources == stamp_sources(
            settings.corpus, settings.embeddings or None
        )
    except (ManifestError, FileNotFoundError):
        return False  # the build says what is wrong with the input


def index_id(settings: Retrieval, folder: Path) -> str:
    """Names what was searched: the content of the index in `folder`, or the address of the server; "" = nothing was,
    the run ended before it had an index."""
    try:
        return settings.url if settings.backend == "http" else manifest.load(folder).index_id
    except ManifestError:
        return ""


class RetrievalActor:
    """One replica: encoder, index, cache and micro-batches. It holds no state of the run, so it may die and restart.

    Args:
        folder: what `prepare_index` returned.
        search_s: deadline of one search, `agent.limits.search_s`.
    """

    def __init__(self, settings: Retrieval, folder: str, search_s: float) -> None:
        limits = ServiceLimits(
            max_batch=settings.max_batch,
            max_wait_s=settings.max_wait_s,
            max_queued=settings.max_queued,
            deadline_s=search_s,
            cache_size=settings.cache_entries,
            disk_cache=settings.disk_cache,
            disk_cache_size=settings.disk_cache_entries,
        )
        with typed_errors():
            self._service = RetrievalService.open(
                folder,
                encoder=settings.encoder,
                device=settings.device,
                num_threads=settings.threads,
                limits=limits,
            )
        ActorGauges("retrieval").keep(self._live)

    def __repr__(self) -> str:
        return f"RetrievalActor({own_name()}, {self._service.manifest.count} passages)"

    async def ping(self) -> str:
        """Returns once encoder and index answer: the id of its Ray node, '' outside of Ray."""
        with typed_errors():
            await self._service.warm_up()
        return ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""

    async def watch(self) -> None:
        """Never returns. A caller that waits here learns of this process's death at once."""
        await asyncio.Event().wait()

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Passages for each query, best first; [] for a query that is empty or over-long.

        Raises:
            ToolFailed: encoder or index failed, or the service is closed. DeadlineExceeded.
            Overloaded: `retrieval.max_queued` queries wait already.
        """
        with typed_errors():
            results = await self._service.search(queries, top_k)
        return [
            [] if isinstance(result, RejectedQuery) else [Passage(p.id, p.title, p.text, p.score) for p in result]
            for result in results
        ]

    async def search_each(self, searches: Sequence[Asked]) -> list[Outcome]:
        """`search` of several callers: what each one found, or the failure that `search` raised for it."""
        return await asyncio.gather(*(self._outcome(queries, top_k) for queries, top_k in searches))

    async def _outcome(self, queries: Sequence[str], top_k: int) -> Outcome:
        try:
            return await self.search(queries, top_k)
        except MempoError as error:
            return error

    async def stats(self) -> dict[str, float]:
        """Counters since the start, as in `retrieval_index.service.ServiceStats`."""
        return await self._service.counters()

    def _live(self) -> dict[str, float]:
        now = self._service.stats()
        values = {
            "num_queued": now.num_queued,
            "latency_p50_s": now.latency_p50_s,
            "latency_p99_s": now.latency_p99_s,
            "queries": now.queries,
            "hits": now.cache_hits + now.shared + now.disk_hits,
            "busy_s": now.encode_s + now.search_s,
            "failed": now.failed + now.timeouts + now.overloaded,
        }
        return {f"search/{name}": value for name, value in values.items()}

    async def drain(self) -> None:
        """Returns when no search is in flight. It refuses none: whoever searches has been told not to come."""
        await self._service.drain()

    async def close(self) -> None:
        """Waits for no search: those in flight fail."""
        await self._service.close()


RemoteRetrievalActor = ray.remote(max_concurrency=4096)(RetrievalActor)  # pyrefly: ignore[unexpected-keyword]
