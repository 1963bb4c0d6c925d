"""What it costs to hand a step's rows from one process to another: ragged `Batch`, torch tensors, verl's DataProto.

    python benchmarks/data_plane.py [--megabytes 55 200] [--json FILE|-]        about two minutes, below 4 GB of memory

Rows are turns: prompt ids, output ids, log-probs and mask (int32, int32, float32, uint8) of log-normal length (σ 0.5;
prompts with median 900 cut at 2,048, outputs with median 220 cut at 512, as the token budget of a turn cuts them), one
small array a column and row, as an episode leaves them; the payload is their bytes, 55 and 200 MB. A producer and a
consumer are two Ray actors, so the bytes go through the object store. Each way is timed in the process that does it:

    build   rows → the container          put    container → object store        (producer)
    get     object store → the container  touch  every byte of it is read        (consumer)

The sum of the four, least of five rounds, is the way's time; a round starts with new rows, and each way lets go of a
column's rows once it has taken them in. All three keep the dtypes of the rows.

    batch      `Batch` of ragged columns: flat values and offsets. Pickle's out-of-band buffers carry it, so that
               putting copies once and getting not at all.
    torch      the same flat values and offsets as torch tensors, serialised by Ray's own rule for them.
    dataproto  as verl's DataProto crosses a process, written anew for this benchmark: each column padded to the longest
               row, all tensors gathered in one storage (TensorDict.consolidate), torch.save into a buffer that is
               pickled; torch.load on the other side. Its best case: padded to the longest row found and not to the
               configured maximum, 32- and 8-bit dtypes where verl has int64, lengths in place of attention masks and
               position ids, and no metadata object of a TensorDict. Its padding (about half) is part of the time.

    speedup_vs_dataproto     time of dataproto / time of batch, the smaller of the two sizes; speedup_vs_torch likewise
    speedup_without_padding  the same where all rows are equally long, 55 MB: what the serialisation alone is worth
    extra_memory_x           (peak PSS of producer, consumer and raylet, whose pages are the store's − the same before
                             the rows are made − the rows themselves) / payload, of batch, the larger of the two sizes;
                             in the first large transfer of a new cluster, sampled every 2 ms. A container and the
                             store's copy of it are 1.0, since the rows are gone when the container stands.
    driver_bytes_share       the step as the project runs it: a worker, with the agent loop's own settings, yields each
                             trajectory's payload and its summary from a streaming method; the driver reads summaries
                             and hands payloads to a consumer as references. Bytes of the summaries, and of payloads
                             that Ray sends to the driver's process in place of the store (by its default all below
                             100 KB), over the bytes of all payloads. driver_inline_share is the second part of it.
"""

from __future__ import annotations

import argparse
import ctypes
import io
import json
import os
import pickle
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import ray
from ray.experimental import get_object_locations

from mempo_ray.actors.agent_loop import PAYLOADS_IN_STORE
from mempo_ray.contracts import (
    NO_SPAN,
    SPAN_NAMES,
    Batch,
    EndReason,
    Ragged,
    Task,
    Trajectory,
    TrajectoryBatch,
    TrajectorySummary,
    Turn,
)

ROUNDS = 5
DEADLINE_S = 300
STORE_BYTES = 1200 * 2**20
SIGMA = 0.5
COLUMNS = {"prompt_ids": np.int32, "output_ids": np.int32, "output_logprobs": np.float32, "output_mask": np.uint8}

Rows = dict[str, list[np.ndarray]]
"""By column, one array a row."""


# -- rows ---------------------------------------------------------------------------------------------------


def lengths(rng: np.random.Generator, num: int, sigma: float = SIGMA) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of `num` prompts and of their outputs."""
    prompts, outputs = (np.exp(np.log(median) + sigma * rng.standard_normal(num)) for median in (900, 220))
    return np.clip(prompts, 1, 2048).astype(int), np.clip(outputs, 1, 512).astype(int)


def make_rows(num_bytes: int, sigma: float) -> Rows:
    """Rows of `num_bytes` bytes in all, up to one row."""
    rng = np.random.default_rng(0)
    prompts, outputs = lengths(rng, num_bytes // 4 // 900, sigma)  # more than enough
    num = int(np.searchsorted(np.cumsum(4 * prompts + 9 * outputs), num_bytes))
    rows: Rows = {name: [] for name in COLUMNS}
    for prompt, output in zip(prompts[:num].tolist(), outputs[:num].tolist(), strict=True):
        for name, dtype in COLUMNS.items():
            rows[name].append(np.ones(prompt if name == "prompt_ids" else output, dtype))
    return rows


# -- three ways ---------------------------------------------------------------------------------------------


def build_batch(rows: Rows) -> Batch:
    return Batch({name: Ragged.from_rows(rows.pop(name), dtype) for name, dtype in COLUMNS.items()})


def arrays_of_batch(batch: Batch) -> Iterator[np.ndarray]:
    for column in batch.ragged.values():
        yield from (column.values, column.offsets)


def build_torch(rows: Rows) -> dict[str, Any]:
    import torch

    batch = build_batch(rows)
    return {
        f"{name}_{part}": torch.from_numpy(getattr(column, part))
        for name, column in batch.ragged.items()
        for part in ("values", "offsets")
    }


def build_dataproto(rows: Rows) -> DataProtoLike:
    import torch
    from torch.nn.utils.rnn import pad_sequence

    tensors = {
        f"{name}_lengths": torch.tensor([len(row) for row in rows[name]]) for name in ("prompt_ids", "output_ids")
    }
    for name in COLUMNS:
        tensors[name] = pad_sequence([torch.from_numpy(row) for row in rows.pop(name)], batch_first=True)
    return DataProtoLike(tensors)


def arrays_of_tensors(tensors: Any) -> Iterator[np.ndarray]:
    for tensor in getattr(tensors, "tensors", tensors).values():
        yield tensor.numpy()


class DataProtoLike:
    """Padded tensors that are pickled as verl's DataProto pickles its TensorDict."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.tensors = tensors

    def __getstate__(self) -> io.BytesIO:
        import torch

        buffer = io.BytesIO()
        torch.save(consolidate(self.tensors), buffer)
        return buffer

    def __setstate__(self, state: io.BytesIO) -> None:
        import torch

        state.seek(0)
        storage, layout = torch.load(state, weights_only=False)
        self.tensors = {
            name: storage[start : start + num_bytes].view(dtype).view(shape)
            for name, (start, num_bytes, dtype, shape) in layout.items()
        }


def consolidate(tensors: Mapping[str, Any]) -> tuple[Any, dict[str, tuple]]:
    """All tensors copied into one storage of bytes, each at a multiple of 16, and where each lies."""
    import torch

    layout, end = {}, 0
    for name, tensor in tensors.items():
        layout[name] = (end, tensor.nbytes, tensor.dtype, tensor.shape)
        end += -(-tensor.nbytes // 16) * 16
    storage = torch.empty(end, dtype=torch.uint8)
    for name, (start, num_bytes, dtype, shape) in layout.items():
        storage[start : start + num_bytes].view(dtype).view(shape).copy_(tensors[name])
    return storage, layout


@dataclass(frozen=True)
class Way:
    build: Callable[[Rows], Any]
    arrays: Callable[[Any], Iterator[np.ndarray]]


WAYS = {
    "batch": Way(build_batch, arrays_of_batch),
    "torch": Way(build_torch, arrays_of_tensors),
    "dataproto": Way(build_dataproto, arrays_of_tensors),
}


# -- two processes ------------------------------------------------------------------------------------------


class Producer:
    def __init__(self) -> None:
        import torch  # noqa: F401  its memory belongs to the baseline

        self._rows: Rows = {}

    def pid(self) -> int:
        return os.getpid()

    def load(self, num_bytes: int, sigma: float) -> int:
        """New rows; returns their bytes."""
        self._rows = make_rows(num_bytes, sigma)
        return sum(row.nbytes for column in self._rows.values() for row in column)

    def send(self, way: str) -> tuple[list[ray.ObjectRef], float, float]:
        """The container in the object store, seconds of build and of put. The rows are gone afterwards."""
        rows, self._rows = self._rows, {}
        start = time.perf_counter()
        container = WAYS[way].build(rows)
        build_s = time.perf_counter() - start
        ctypes.CDLL(None).malloc_trim(0)  # or the allocator keeps the rows' pages for the next rows
        start = time.perf_counter()
        reference = ray.put(container)
        return [reference], build_s, time.perf_counter() - start


class Consumer:
    def __init__(self) -> None:
        import torch  # noqa: F401

    def pid(self) -> int:
        return os.getpid()

    def receive(self, way: str, reference: list[ray.ObjectRef]) -> tuple[float, float, int]:
        """Seconds of get and of touch, and the bytes found."""
        start = time.perf_counter()
        container = ray.get(reference[0], timeout=DEADLINE_S)
        got = time.perf_counter()
        num_bytes = sum(touch(array) for array in WAYS[way].arrays(container))
        return got - start, time.perf_counter() - got, num_bytes

    def read(self, payload: TrajectoryBatch) -> int:
        return payload.num_bytes


def touch(array: np.ndarray) -> int:
    """Reads every byte, eight at a time."""
    flat = array.reshape(-1).view(np.uint8)
    whole = len(flat) // 8 * 8
    if int(np.add.reduce(flat[:whole].view(np.uint64))) + int(flat[whole:].sum()) == 0 and flat.any():
        raise AssertionError("an array of ones sums to nothing")
    return array.nbytes


# -- time and memory of one way -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    seconds: Mapping[str, float]  # of the best round, by part
    payload_bytes: int  # the rows
    carried_bytes: int  # what arrived, padding included
    extra_memory_bytes: int

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


class MemoryWatch:
    """Peak of the summed PSS (bytes) of some processes, within a `with` block."""

    def __init__(self, pids: list[int]) -> None:
        self._pids, self._done = pids, threading.Event()
        self.start = self.peak = self._now()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.peak = max(self.peak, self._now())

    def _now(self) -> int:
        total = 0
        for pid in self._pids:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                total += next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
        return total * 1024


def measure(way: str, num_bytes: int, sigma: float = SIGMA) -> Measured:
    """In a cluster of its own, since the pages of a store stay once they were used."""
    start_ray()
    producer, consumer = ray.remote(num_cpus=1)(Producer).remote(), ray.remote(num_cpus=1)(Consumer).remote()

    def transfer() -> tuple[dict[str, float], int]:
        reference, build_s, put_s = ray.get(producer.send.remote(way), timeout=DEADLINE_S)
        get_s, touch_s, carried = ray.get(consumer.receive.remote(way, reference), timeout=DEADLINE_S)
        return {"build": build_s, "put": put_s, "get": get_s, "touch": touch_s}, carried

    pids = [p.pid for p in psutil.Process().children(recursive=True) if p.name() == "raylet"]
    pids += ray.get([producer.pid.remote(), consumer.pid.remote()], timeout=DEADLINE_S)
    ray.get(producer.load.remote(10**6, sigma), timeout=DEADLINE_S)
    transfer()  # what is imported on first use belongs to the baseline
    with MemoryWatch(pids) as memory:
        payload = ray.get(producer.load.remote(num_bytes, sigma), timeout=DEADLINE_S)
        _, carried = transfer()
    rounds = []
    for _ in range(ROUNDS):
        ray.get(producer.load.remote(num_bytes, sigma), timeout=DEADLINE_S)
        rounds.append(transfer()[0])
    ray.shutdown()
    best = min(rounds, key=lambda seconds: sum(seconds.values()))
    found = Measured(best, payload, carried, memory.peak - memory.start - payload)
    say(f"{way:9} {payload / 1e6:4.0f} MB, σ {sigma}: {found.total_s:.3f} s, carried {carried / payload:.2f} ×, "
        f"extra memory {found.extra_memory_bytes / payload:.2f} ×")  # fmt: skip
    return found


# -- a step through the driver ------------------------------------------------------------------------------


class Worker:
    """Yields trajectories as `actors/agent_loop.py` does."""

    async def run(self, num_bytes: int) -> AsyncIterator[TrajectoryBatch | TrajectorySummary]:
        rng, sent = np.random.default_rng(0), 0
        while sent < num_bytes:
            trajectory = make_trajectory(rng)
            payload = TrajectoryBatch.from_trajectories([trajectory])
            sent += payload.num_bytes
            yield payload
            yield trajectory.summary()


def make_trajectory(rng: np.random.Generator) -> Trajectory:
    """4 to 16 turns with the texts that belong to them (four letters a token)."""
    prompts, outputs = lengths(rng, int(rng.integers(4, 17)))
    turns = tuple(
        Turn(
            prompt_ids=np.ones(prompt, np.int32),
            output_ids=np.ones(output, np.int32),
            output_logprobs=np.ones(output, np.float32),
            output_mask=np.ones(output, np.uint8),
            tool_ids=np.ones(prompt // 2, np.int32),
            memory_ids=np.ones(output // 3, np.int32),
            spans=dict.fromkeys(SPAN_NAMES, NO_SPAN),
            weight_version=0,
            seed=0,
            finish_reason="stop",
            text="word" * output,
            tool_text="word" * (prompt // 2),
        )
        for prompt, output in zip(prompts.tolist(), outputs.tolist(), strict=True)
    )
    task = Task("q", "Who mentors Boko?", golds=(("Sari",),), data_source="synthetic")
    return Trajectory(task, 0, 0, turns, EndReason.ANSWERED, {"mem_paired": True}, ())


def measure_driver(num_bytes: int) -> dict[str, float]:
    start_ray()
    worker = ray.remote(num_cpus=1, runtime_env=PAYLOADS_IN_STORE)(Worker).remote()
    consumer = ray.remote(num_cpus=1)(Consumer).remote()
    stream = worker.run.options(num_returns="streaming").remote(num_bytes)
    summary_bytes = inline_bytes = payload_bytes = num = 0
    for payload in stream:
        size = ray.get(consumer.read.remote(payload), timeout=DEADLINE_S)
        summary_bytes += len(pickle.dumps(ray.get(next(stream), timeout=DEADLINE_S)))
        location = get_object_locations([payload], timeout_ms=10_000)[payload]
        inline_bytes += 0 if location["node_ids"] else size
        payload_bytes += size
        num += 1
    ray.shutdown()
    say(f"driver: {summary_bytes / num:.0f} bytes of summary for {payload_bytes / num:.0f} bytes of payload, "
        f"{inline_bytes / payload_bytes:.3f} of the bytes sent inline")  # fmt: skip
    return {
        "driver_bytes_share": (summary_bytes + inline_bytes) / payload_bytes,
        "driver_inline_share": inline_bytes / payload_bytes,
        "payload_bytes_mean": payload_bytes / num,
        "summary_bytes_mean": summary_bytes / num,
        "num_trajectories": num,
    }


# -- all of it ----------------------------------------------------------------------------------------------


def start_ray() -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=STORE_BYTES, log_to_driver=False)


def run(sizes_mb: list[int]) -> dict[str, object]:
    found = {(way, size): measure(way, size * 10**6) for size in sizes_mb for way in WAYS}
    even = {way: measure(way, min(sizes_mb) * 10**6, 0.0) for way in ("batch", "dataproto")}

    def speedups(other: str) -> dict[int, float]:
        return {size: found[other, size].total_s / found["batch", size].total_s for size in sizes_mb}

    def memory(way: str) -> dict[int, float]:
        measured = {size: found[way, size] for size in sizes_mb}
        return {size: m.extra_memory_bytes / m.payload_bytes for size, m in measured.items()}

    return {
        "speedup_vs_dataproto": min(speedups("dataproto").values()),
        "speedup_vs_torch": min(speedups("torch").values()),
        "speedup_without_padding": even["dataproto"].total_s / even["batch"].total_s,
        "extra_memory_x": max(memory("batch").values()),
        **measure_driver(max(sizes_mb) * 10**6),
        "by_size_mb": {
            size: {
                way: {
                    "total_s": found[way, size].total_s,
                    "seconds": found[way, size].seconds,
                    "carried_x": found[way, size].carried_bytes / found[way, size].payload_bytes,
                    "extra_memory_x": memory(way)[size],
                }
                for way in WAYS
            }
            for size in sizes_mb
        },
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[55, 200], help="sizes; default: 55 200")
    parser.add_argument("--json", default="-", help="file for the figures, - for standard output")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    text = json.dumps(run(arguments.megabytes), indent=2)
    if arguments.json == "-":
        print(text)
    else:
        with open(arguments.json, "w") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
