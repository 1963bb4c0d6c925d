"""The encoder pass as a Ray Data job, for tens of millions of passages (`build --ray`). The only user of Ray here.

    missing slices of the VectorFile ──Ray Data──▶ one encoder per worker ──▶ (first row, vectors), in any order
                                                                                    │
    VectorFile ◀── written and marked by the driver, so that a killed job goes on ◀──┘

Every worker reads the passages file of the unfinished build by its path: the index folder must lie on storage that all
nodes see. A slice is encoded as in the plain pass, with the same borders of batches and one thread a worker, so the
vectors are the same bytes as those of a plain pass in one thread (on equal machines).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import ray.data
from ray.exceptions import RayError

from retrieval_index.corpus import PassageStore
from retrieval_index.encoder import Encoder, make_recorded_encoder
from retrieval_index.errors import EmbeddingFailed, EncoderMismatch
from retrieval_index.manifest import EncoderRecord
from retrieval_index.vector_file import ROWS_PER_SLICE, VectorFile

if TYPE_CHECKING:
    from retrieval_index.build import Progress

SLICES_PER_BLOCK = 4  # what is lost at most, per worker, when a job is killed


class RayEmbedding:
    """A `build.EmbedPass` over as many workers as the cluster has CPUs (or GPUs).

    Args:
        device: `cpu` or `cuda`, of each worker's encoder.
        address: of the cluster; None joins the one that `RAY_ADDRESS` names or that runs here, else starts one.
            Ray that is initialised already is used as it is.
        max_workers: None is one for each CPU (or GPU).
    """

    def __init__(self, *, device: str = "cpu", address: str | None = None, max_workers: int | None = None) -> None:
        self._device, self._address, self._max_workers = device, address, max_workers

    def __call__(self, passages: Path, encoder: Encoder, file: VectorFile, progress: Progress) -> None:
        """Fill the missing slices.

        Raises:
            EmbeddingFailed: workers failed; what they had encoded stays for the next run.
        """
        missing = file.missing()
        done = file.count - sum(file.stop(start) - start for start in missing)
        progress(done, file.count)
        if not missing:
            return
        if not ray.is_initialized():
            ray.init(address=self._address)
        try:
            for row in self._encoded(missing, passages, encoder, file.count).iter_rows():
                start, stop = row["start"], file.stop(row["start"])
                file.write(start, np.frombuffer(row["vectors"], np.float32).reshape(stop - start, file.dim))
                done += stop - start
                progress(done, file.count)
        except RayError as error:
            raise EmbeddingFailed(
                f"a worker failed after {done:,} of {file.count:,} passages: {error}",
                "ray",
                f"mend it and run the build again, it goes on from there; all nodes must see {passages.parent}",
            ) from error

    def _encoded(self, missing: list[int], passages: Path, encoder: Encoder, count: int) -> ray.data.Dataset:
        resource = "GPU" if self._device == "cuda" else "CPU"
        num_workers = self._max_workers or max(1, math.floor(ray.cluster_resources().get(resource, 1)))
        record = EncoderRecord(encoder.name, encoder.fingerprint, dict(encoder.settings))
        ray.data.DataContext.get_current().enable_progress_bars = False  # ours has the time left
        slices = ray.data.from_items(
            [{"start": start} for start in missing], override_num_blocks=math.ceil(len(missing) / SLICES_PER_BLOCK)
        )
        return slices.map_batches(
            _SliceEncoder,
            fn_constructor_args=(str(passages.resolve()), record, self._device, count),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=num_workers),
            num_cpus=1,
            num_gpus=1 if self._device == "cuda" else None,
        )


class _SliceEncoder:
    """One worker: its own encoder, and the passages by memory map."""

    def __init__(self, passages: str, record: EncoderRecord, device: str, count: int) -> None:
        self._encoder = make_recorded_encoder(record, device=device, num_threads=1)
        if self._encoder.fingerprint != record.fingerprint:
            raise EncoderMismatch(
                f"{record.name!r} is another encoder on this node", "encoder", "copy it from the driver's"
            )
        self._store, self._count = PassageStore(Path(passages)), count

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        (start,) = batch["start"].tolist()
        texts = self._store.embedding_texts(start, min(self._count, start + ROWS_PER_SLICE))
        vectors_SD = np.ascontiguousarray(self._encoder.encode_passages(texts), np.float32)
        return {"start": [start], "vectors": [vectors_SD.tobytes()]}
