"""One way to ask any index: queries in, rows and scores out, whether it is dense, BM25 or both.

    dense    queries ──encoder──▶ vectors ──FAISS──▶ rows, scores
    bm25     queries ──stems──▶ words ──inverted file──▶ rows, scores
    hybrid   dense and bm25, 20 deep each ──reciprocal rank fusion──▶ rows, scores

`open_retriever` reads from the manifest which of the three a folder is; `check_index` says beforehand, loading
neither torch nor FAISS, whether that will succeed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from retrieval_index import manifest as manifests
from retrieval_index.corpus import Passage
from retrieval_index.encoder import Encoder, make_recorded_encoder
from retrieval_index.manifest import Manifest

if TYPE_CHECKING:
    from retrieval_index.index import PassageIndex


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
        """See `Retriever`. Scores are inner products of unit vectors."""
        started_s = time.monotonic()
        vectors_SD = self._encoder.encode_queries(queries)
        encoded_s = time.monotonic()
        rows, scores = self._index.search(vectors_SD, top_k)
        return Hits(rows, scores, encoded_s - started_s, time.monotonic() - encoded_s)

    def passages(self, rows: Sequence[int], scores: Sequence[float]) -> tuple[Passage, ...]:
        """See `Retriever`."""
        return self._index.passages(rows, scores)


def check_index(folder: str | Path, *, encoder: str | None = None) -> Manifest:
    """Raise what `open_retriever` would raise, as far as that can be known without loading torch or FAISS.

    Raises:
        EncoderError and the errors of `manifest.check`.
    """
    record = manifests.load(folder).encoder
    chosen = make_recorded_encoder(record, encoder)
    return manifests.check(folder, encoder_fingerprint=chosen.fingerprint, dim=chosen.dim)


def open_retriever(
    folder: str | Path, *, encoder: str | None = None, device: str = "cpu", num_threads: int | None = None
) -> Retriever:
    """Open an index folder with what built it. Memory-mapped: neither passages nor vectors are read here.

    Args:
        encoder: its name or folder, where it is not the one that the manifest names (a folder that moved).
        device: `cpu` or `cuda`, of encoder and index.
        num_threads: of encoder and index each, which run one after the other; None leaves their defaults.

    Raises:
        EncoderError and the errors of `manifest.check`.
    """
    from retrieval_index.index import PassageIndex  # here, so that importing this module loads no FAISS

    record = manifests.load(folder).encoder
    chosen = make_recorded_encoder(record, encoder, device=device, num_threads=num_threads)
    index = PassageIndex.open(folder, encoder_fingerprint=chosen.fingerprint, device=device, num_threads=num_threads)
    return DenseRetriever(chosen, index)
