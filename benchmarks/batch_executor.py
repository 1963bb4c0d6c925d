"""What batching by tokens is worth: the BatchExecutor beside the executor of verl 0.6, over the same FSDP worker.

    python benchmarks/batch_executor.py [--requests N] [--json FILE|-]          half an hour with 2,000 requests

Requests are sequences of log-normal length (median 300, σ 1, from 17 to 4,096 tokens, seed 0) whose last 16 tokens are
wanted. They come all at once, and as a Poisson stream at 0.8 of verl's measured capacity. Worker: one FSDP2 rank on one
core, the model of scoring_model.py in float32; executor and worker are Ray actors on both sides.

    verl     its semantics, written anew for this benchmark in their best case: micro-batches of 8 in order of arrival,
             padded to the longest, 256 submitters that each wait for their answer. Nothing hangs, an incomplete
             micro-batch leaves after the same longest wait as ours, padding stands on the right, where causal attention
             needs no mask, and only wanted positions go through the head.
    single   one request at a time, without a queue; every fourth request, compared by tokens a second.

    speedup_vs_verl    items/s, all at once, ours / verl's
    speedup_vs_single  tokens/s, all at once, ours / single
    p99_ratio          99th percentile of the seconds from arrival to answer in the stream, ours / verl's
    padding_share      of the tokens that our worker computed, in both parts
    max_abs_error      largest |Δ log-prob| between the two
    worker_cpu_s       CPU seconds of the worker's process, all at once: the same comparison on a busy machine
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray
from ray.actor import ActorHandle
from scoring_model import VOCAB, rank_settings, write_model

from mempo_ray.actors.batch_executor import BatchExecutorActor, GangRunner
from mempo_ray.actors.calls import answer
from mempo_ray.actors.policy import PolicyWorker
from mempo_ray.config.schema import BatchExecutor
from mempo_ray.contracts import LogProbRequest, Segment

NUM_TARGETS = 16
MICRO_BATCH, SUBMITTERS, LOAD = 8, 256, 0.8  # verl's
DEADLINE_S = 7200.0
SECTION = BatchExecutor(micro_batch_tokens=4096, request_timeout_s=DEADLINE_S)  # what one core's caches like best

Ask = Callable[[LogProbRequest], Awaitable[np.ndarray]]


def make_requests(num: int, seed: int = 0) -> list[LogProbRequest]:
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(np.log(300) + rng.standard_normal(num)), NUM_TARGETS + 1, 4096).astype(int)
    return [
        LogProbRequest(
            f"r{i}",
            (Segment(-1, tuple(rng.integers(0, VOCAB, n).tolist()), int(n), (int(n) - NUM_TARGETS, int(n))),),
            deadline_s=DEADLINE_S,
        )
        for i, n in enumerate(lengths)
    ]


# -- the worker, packed and padded --------------------------------------------------------------------------


class Worker(PolicyWorker):
    """The rank as it is; `score_padded` does what a padding executor asks of it."""

    def cpu_s(self) -> float:
        return time.process_time()

    def score_padded(self, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Log-probs of the last tokens of each row: one forward over [rows, longest]."""
        import torch

        model = self._rank.model
        model.set_attn_implementation("sdpa")
        lengths = torch.tensor([len(row) for row in rows])
        ids_BT = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        targets_BK = lengths[:, None] - NUM_TARGETS + torch.arange(NUM_TARGETS)
        kept, slots_BK = (targets_BK - 1).unique(return_inverse=True)
        with torch.no_grad():
            logits = model(input_ids=ids_BT, use_cache=False, logits_to_keep=kept).logits
        logits_BKV = logits.gather(1, slots_BK[..., None].expand(-1, -1, logits.shape[-1])).float()
        wanted = ids_BT.gather(1, targets_BK)[..., None]
        return list(torch.log_softmax(logits_BKV, -1).gather(-1, wanted)[..., 0].numpy())


async def start_worker(folder: Path) -> ActorHandle:
    worker = ray.remote(num_cpus=1)(Worker).remote(rank_settings(folder))
    master = await answer(worker.rendezvous.remote(), "rendezvous", 120)
    await answer(worker.start.remote(0, 1, master), "start", 300)
    return worker


# -- verl's executor ----------------------------------------------------------------------------------------


@ray.remote(num_cpus=0, max_concurrency=4096)
class PaddingExecutor:
    """Micro-batches by count, in order of arrival; one at a time."""

    def __init__(self, worker: ActorHandle) -> None:
        self._worker = worker
        self._queue: deque[tuple[LogProbRequest, asyncio.Future]] = deque()
        self._changed = asyncio.Event()
        self._serving: asyncio.Task | None = None
        self._num_tokens = self._num_padded = 0

    async def logprobs(self, request: LogProbRequest) -> np.ndarray:
        future = asyncio.get_running_loop().create_future()
        self._queue.append((request, future))
        self._changed.set()
        self._serving = self._serving or asyncio.create_task(self._serve())
        return await future

    async def padding_share(self) -> float:
        return self._num_padded / self._num_tokens

    async def _serve(self) -> None:
        while True:
            await self._wait_for_a_micro_batch()
            batch = [self._queue.popleft() for _ in range(min(MICRO_BATCH, len(self._queue)))]
            rows = [request.segments[0].ids for request, _ in batch]
            longest = max(map(len, rows))
            self._num_tokens += len(rows) * longest
            self._num_padded += sum(longest - len(row) for row in rows)
            results = await answer(self._worker.score_padded.remote(rows), "micro-batch", DEADLINE_S)
            for (_, future), result in zip(batch, results, strict=True):
                future.set_result(result)

    async def _wait_for_a_micro_batch(self) -> None:
        while not self._queue:
            self._changed.clear()
            await self._changed.wait()
        try:
            async with asyncio.timeout(SECTION.max_wait_s):
                while len(self._queue) < MICRO_BATCH:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return


# -- load ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    seconds: float
    worker_cpu_s: float
    latencies_s: np.ndarray
    results: list[np.ndarray]


async def measure(
    ask: Ask, worker: ActorHandle, requests: Sequence[LogProbRequest], arrivals_s: np.ndarray, submitters: int
) -> Measured:
    """Ask each request when it arrives, at most `submitters` at once. Seconds count from its arrival."""
    places = asyncio.Semaphore(submitters)
    cpu_before_s = await answer(worker.cpu_s.remote(), "cpu", 60)
    started = time.monotonic()

    async def one(request: LogProbRequest, arrival_s: float) -> tuple[float, np.ndarray]:
        await asyncio.sleep(max(0.0, started + arrival_s - time.monotonic()))
        async with places:
            result = await ask(request)
        return time.monotonic() - started - arrival_s, result

    pairs = await asyncio.gather(*(one(r, a) for r, a in zip(requests, arrivals_s.tolist(), strict=True)))
    seconds = time.monotonic() - started
    cpu_s = await answer(worker.cpu_s.remote(), "cpu", 60) - cpu_before_s
    return Measured(seconds, cpu_s, np.array([s for s, _ in pairs]), [result for _, result in pairs])


async def run(num: int, folder: Path) -> dict[str, object]:
    requests = make_requests(num)
    worker, padding_worker, lone_worker = [await start_worker(folder) for _ in range(3)]
    executor = BatchExecutorActor.options(num_cpus=0).remote(SECTION, GangRunner([worker], DEADLINE_S))
    verl = PaddingExecutor.remote(padding_worker)
    alone = GangRunner([lone_worker], DEADLINE_S)

    async def ask_ours(request: LogProbRequest) -> np.ndarray:
        return (await answer(executor.logprobs.remote(request), request.id, DEADLINE_S)).logprobs[0]

    async def ask_verl(request: LogProbRequest) -> np.ndarray:
        return await answer(verl.logprobs.remote(request), request.id, DEADLINE_S)

    async def ask_alone(request: LogProbRequest) -> np.ndarray:
        return (await alone.run([request])).results[0].logprobs[0]

    for ask in (ask_ours, ask_verl, ask_alone):
        for request in requests[:16]:  # warm up
            await ask(request)
    await answer(executor.stats.remote(), "stats", 60)

    at_once = np.zeros(num)
    ours = await measure(ask_ours, worker, requests, at_once, num)
    say(f"ours, all at once: {ours.seconds:.1f} s")
    padded = await measure(ask_verl, padding_worker, requests, at_once, SUBMITTERS)
    say(f"verl, all at once: {padded.seconds:.1f} s")
    fourth = requests[::4]
    single = await measure(ask_alone, lone_worker, fourth, np.zeros(len(fourth)), 1)
    say(f"single, {len(fourth)} requests: {single.seconds:.1f} s")

    rate = LOAD * num / padded.seconds
    arrivals_s = np.cumsum(np.random.default_rng(1).exponential(1 / rate, num))
    our_stream = await measure(ask_ours, worker, requests, arrivals_s, num)
    say(f"ours, {rate:.2f} requests/s: {our_stream.seconds:.1f} s")
    padded_stream = await measure(ask_verl, padding_worker, requests, arrivals_s, SUBMITTERS)
    say(f"verl, {rate:.2f} requests/s: {padded_stream.seconds:.1f} s")

    stats = await answer(executor.stats.remote(), "stats", 60)
    ours_s, verl_s = (latencies(m) for m in (our_stream, padded_stream))
    return {
        "speedup_vs_verl": padded.seconds / ours.seconds,
        "speedup_vs_single": num_tokens(requests) / ours.seconds / (num_tokens(fourth) / single.seconds),
        "p99_ratio": ours_s["p99"] / verl_s["p99"],
        "padding_share": stats["executor/padding_share"],
        "max_abs_error": float(np.abs(np.array(ours.results) - np.array(padded.results)).max()),
        "num_requests": num,
        "num_tokens": num_tokens(requests),
        "items_per_s": num / ours.seconds,
        "items_per_s_verl": num / padded.seconds,
        "worker_cpu_s": ours.worker_cpu_s,
        "worker_cpu_s_verl": padded.worker_cpu_s,
        "worker_cpu_s_single_fourth": single.worker_cpu_s,
        "padding_share_verl": await answer(verl.padding_share.remote(), "padding", 60),
        "batch_fill": stats["executor/batch_fill"],
        "stream_requests_per_s": rate,
        "stream_latency_s": ours_s,
        "stream_latency_s_verl": verl_s,
    }


def num_tokens(requests: Sequence[LogProbRequest]) -> int:
    return sum(request.num_forest_tokens for request in requests)


def latencies(measured: Measured) -> dict[str, float]:
    return {f"p{q}": float(np.percentile(measured.latencies_s, q)) for q in (50, 95, 99)}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="default: 2000")
    parser.add_argument("--json", default="-", help="file for the figures, - for standard output")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=200 * 2**20, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(run(arguments.requests, write_model(Path(folder))))
    ray.shutdown()
    text = json.dumps(figures, indent=2)
    print(text) if arguments.json == "-" else Path(arguments.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
