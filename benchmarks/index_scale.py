"""Five million vectors on one machine: what an IVF-PQ index costs to build, to open and to search, and what it finds.

    python benchmarks/index_scale.py [--count 5000000] [--threads 1] [--json FILE|-]

The corpus is synthetic: `count` unit vectors of width 128, fifty around each random centre (its centre plus noise 0.6
times as long), with a spectrum that falls off as 1/√i, turned at random, made slice by slice from a fixed seed. The
structure is there because an index that compresses lives on it: on white noise no IVF-PQ finds much. It is made to be
like real embeddings (at dim/4 bytes a vector IVF-PQ finds 0.84 of the ten nearest of 15,000 MiniLM passages, and 0.75
of 200,000 such vectors), but is no statement about any encoder. Queries are drawn in the same way and are not in the
corpus. The passages are placeholders ("n123"); the folder is otherwise one
that `python -m retrieval_index build --kind ivfpq --embeddings` writes, by the same code.

Each stage runs in a process of its own. `peak_rss_bytes` counts the private memory of the build (interpreter and
libraries included, the memory-mapped vectors not: those pages belong to the file cache; `peak_rss_mapped_bytes` has
them too). `open_to_first_search_s` is from opening the folder to the first result, imports apart; the pages of the
index may be in the file cache, since the build has just written them. `recall_at_10` counts how many of the ten
nearest passages by exact search are among the ten found, over 1,000 queries, at nprobe as planned, and twice and four
times that (`recall_by_nprobe`). Constants (per thread, from processor time) feed `retrieval_index/plan.py` and
docs/retrieval.md. The bars: peak below 6 GB, first search below 1 s.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

DIM, ROWS_PER_CENTRE, NOISE, SLICE, NUM_QUERIES, TOP_K = 128, 50, 0.6, 100_000, 1_000, 10
MAX_PEAK_BYTES, MAX_OPEN_S = 6e9, 1.0


class MemoryPeak:
    """Largest private and resident memory of this process while the block runs, looked at ten times a second."""

    def __enter__(self) -> MemoryPeak:
        self.private_bytes = self.resident_bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join(timeout=5)
        self._look()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            self._look()

    def _look(self) -> None:
        pages = [int(field) * os.sysconf("SC_PAGE_SIZE") for field in Path("/proc/self/statm").read_text().split()[1:3]]
        self.resident_bytes = max(self.resident_bytes, pages[0])
        self.private_bytes = max(self.private_bytes, pages[0] - pages[1])


class Source:
    """Unit vectors of a corpus of this size."""

    def __init__(self, corpus_count: int) -> None:
        rng = np.random.default_rng(7)
        self._scales_D = np.arange(1, DIM + 1, dtype=np.float32) ** -0.5
        self._turn_DD = np.linalg.qr(rng.standard_normal((DIM, DIM), dtype=np.float32))[0]
        num_centres = max(1, corpus_count // ROWS_PER_CENTRE)
        self._centres_CD = rng.standard_normal((num_centres, DIM), dtype=np.float32) * self._scales_D

    def draw(self, seed: int, count: int) -> np.ndarray:
        """float32 [count, 128], the same for the same seed."""
        rng = np.random.default_rng([7, seed])
        vectors_SD = self._centres_CD[rng.integers(0, len(self._centres_CD), count)]
        vectors_SD += NOISE * self._scales_D * rng.standard_normal((count, DIM), dtype=np.float32)
        vectors_SD = vectors_SD @ self._turn_DD
        return vectors_SD / np.linalg.norm(vectors_SD, axis=1, keepdims=True)

    def queries(self) -> np.ndarray:
        """float32 [1000, 128], from another seed than every slice."""
        return self.draw(1_000_000, NUM_QUERIES)


class Placeholders:
    """Passages "n0", "n1", … with nothing else in them."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        from retrieval_index.corpus import Document

        return (Document(f"n{row}", "", "") for row in range(self._count))


def write_vectors(path: Path, count: int) -> dict[str, float]:
    """The corpus as a .npy file, written slice by slice."""
    source = Source(count)
    vectors = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(count, DIM))
    for seed, start in enumerate(range(0, count, SLICE)):
        stop = min(count, start + SLICE)
        vectors[start:stop] = source.draw(seed, stop - start)
    vectors.flush()
    return {}


def build(folder: Path, count: int, threads: int) -> dict[str, float]:
    """Build the folder, and say what it took."""
    import faiss

    from retrieval_index.build import build_index
    from retrieval_index.encoder import HashEncoder
    from retrieval_index.plan import estimate, plan_index

    faiss.omp_set_num_threads(threads)
    guess = estimate(plan_index("ivfpq", count, DIM), count, DIM, threads, given_vectors=True)
    started_s, cpu_started_s = time.monotonic(), time.process_time()
    with MemoryPeak() as peak:
        build_index(
            Placeholders(count),
            HashEncoder(DIM),  # names the width; it encodes nothing here
            "ivfpq",
            folder / "index",
            embeddings=folder / "vectors.npy",
            announce=lambda line: print(line, file=sys.stderr),
        )
    return {
        "build_s": time.monotonic() - started_s,
        "build_cpu_s": time.process_time() - cpu_started_s,
        "estimated_build_cpu_s": guess.seconds * threads,
        "peak_rss_bytes": peak.private_bytes,
        "peak_rss_mapped_bytes": peak.resident_bytes,
        "estimated_memory_bytes": guess.memory_bytes,
        "index_file_bytes": (folder / "index" / "vectors.faiss").stat().st_size,
        "estimated_file_bytes": guess.file_bytes,
        "passages_file_bytes": (folder / "index" / "passages.arrow").stat().st_size,
    }


def search(folder: Path, count: int, threads: int) -> dict[str, Any]:
    """Open, search, and compare with the exact result."""
    from retrieval_index.index import PassageIndex

    asked_SD = Source(count).queries()
    with MemoryPeak() as peak:
        started_s = time.monotonic()
        index = PassageIndex.open(folder / "index", num_threads=threads)
        index.passages(*(found[0] for found in index.search(asked_SD[:1], TOP_K)))
        first_s = time.monotonic() - started_s
        cpu_started_s = time.process_time()
        found_SK, _ = index.search(asked_SD, TOP_K)
        search_cpu_s = time.process_time() - cpu_started_s
    exact_SK = np.load(folder / "exact.npy")
    nprobe = index.manifest.search["nprobe"]
    by_nprobe = {str(nprobe): recall(found_SK, exact_SK)}
    for factor in (2, 4):
        by_nprobe[str(factor * nprobe)] = recall(search_with(folder, asked_SD, factor * nprobe), exact_SK)
    return {
        "factory": index.manifest.factory,
        "open_to_first_search_s": first_s,
        "search_cpu_s_per_query": search_cpu_s / len(asked_SD),
        "search_peak_private_bytes": peak.private_bytes,
        "recall_at_10": by_nprobe[str(nprobe)],
        "recall_by_nprobe": by_nprobe,
    }


def search_with(folder: Path, asked_SD: np.ndarray, nprobe: int) -> np.ndarray:
    """The same file, with other lists visited."""
    import faiss

    index = faiss.read_index(str(folder / "index" / "vectors.faiss"), faiss.IO_FLAG_MMAP_IFC)
    faiss.ParameterSpace().set_index_parameter(index, "nprobe", nprobe)
    return index.search(asked_SD, TOP_K)[1]


def search_exactly(folder: Path, count: int) -> dict[str, float]:
    """The true ten nearest of each query, slice by slice, as exact.npy."""
    vectors, asked_SD = np.load(folder / "vectors.npy", mmap_mode="r"), Source(count).queries()
    scores_SK = np.full((NUM_QUERIES, TOP_K), -np.inf, np.float32)
    rows_SK = np.full((NUM_QUERIES, TOP_K), -1, np.int64)
    for start in range(0, count, SLICE):
        scores_SN = asked_SD @ vectors[start : start + SLICE].T
        best_SK = np.argpartition(-scores_SN, TOP_K, axis=1)[:, :TOP_K]
        both = np.concatenate([scores_SK, np.take_along_axis(scores_SN, best_SK, axis=1)], axis=1)
        order = np.argsort(-both, axis=1)[:, :TOP_K]
        scores_SK = np.take_along_axis(both, order, axis=1)
        rows_SK = np.take_along_axis(np.concatenate([rows_SK, best_SK + start], axis=1), order, axis=1)
    np.save(folder / "exact.npy", rows_SK)
    return {}


def recall(found_SK: np.ndarray, exact_SK: np.ndarray) -> float:
    """Mean share of the exact rows among those found."""
    return float(
        np.mean([len(set(a) & set(b)) / TOP_K for a, b in zip(found_SK.tolist(), exact_SK.tolist(), strict=True)])
    )


def constants() -> dict[str, float]:
    """Rates of one thread, from processor time: those that `retrieval_index/plan.py` estimates with."""
    import faiss

    faiss.omp_set_num_threads(1)
    vectors_SD = Source(40_000).draw(0, 40_000)
    figures = {}
    flat = faiss.IndexFlatIP(DIM)
    flat.add(vectors_SD[:4_096])
    started_s = time.process_time()
    flat.search(vectors_SD, 1)
    figures["assign_flops_per_s"] = 2 * len(vectors_SD) * 4_096 * DIM / (time.process_time() - started_s)
    for name, num_rows in (("pq_distances_per_s", 40_000), ("pq_distances_per_s_small", 16_384)):
        quantiser = faiss.ProductQuantizer(16, 4, 8)
        started_s = time.process_time()
        quantiser.train(np.ascontiguousarray(vectors_SD[:num_rows, :16]))
        distances = quantiser.cp.niter * num_rows * 256 * 4
        figures[name] = distances / (time.process_time() - started_s)
    graph = faiss.IndexHNSWFlat(DIM, 32, faiss.METRIC_INNER_PRODUCT)
    started_s = time.process_time()
    graph.add(vectors_SD[:15_000])
    figures["hnsw_values_per_s"] = 15_000 * DIM / (time.process_time() - started_s)
    return figures


def in_a_process(function: Any, *arguments: Any) -> dict[str, Any]:
    """Run one stage in a process of its own, so that each peak is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5_000_000, help="vectors (default: 5,000,000)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of FAISS (default: all)")
    parser.add_argument("--json", default="-", help="file for the figures, - for standard output")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="index-scale-"))
    try:
        figures: dict[str, Any] = {"count": arguments.count, "dim": DIM, "threads": arguments.threads}
        for name, *stage in (
            ("vectors", write_vectors, folder / "vectors.npy", arguments.count),
            ("build", build, folder, arguments.count, arguments.threads),
            ("exact search", search_exactly, folder, arguments.count),
            ("search", search, folder, arguments.count, arguments.threads),
            ("constants", constants),
        ):
            print(f"{name} …", file=sys.stderr)
            figures |= in_a_process(*stage)
        figures["within_6_gb"] = figures["peak_rss_bytes"] < MAX_PEAK_BYTES
        figures["first_search_within_1_s"] = figures["open_to_first_search_s"] < MAX_OPEN_S
    finally:
        shutil.rmtree(folder)
    text = json.dumps(figures, indent=2)
    print(text) if arguments.json == "-" else Path(arguments.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
