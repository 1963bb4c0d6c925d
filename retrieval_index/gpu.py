"""Where on the GPUs an index goes: decided from bytes by a pure function, then done.

    bytes of the index, free bytes of each GPU ──plan_gpus──▶ GpuPlan ──to_gpus──▶ a FAISS index on GPUs, or the CPU's

Exact before fast: float32 on several GPUs, a shard each, comes before float16 on one (whose scores are off by 1e-3).
FAISS on GPUs belongs in a process without torch's CUDA runtime: `python -m retrieval_index serve`.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import faiss

log = logging.getLogger(__name__)

SCRATCH_BYTES = 1 << 30
"""Left free on each GPU: FAISS's temporary memory, and the queries."""


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """`gpus` empty = stay on the CPU, for `reason`. Several GPUs hold a copy each, or a shard each."""

    gpus: tuple[int, ...]
    sharded: bool = False
    float16: bool = False
    reason: str = ""

    def __str__(self) -> str:
        if not self.gpus:
            return f"cpu ({self.reason})"
        layout = "" if len(self.gpus) == 1 else ", a shard each" if self.sharded else ", a copy each"
        return f"cuda {','.join(map(str, self.gpus))}{layout}{', float16' if self.float16 else ''}"


def plan_gpus(index_bytes: int, float16_bytes: int, free_bytes: Sequence[int]) -> GpuPlan:
    """Decide.

    Args:
        index_bytes: vectors, codes and lists as they are.
        float16_bytes: the same with float16 storage; equal where that saves nothing (PQ codes).
        free_bytes: of each visible GPU; none of them may be used to the last `SCRATCH_BYTES`.

    Example: 40 GB on two GPUs with 30 GB each → both, a shard each, float32. On one of them → float16.
    """
    room = [max(0, free - SCRATCH_BYTES) for free in free_bytes]
    if not room:
        return GpuPlan((), reason="FAISS sees no GPU")
    for num_bytes, float16 in ((index_bytes, False), (float16_bytes, True)):
        holds_all = tuple(gpu for gpu, space in enumerate(room) if space >= num_bytes)
        if holds_all:
            return GpuPlan(holds_all, float16=float16)
        # Shards are of equal size, so the smallest GPU decides; leave out those that are too full.
        by_room = sorted(range(len(room)), key=lambda gpu: -room[gpu])
        for count in range(2, len(room) + 1):
            if room[by_room[count - 1]] * count >= num_bytes:
                return GpuPlan(tuple(sorted(by_room[:count])), sharded=True, float16=float16)
        if float16_bytes >= index_bytes:
            break
    return GpuPlan(
        (),
        reason=f"the index takes {min(index_bytes, float16_bytes) / 1e9:.1f} GB, the GPUs have "
        f"{', '.join(f'{space / 1e9:.1f}' for space in room)} GB free",
    )


def to_gpus(index: faiss.Index) -> tuple[faiss.Index, GpuPlan]:
    """The index on the GPUs that are visible, or as it is; the plan says which, and a fall back is logged."""
    plan = _plan_for(index)
    if plan.gpus:
        try:
            return copy_to_gpus(index, plan), plan
        except RuntimeError as error:  # memory that somebody took meanwhile
            plan = GpuPlan((), reason=f"FAISS could not copy the index: {error}")
    log.warning("retrieval runs on the CPU: %s", plan.reason)
    return index, plan


def _plan_for(index: faiss.Index) -> GpuPlan:
    if not hasattr(faiss, "StandardGpuResources"):
        return GpuPlan((), reason="this FAISS is built without GPU support (install faiss-gpu)")
    if isinstance(faiss.downcast_index(index), faiss.IndexHNSW):
        return GpuPlan((), reason="HNSW has no GPU form")
    return plan_gpus(*index_bytes(index), free_bytes(faiss.get_num_gpus()))


def copy_to_gpus(index: faiss.Index, plan: GpuPlan) -> faiss.Index:
    """Do what a plan says that names GPUs. Raises RuntimeError where FAISS cannot."""
    options = faiss.GpuMultipleClonerOptions()
    options.shard = plan.sharded
    options.useFloat16 = plan.float16
    if len(plan.gpus) == 1:
        return faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), plan.gpus[0], index, options)
    return faiss.index_cpu_to_gpus_list(index, co=options, gpus=list(plan.gpus))


def index_bytes(index: faiss.Index) -> tuple[int, int]:
    """(bytes as stored, bytes with float16 storage) of a flat or IVF index, ids included.

    Only flat vectors shrink: FAISS keeps inverted lists on a GPU as they are.
    """
    inverted = faiss.try_extract_index_ivf(index)
    if inverted is None:
        num_bytes = index.ntotal * index.d * 4
        return num_bytes, num_bytes // 2
    num_bytes = inverted.ntotal * (inverted.code_size + 8) + inverted.nlist * inverted.d * 4
    return num_bytes, num_bytes


def free_bytes(num_gpus: int) -> list[int]:
    """Free memory of each visible GPU, from the CUDA runtime that FAISS has loaded (FAISS itself does not tell)."""
    if num_gpus == 0:
        return []
    runtime = _cuda_runtime()
    free, total, found = ctypes.c_size_t(), ctypes.c_size_t(), []
    for gpu in range(num_gpus):
        if runtime.cudaSetDevice(gpu) or runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)):
            raise RuntimeError(f"CUDA tells nothing of GPU {gpu}")
        found.append(free.value)
    runtime.cudaSetDevice(0)
    return found


def _cuda_runtime() -> ctypes.CDLL:
    for name in ("libcudart.so.12", "libcudart.so.13"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError("there is no libcudart.so.12 or .13, though FAISS sees a GPU")
