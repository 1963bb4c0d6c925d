"""How many searches a second, and after what wait: this project's retrieval beside the server that is commonly copied.

    python benchmarks/retrieval.py [--json FILE|-] [--short]

All in one run, over the same flat index of the shared corpus, encoded by MiniLM on two threads:

    pool      a RetrievalActor behind a SearchClient, as the agent workers use it (Ray)
    http      `python -m retrieval_index serve` in a process of its own, through httpx
    common    the behaviour of the common server: one request at a time through encoder and index. Called in process,
              under a lock, so that it pays for no transport at all

Each client sends its next query when it has the answer to its last one. `distinct`: real questions, none asked twice,
so nothing comes from a cache. `grouped`: the searches of 16 siblings of 16 tasks, from a real run (make_trace.py;
their words are the quickstart's, so what they find in Wikipedia means nothing, but costs the same).

encoder_gain          queries a second of the encoder alone, in batches of 64 against one by one: the most that batching
                      can give. All that a service adds is transport, waiting, and what the index takes
speedup_distinct_64   pool over common with 64 clients; bar: 0.75 × encoder_gain, and 2.2
ideal_hit_rate        1 − distinct / all queries of the grouped trace: the share that need not be searched
speedup_grouped_64    pool over common with 64 clients; bar: 0.8 × speedup_distinct_64 / (1 − ideal_hit_rate)
encode_share          of the time in which the actor encoded or searched; what is left is FAISS
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import numpy as np
import ray

from mempo_ray.actors.retrieval import RemoteRetrievalActor
from mempo_ray.actors.search import SearchClient
from mempo_ray.config.schema import Retrieval
from retrieval_index.build import build_index
from retrieval_index.encoder import make_encoder
from retrieval_index.retriever import Retriever, open_retriever

HERE = Path(__file__).parent
SHARED = Path(os.environ.get("MEMPO_SHARED", HERE.parents[1] / "shared")) / "data"
TRACE = HERE / "grouped_trace.jsonl"
THREADS = 2
TOP_K = 3
CLIENTS = (1, 16, 64)
BATCH = 64
PATIENCE_S = 120.0

Ask = Callable[[str], Awaitable[object]]


@dataclass(frozen=True)
class Measured:
    """One load on one system. Latencies are of single queries, in seconds."""

    qps: float
    p50_s: float
    p99_s: float


async def drive(ask: Ask, queries: Sequence[str], num_clients: int) -> Measured:
    """Clients that take the next query from one list, in its order."""
    waiting, latencies_s = iter(queries), []

    async def client() -> None:
        for query in waiting:
            started_s = time.perf_counter()
            await ask(query)
            latencies_s.append(time.perf_counter() - started_s)

    started_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(num_clients)))
    seconds = time.perf_counter() - started_s
    p50_s, p99_s = np.percentile(latencies_s, [50, 99])
    return Measured(len(queries) / seconds, float(p50_s), float(p99_s))


@dataclass(frozen=True)
class Load:
    """Queries for each number of clients, never one twice, and the grouped trace."""

    distinct: dict[int, list[str]]
    grouped: list[str]

    @classmethod
    def read(cls, scale: float) -> Load:
        questions = [
            json.loads(line)["question"]
            for name in ("dev.jsonl", "train.jsonl")
            for line in (SHARED / name).read_text(encoding="utf-8").splitlines()
        ]
        waiting = iter(dict.fromkeys(questions))
        sizes = {1: int(64 * scale), 16: int(256 * scale), 64: int(768 * scale)}
        distinct = {clients: [next(waiting) for _ in range(size)] for clients, size in sizes.items()}
        grouped = [json.loads(line)["query"] for line in TRACE.read_text(encoding="utf-8").splitlines()]
        return cls(distinct, grouped)

    async def run(self, ask: Ask, say: str) -> dict[str, Measured]:
        found = {}
        for clients, queries in self.distinct.items():
            found[f"distinct_{clients}"] = await drive(ask, queries, clients)
        found["grouped_64"] = await drive(ask, self.grouped, 64)
        for name, measured in found.items():
            print(f"{say:<7}{name:<13}{measured.qps:8.0f}/s  p50 {measured.p50_s * 1e3:7.1f} ms  "
                  f"p99 {measured.p99_s * 1e3:7.1f} ms", file=sys.stderr)  # fmt: skip
        return found


# --- the three systems -----------------------------------------------------------------------------------------


async def common_server(index: Path, load: Load) -> tuple[dict[str, Measured], dict[str, float]]:
    """One request after the other, in process; and the encoder alone, measured on the same object."""
    retriever, lock = open_retriever(index, num_threads=THREADS), asyncio.Lock()

    def search(query: str) -> None:
        hits = retriever.find([query], TOP_K)
        retriever.passages(hits.rows[0].tolist(), hits.scores[0].tolist())

    async def ask(query: str) -> None:
        async with lock:
            await asyncio.to_thread(search, query)

    await ask("warm up")
    gain = await asyncio.to_thread(encoder_gain, retriever, load.distinct[64])
    return await load.run(ask, "common"), gain


def encoder_gain(retriever: Retriever, queries: Sequence[str]) -> dict[str, float]:
    """Queries a second of the encoder, one by one and in batches; in turns, so that a busy machine slows both."""
    rates: dict[int, list[float]] = {1: [], BATCH: []}
    for start in range(0, min(len(queries), 6 * BATCH) - BATCH + 1, BATCH):
        batch = queries[start : start + BATCH]
        rates[BATCH].append(BATCH / retriever.find(batch, TOP_K).encode_s)
        rates[1].append(BATCH / sum(retriever.find([query], TOP_K).encode_s for query in batch))
    single, batched = statistics.median(rates[1]), statistics.median(rates[BATCH])
    return {"encoder_qps_1": single, "encoder_qps_64": batched, "encoder_gain": batched / single}


async def actor_pool(index: Path, load: Load) -> tuple[dict[str, Measured], dict[str, float]]:
    """The actor in a process of its own, asked through Ray."""
    settings = Retrieval(index=str(index), encoder="minilm", threads=THREADS)
    gc.collect()
    gc.freeze()  # the common side's encoder is still in this process; no agent worker would have to walk over it
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000)
    try:
        actor = RemoteRetrievalActor.options(num_cpus=1).remote(settings, str(index), PATIENCE_S)
        await actor.ping.remote()
        pool = SearchClient(settings, PATIENCE_S)
        pool.announce({"retrieval-0": actor})
        await pool.stats()
        measured = await load.run(lambda query: pool([query], TOP_K), "pool")
        return measured, await pool.stats()
    finally:
        ray.shutdown()
        gc.unfreeze()


@contextmanager
def serving(index: Path) -> Iterator[str]:
    """A server process; its address."""
    words = [sys.executable, "-m", "retrieval_index", "serve", "--index", str(index), "--port", "0"]
    with subprocess.Popen([*words, "--threads", str(THREADS)], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().split()[-1]
        finally:
            server.terminate()


async def http_server(index: Path, load: Load) -> dict[str, Measured]:
    """The server, asked as Search-R1's client asks it, a query at a time."""
    with serving(index) as url:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:

            async def ask(query: str) -> None:
                body = {"queries": [query], "topk": TOP_K, "return_scores": True}
                (await client.post(url, json=body)).raise_for_status()

            await ask("warm up")
            return await load.run(ask, "http")


# --- figures ---------------------------------------------------------------------------------------------------


async def measure(scale: float, folder: Path) -> dict[str, object]:
    index, load = folder / "index", Load.read(scale)
    build_index(SHARED / "corpus.jsonl", make_encoder("minilm"), "flat", index,
                embeddings=SHARED / "corpus_minilm_fp16.npy")  # fmt: skip
    common, gain = await common_server(index, load)
    pool, stats = await actor_pool(index, load)
    http = await http_server(index, load)
    hit_rate = 1 - len(set(load.grouped)) / len(load.grouped)
    distinct = pool["distinct_64"].qps / common["distinct_64"].qps
    grouped = pool["grouped_64"].qps / common["grouped_64"].qps
    needed = {
        "speedup_distinct_64": max(2.2, 0.75 * gain["encoder_gain"]),
        "speedup_grouped_64": 0.8 * distinct / (1 - hit_rate),
    }
    found = {"speedup_distinct_64": distinct, "speedup_grouped_64": grouped}
    return {
        **gain,
        **found,
        "ideal_hit_rate": hit_rate,
        "encode_share": stats["retrieval/encode_share"],
        "batch_size": stats["retrieval/batch_size"],
        "bars": {name: {"needed": bar, "met": found[name] >= bar} for name, bar in needed.items()},
        "systems": {
            name: {load: asdict(measured) for load, measured in figures.items()}
            for name, figures in (("pool", pool), ("http", http), ("common", common))
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="-", help="file for the figures, - for standard output")
    parser.add_argument("--short", action="store_true", help="a quarter of the distinct queries")
    arguments = parser.parse_args()
    if not SHARED.is_dir():
        sys.exit(f"the shared data is not at {SHARED}: set MEMPO_SHARED")
    with tempfile.TemporaryDirectory(prefix="retrieval-") as folder:
        figures = asyncio.run(measure(0.25 if arguments.short else 1.0, Path(folder)))
    text = json.dumps(figures, indent=2)
    print(text) if arguments.json == "-" else Path(arguments.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
