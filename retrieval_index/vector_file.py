"""The vectors of a build, on disk, slice by slice; what is written survives a kill.

    vectors-KEY.f32     float32 [count, dim], row i for passage i; as long as it will be from the start
    vectors-KEY.done    one byte per slice: 1 once the slice is on disk

A slice is written and synced before its mark is. KEY is a hash over what decides the vectors, so that a build that
was killed finds its own and nobody else's. Vectors of another build took hours, so they are deleted only on request.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from retrieval_index.errors import BuildError

ROWS_PER_SLICE = 1024  # fixed: an encoder's batches start at the same passages in every pass, so it rounds alike


class VectorFile:
    """Slices [start, start + 1024) of the vectors, written in any order by one process."""

    def __init__(self, folder: Path, count: int, dim: int, made_from: str, may_delete: bool = False) -> None:
        """Open what is there, or start.

        Args:
            made_from: passages and encoder, as text; part of the key.
            may_delete: vectors made from something else.

        Raises:
            BuildError: as `delete_others`.
        """
        self.count, self.dim = count, dim
        key = hashlib.sha256(f"{made_from} {count} {dim} {ROWS_PER_SLICE}".encode()).hexdigest()[:16]
        self._data, self._marks = folder / f"vectors-{key}.f32", folder / f"vectors-{key}.done"
        delete_others(folder, {self._data, self._marks}, may_delete)
        num_bytes = count * dim * 4
        if not (self._data.is_file() and self._data.stat().st_size == num_bytes and self._marks.is_file()):
            self._marks.unlink(missing_ok=True)  # first: marks must never outlive their data
            with self._data.open("wb") as data:
                data.truncate(num_bytes)
                os.fsync(data.fileno())
            self._marks.write_bytes(bytes(len(self._starts())))

    def missing(self) -> list[int]:
        """First rows of the slices that are not written yet."""
        return [start for start, mark in zip(self._starts(), self._marks.read_bytes(), strict=True) if not mark]

    def stop(self, start: int) -> int:
        """The row after the slice that begins at `start`."""
        return min(self.count, start + ROWS_PER_SLICE)

    def write(self, start: int, vectors_SD: np.ndarray) -> None:
        """Store one slice, float32 [stop - start, dim], and mark it."""
        if vectors_SD.shape != (self.stop(start) - start, self.dim):
            raise ValueError(f"slice {start} has shape {vectors_SD.shape}")
        _write_at(self._data, start * self.dim * 4, np.ascontiguousarray(vectors_SD, np.float32).tobytes())
        _write_at(self._marks, start // ROWS_PER_SLICE, b"\1")

    def array(self) -> np.ndarray:
        """All vectors, memory-mapped. float32 [count, dim]."""
        return np.memmap(self._data, np.float32, mode="r", shape=(self.count, self.dim))

    def _starts(self) -> range:
        return range(0, self.count, ROWS_PER_SLICE)


def delete_others(folder: Path, own: set[Path], may_delete: bool) -> None:
    """Delete what other builds that were killed here have left: those of other passages, or with another encoder.

    Raises:
        BuildError: it holds finished slices, and they must not be deleted.
    """
    others = set(folder.glob("vectors-*")) - own
    num_slices = sum(sum(marks.read_bytes()) for marks in others if marks.suffix == ".done")
    if num_slices and not may_delete:
        raise BuildError(
            f"{folder} holds {num_slices} slices of {ROWS_PER_SLICE} passages that a killed build has encoded, with "
            "another encoder or from another corpus",
            "out",
            "give encoder and corpus of that build to go on with it, choose another folder, or pass overwrite",
        )
    for path in others:
        path.unlink()


def _write_at(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
