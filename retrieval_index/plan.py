"""What to build for a corpus of this size, and what it will cost: pure functions, no FAISS.

kind, passages, width, Tuning ──plan_index──▶ IndexPlan ──estimate──▶ Estimate (printed before a build starts)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from retrieval_index.errors import BuildError

DENSE_KINDS = ("flat", "ivf", "hnsw", "ivfpq")
KINDS = (*DENSE_KINDS, "bm25", "hybrid")
TRAINING_ROWS_PER_LIST = 64  # FAISS warns below 39 and gains little above 256
MIN_PQ_ROWS = 39 * 256  # for the 2^8 centroids of a sub-quantiser; fewer passages fit in memory anyway
LIST_ITERATIONS, PQ_ITERATIONS = 10, 25  # of k-means, FAISS's own numbers
MAX_PQ_TRAINING_ROWS = 256 * 256  # FAISS takes no more

# Measured by benchmarks/index_scale.py on one AVX-512 core; another machine differs by its own factor.
FLOPS_PER_S = 60e9  # of the matrix products that assign vectors to lists
PQ_DISTANCES_PER_S, SMALL_PQ_DISTANCES_PER_S = 3e9, 3e8  # of four values to a centroid; FAISS is slow on few rows
SMALL_PQ_ROWS = 32_768  # somewhere between 20,000 and 40,000
HNSW_VALUES_PER_S = 2.5e6  # vectors times width inserted at efConstruction 40 into 15,000; slower by log n
HNSW_LINK_BYTES = 2 * 4  # two int32 for each of `hnsw_links` on the lowest level; the upper ones add little
BM25_BYTES_PER_WORD = 8  # float32 score and int32 row, a word that occurs twice counted once; and the vocabulary
BM25_MEMORY_BYTES_PER_WORD = 75
BM25_SECONDS_PER_MEGAWORD = 2
WORDS_PER_PASSAGE = 60


@dataclass(frozen=True, slots=True)
class Tuning:
    """Overrides of what `plan_index` chooses; None is its choice."""

    nlist: int | None = None
    """Inverted lists of ivf and ivfpq."""
    nprobe: int | None = None
    """Lists visited in a search."""
    pq_bytes: int | None = None
    """Bytes of one ivfpq vector; divides the width."""
    training_rows: int | None = None
    """Vectors that lists and codes are trained on."""
    hnsw_links: int | None = None
    """Links of a node on a level of hnsw."""
    ef_construction: int | None = None
    """Candidates of an hnsw insertion."""
    ef_search: int | None = None
    """Candidates of an hnsw search."""


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """What to build: FAISS's factory string, rows to train on, and the parameters to build and search with."""

    factory: str
    num_training_rows: int = 0
    search: Mapping[str, int] = field(default_factory=dict)
    build: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Cost of a build without the encoder pass, whose rate is only known once it runs."""

    file_bytes: int
    """Of the vectors; mapped while it is searched."""
    memory_bytes: int
    """At the peak of the build, interpreter apart."""
    disk_bytes: int
    """At the peak of the build, passages apart."""
    seconds: float
    """Training and adding."""


def plan_index(kind: str, count: int, dim: int, tuning: Tuning | None = None) -> IndexPlan:
    """Choose parameters from size alone, where `tuning` says nothing.

    `flat` is exact. `ivf` has 4·√n lists and visits a quarter of them, at most 64 (0.98 of flat's top 6 on
    15,000 MiniLM vectors); `ivfpq` the same with dim/4 bytes a vector; `hnsw` has 32 links a node.

    Raises:
        BuildError: unknown kind, too few passages to train it, or tuning that does not fit.
    """
    tuning = tuning or Tuning()
    if kind == "flat":
        return IndexPlan("Flat")
    if kind == "hnsw":
        links = tuning.hnsw_links or 32
        construction = {"efConstruction": tuning.ef_construction or 40}
        return IndexPlan(f"HNSW{links},Flat", 0, {"efSearch": tuning.ef_search or 128}, construction)
    if kind not in DENSE_KINDS:
        raise BuildError(f"unknown kind {kind!r}", "kind", f"use one of {', '.join(KINDS)}")
    num_lists = tuning.nlist or max(1, min(int(4 * math.sqrt(count)), count // TRAINING_ROWS_PER_LIST))
    if num_lists > count:
        raise BuildError(f"{num_lists} lists for {count} passages", "nlist", f"use at most {count}")
    num_rows = tuning.training_rows or num_lists * TRAINING_ROWS_PER_LIST
    search = {"nprobe": min(num_lists, tuning.nprobe or max(8, min(num_lists // 4, 64)))}
    if kind == "ivf":
        return IndexPlan(f"IVF{num_lists},Flat", min(count, max(num_rows, num_lists)), search)
    if count < MIN_PQ_ROWS:
        raise BuildError(f"{count} passages are too few for ivfpq", "kind", "use kind flat")
    num_parts = tuning.pq_bytes or next(parts for parts in range(max(1, dim // 4), 0, -1) if dim % parts == 0)
    if dim % num_parts:
        raise BuildError(f"{num_parts} bytes do not divide the width {dim}", "pq_bytes", f"use {dim // 4}, say")
    # "np": no polysemous training, which takes minutes and serves a search that is not used here.
    return IndexPlan(f"IVF{num_lists},PQ{num_parts}x8np", min(count, max(num_rows, num_lists, MIN_PQ_ROWS)), search)


def estimate(plan: IndexPlan, count: int, dim: int, num_threads: int, *, given_vectors: bool = False) -> Estimate:
    """What this plan takes for `count` vectors of width `dim`.

    Args:
        given_vectors: the vectors are in a file already and need no scratch file.
    """
    row_bytes, seconds = 4 * dim, 0.0
    scratch_bytes = 0 if given_vectors else count * row_bytes
    first, _, codec = plan.factory.partition(",")
    if first.startswith("IVF"):
        num_lists = int(first.removeprefix("IVF"))
        code_bytes = row_bytes if codec == "Flat" else int(codec.removeprefix("PQ").partition("x")[0])
        file_bytes = count * (code_bytes + 8) + num_lists * row_bytes
        assigned = LIST_ITERATIONS * plan.num_training_rows + count  # rows compared with all centroids
        seconds = 2 * assigned * num_lists * dim / FLOPS_PER_S
        if codec != "Flat":
            num_rows = min(plan.num_training_rows, MAX_PQ_TRAINING_ROWS)
            rate = PQ_DISTANCES_PER_S if num_rows > SMALL_PQ_ROWS else SMALL_PQ_DISTANCES_PER_S
            seconds += (PQ_ITERATIONS * num_rows + count) * 256 * code_bytes / rate
    elif first.startswith("HNSW"):
        file_bytes = count * (row_bytes + HNSW_LINK_BYTES * int(first.removeprefix("HNSW")))
        slower = max(1.0, math.log(count, 15_000)) * plan.build["efConstruction"] / 40
        seconds = count * dim / HNSW_VALUES_PER_S * slower
    else:
        file_bytes = count * row_bytes
    training_bytes = 2 * plan.num_training_rows * row_bytes  # the sample and FAISS's residuals of it
    return Estimate(file_bytes, file_bytes + training_bytes, file_bytes + scratch_bytes, seconds / num_threads)


def describe(plan: IndexPlan, count: int, dim: int, num_threads: int, *, given_vectors: bool = False) -> str:
    """The plan and its cost in one line."""
    cost = estimate(plan, count, dim, num_threads, given_vectors=given_vectors)
    trained = [f"trained on {plan.num_training_rows:,}"] if plan.num_training_rows else []
    options = [f"{key} {value}" for key, value in {**plan.build, **plan.search}.items()]
    return (
        f"{count:,} passages: {', '.join([plan.factory, *trained, *options])}; beside the encoder about "
        f"{cost.seconds:,.0f} s, {cost.memory_bytes / 1e6:,.0f} MB of memory, {cost.disk_bytes / 1e6:,.0f} MB of disk; "
        f"vectors {cost.file_bytes / 1e6:,.0f} MB"
    )


def describe_bm25(count: int) -> str:
    """The cost of the inverted file in one line, at 60 words a passage."""
    mega_words = count * WORDS_PER_PASSAGE / 1e6
    return (
        f"{count:,} passages: BM25; about {mega_words * BM25_SECONDS_PER_MEGAWORD:,.0f} s, "
        f"{mega_words * BM25_MEMORY_BYTES_PER_WORD:,.0f} MB of memory; file {mega_words * BM25_BYTES_PER_WORD:,.0f} MB"
    )
