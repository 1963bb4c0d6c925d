"""One way to ask any index: queries in, rows and scores out, whether it is dense, BM25 or both.

    dense    queries ──encoder──▶ vectors ──FAISS──▶ rows, scores
    bm25     queries ──stems──▶ words ──inverted file──▶ rows, scores
    hybrid   dense and bm25, 20 deep each ──reciprocal rank fusion──▶ rows, scores

`open_retriever` reads from the manifest which of the three a folder is; `check_index` says beforehand, loading
neither torch nor FAISS, whether that will succeed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from retrieval_index import manifest as manifests
from retrieval_index.corpus import Passage, PassageStore
from retrieval_index.encoder import Encoder, make_recorded_encoder
from retrieval_index.encoder_process import EncoderProcess
from retrieval_index.manifest import BM25_FOLDER, PASSAGES_FILE, Manifest

if TYPE_CHECKING:
    from retrieval_index.bm25 import Bm25Index
    from retrieval_index.index import PassageIndex

FUSION_DEPTH = 20
RANK_OFFSET = 60


@dataclass(frozen=True, slots=True)
class Hits:
    """What one call found for n queries; row i belongs to query i, best first.

    Example: two queries, k = 2, the second found one passage only:
        `Hits(rows=[[7, 3], [5, -1]], scores=[[0.9, 0.4], [0.2, 0.0]], encode_s=0.01, search_s=0.002)`
    """

    rows: np.ndarray
    """int64 [n, k], k = min(top_k, passages in the index); -1 fills up where fewer were found."""
    scores: np.ndarray
    """float32 [n, k]; of a row -1 without meaning."""
    encode_s: float
    search_s: float


class Retriever(Protocol):
    """What a service batches over."""

    @property
    def manifest(self) -> Manifest: ...

    def find(self, queries: Sequence[str], top_k: int) -> Hits:
        """Search all queries at once. Blocking, and to be called from one thread at a time.

        A query's hits depend on the query alone (scores to within 1e-6: other batch sizes round otherwise).
        A query longer than the encoder's `max_length` is cut there; one without a word finds what its zero
        vector or empty word list finds: anything or nothing. `top_k` is at least 1.
        """
        ...

    def passages(self, rows: Sequence[int], scores: Sequence[float]) -> tuple[Passage, ...]:
        """The passages of one query's rows, those of row -1 left out."""
        ...


class DenseRetriever:
    """An encoder and its FAISS index."""

    def __init__(self, encoder: Encoder, index: PassageIndex) -> None:
        self._encoder, self._index = encoder, index

    @property
    def manifest(self) -> Manifest:
        """Of the folder."""
        return self._index.manifest

    def find(self, queries: Sequence[str], top_k: int) -> Hits:
        """See `Retriever`. Scores are inner products, of unit vectors as a rule."""
        started_s = time.monotonic()
        vectors_SD = self._encoder.encode_queries(queries)
        encoded_s = time.monotonic()
        rows, scores = self._index.search(vectors_SD, top_k)
        return Hits(rows, scores, encoded_s - started_s, time.monotonic() - encoded_s)

    def passages(self, rows: Sequence[int], scores: Sequence[float]) -> tuple[Passage, ...]:
        """See `Retriever`."""
        return self._index.passages(rows, scores)


class Bm25Retriever:
    """An inverted file and its passages. It finds only passages that share a word with the query."""

    def __init__(self, manifest: Manifest, index: Bm25Index, store: PassageStore) -> None:
        self.manifest, self._index, self._store = manifest, index, store

    def find(self, queries: Sequence[str], top_k: int) -> Hits:
        """See `Retriever`. Scores are BM25's, above 0 and without an upper end."""
        started_s = time.monotonic()
        rows, scores = self._index.search(queries, top_k)
        return Hits(rows, scores, 0.0, time.monotonic() - started_s)

    def passages(self, rows: Sequence[int], scores: Sequence[float]) -> tuple[Passage, ...]:
        """See `Retriever`."""
        return self._store.passages(rows, scores)


class HybridRetriever:
    """Reciprocal rank fusion of a dense and a BM25 retriever over the same passages."""

    def __init__(self, dense: Retriever, lexical: Retriever) -> None:
        self._dense, self._lexical = dense, lexical
        self.manifest = dense.manifest

    def find(self, queries: Sequence[str], top_k: int) -> Hits:
        """See `Retriever`. Scores are those of `fuse`; each side is asked for 20 passages, or `top_k` if more."""
        depth = max(FUSION_DEPTH, top_k)
        dense, lexical = self._dense.find(queries, depth), self._lexical.find(queries, depth)
        started_s = time.monotonic()
        rows, scores = fuse(dense.rows, lexical.rows, min(top_k, self.manifest.count))
        search_s = dense.search_s + lexical.search_s + time.monotonic() - started_s
        return Hits(rows, scores, dense.encode_s, search_s)

    def passages(self, rows: Sequence[int], scores: Sequence[float]) -> tuple[Passage, ...]:
        """See `Retriever`."""
        return self._dense.passages(rows, scores)


def fuse(first_SK: np.ndarray, second_SK: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Reciprocal rank fusion (Cormack, Clarke and Büttcher 2009): a row's score is the sum of 1 / (60 + rank).

    Args:
        first_SK, second_SK: int64 [n, k], best first, ranks from 1; rows of -1 are left out.

    Returns:
        rows int64 [n, top_k] and scores float32 [n, top_k], filled up with -1; equal scores in the order of `first`.

    Example: `fuse([[7, 3]], [[3, 5]], 3)` → rows [[3, 7, 5]], scores [[1/62 + 1/61, 1/61, 1/62]]
    """
    rows = np.full((len(first_SK), top_k), -1, np.int64)
    scores = np.zeros((len(first_SK), top_k), np.float32)
    for i, rankings in enumerate(zip(first_SK.tolist(), second_SK.tolist(), strict=True)):
        sums: dict[int, float] = {}
        for ranking in rankings:
            for rank, row in enumerate(ranking, start=1):
                if row >= 0:
                    sums[row] = sums.get(row, 0.0) + 1 / (RANK_OFFSET + rank)
        best = sorted(sums, key=lambda row: -sums[row])[:top_k]
        rows[i, : len(best)], scores[i, : len(best)] = best, [sums[row] for row in best]
    return rows, scores


def check_index(folder: str | Path, *, encoder: str | None = None) -> Manifest:
    """Raise what `open_retriever` would raise, as far as that can be known without loading torch or FAISS.

    Raises:
        EncoderError and the errors of `manifest.check`.
    """
    record = manifests.load(folder).encoder
    if record is None:
        return manifests.check(folder)
    chosen = make_recorded_encoder(record, encoder)
    return manifests.check(folder, encoder_fingerprint=chosen.fingerprint, dim=chosen.dim)


def open_retriever(
    folder: str | Path, *, encoder: str | None = None, device: str = "cpu", num_threads: int | None = None
) -> Retriever:
    """Open an index folder with what built it. Memory-mapped: neither passages nor vectors are read here.

    Args:
        encoder: its name or folder, where it is not the one that the manifest names (a folder that moved). Kind
            bm25 has none and takes no notice.
        device: `cpu` or `cuda`, of encoder and vectors; with `cuda` the encoder has a process of its own.
        num_threads: of encoder and vectors each, which run one after the other; None leaves their defaults.

    Raises:
        EncoderError and the errors of `manifest.check`.
    """
    folder = Path(folder)
    manifest = manifests.load(folder)
    retrievers: list[Retriever] = []
    if manifest.encoder is not None:
        from retrieval_index.index import PassageIndex  # here, so that importing this module loads no FAISS

        make = functools.partial(
            make_recorded_encoder, manifest.encoder, encoder, device=device, num_threads=num_threads
        )
        chosen = EncoderProcess(make) if device == "cuda" else make()
        index = PassageIndex.open(
            folder, encoder_fingerprint=chosen.fingerprint, device=device, num_threads=num_threads
        )
        retrievers.append(DenseRetriever(chosen, index))
    if manifest.bm25 is not None:
        from retrieval_index.bm25 import Bm25Index

        manifests.check(folder)
        words = Bm25Index(folder / BM25_FOLDER)
        retrievers.append(Bm25Retriever(manifest, words, PassageStore(folder / PASSAGES_FILE)))
    return retrievers[0] if len(retrievers) == 1 else HybridRetriever(*retrievers)
