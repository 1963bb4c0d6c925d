"""An opened index: vectors in, rows and scores out; rows in, passages out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import faiss
import numpy as np

from retrieval_index import manifest as manifests
from retrieval_index.corpus import Passage, PassageStore
from retrieval_index.errors import DamagedIndex, DimensionMismatch
from retrieval_index.gpu import to_gpus
from retrieval_index.manifest import PASSAGES_FILE, VECTORS_FILE, Manifest


class PassageIndex:
    """A FAISS index with its passages. On a CPU both are memory-mapped: opening reads neither.

    `search` is not thread-safe on a GPU; `service.RetrievalService` calls it from one thread.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, vectors: faiss.Index, device: str, num_threads: int | None
    ) -> None:
        self.folder, self.manifest, self.device = folder, manifest, device
        self._vectors, self._num_threads = vectors, num_threads
        self._passages = PassageStore(folder / PASSAGES_FILE)

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        encoder_fingerprint: str | None = None,
        device: str = "cpu",
        num_threads: int | None = None,
    ) -> PassageIndex:
        """Check and open an index folder.

        Args:
            encoder_fingerprint: of the encoder that will make the queries; None skips that check.
            device: `cpu` or `cuda`: the GPUs that are visible and needed. Without a usable one it falls back to
                the CPU and logs why; the attribute `device` says what came of it.
            num_threads: of FAISS, set in the thread that searches; None leaves FAISS's default.

        Raises:
            The errors of `manifest.check`; DamagedIndex where FAISS cannot read the file.
        """
        folder = Path(folder)
        manifest = manifests.check(folder, encoder_fingerprint=encoder_fingerprint)
        try:
            vectors = faiss.read_index(str(folder / VECTORS_FILE), faiss.IO_FLAG_MMAP_IFC)
        except RuntimeError as error:
            raise DamagedIndex(
                f"FAISS cannot read {folder / VECTORS_FILE}: {error}", "index", manifests.BUILD_AGAIN
            ) from error
        if (vectors.ntotal, vectors.d) != (manifest.count, manifest.dim):
            raise DamagedIndex(
                f"{folder / VECTORS_FILE} holds {vectors.ntotal} vectors of width {vectors.d}, the manifest says "
                f"{manifest.count} of {manifest.dim}",
                "index",
                manifests.BUILD_AGAIN,
            )
        for name, value in manifest.search.items():
            faiss.ParameterSpace().set_index_parameter(vectors, name, value)
        if device == "cuda":
            vectors, plan = to_gpus(vectors)
            device = str(plan)
        return cls(folder, manifest, vectors, device, num_threads)

    def search(self, queries_SD: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """The nearest rows of each query, best first.

        Args:
            queries_SD: float32 [n, dim], normalised.
            top_k: at least 1; an index of fewer passages returns all of them.

        Returns:
            rows int64 [n, k] and scores float32 [n, k], k = min(top_k, count). Row -1 fills up where an
            approximate index found fewer.

        Raises:
            DimensionMismatch.
        """
        if queries_SD.ndim != 2 or queries_SD.shape[1] != self.manifest.dim:
            raise DimensionMismatch(
                f"queries have shape {queries_SD.shape}, the index has dimension {self.manifest.dim}",
                "encoder",
                "use the encoder that the manifest names",
            )
        if self._num_threads is not None:
            faiss.omp_set_num_threads(self._num_threads)  # here: OpenMP's setting belongs to the calling thread
        scores, rows = self._vectors.search(np.ascontiguousarray(queries_SD), min(top_k, self.manifest.count))
        return rows, scores

    def passages(self, rows: Sequence[int], scores: Sequence[float]) -> tuple[Passage, ...]:
        """The passages of one query's rows, those of row -1 left out."""
        return self._passages.passages(rows, scores)
