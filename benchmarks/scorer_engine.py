"""Who should score memories: the policy's ranks, or the rollout engines (`memory_reward.scorer_engine`)?

    python benchmarks/scorer_engine.py [--turns 4,12] [--json FILE|-]          two minutes

The same requests, memory rewards of 8 trajectories of T turns, go to both: to the batch executor and one FSDP2 rank
(trunk and probe), and to one vLLM engine (forced decoding over its prefix cache), each on one core, in float32, with
the model of scoring_model.py. A turn has 350 tokens (200 written, of which 100 are the memory, and 150 of search
result), the question 150, the answer 16. Each is asked when idle, and while it has work of its own: the ranks one
update after the other, the engine 32 turns at a time. Requests come all at once; each is new to the engine's cache.

    seconds          from the first request to the last answer
    idle_ratio       seconds, policy / engine, both idle: above 1 the engine is the faster one
    busy_ratio       busy policy / idle engine: ranks that train while turns are few, the case the engine is there for
    both_busy_ratio  both at work
    max_gap          largest |Δ log-prob| between the two
    pays             the cases in which the engine is the faster one
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import ray
from memory_scoring import Work, random_group
from ray.actor import ActorHandle
from scoring_model import write_model
from streaming import open_policy, random_ids

from mempo_ray.actors.adapters import RayPolicy
from mempo_ray.actors.calls import answer
from mempo_ray.actors.engine_logprobs import EngineLogProbs
from mempo_ray.actors.lease import SideBySide
from mempo_ray.actors.rollout import RemoteRolloutActor
from mempo_ray.config.schema import Config, Rollout, WeightSync
from mempo_ray.contracts import LogProbRequest, PayloadRef, Ragged, SftBatch
from mempo_ray.generation.engine import unproven
from mempo_ray.ports import GenerateRequest, LogProbs

NUM_TRAJECTORIES = 8
ROLLOUT = Rollout(dtype="float32", max_model_len=6144, max_num_seqs=64, kv_cache_gb=1.0)


def requests_of(turns: int, seed: int) -> list[LogProbRequest]:
    """Two groups of four siblings; payloads in the object store."""
    trajectories = random_group(turns, NUM_TRAJECTORIES // 2, seed) + random_group(
        turns, NUM_TRAJECTORIES // 2, seed + 1
    )
    work = Work.of(trajectories)
    return [
        replace(request, id=f"{seed}/{i}", payload=PayloadRef(f"{i}", ray.put(payload)), affinity=f"{seed}/{i // 4}",
                deadline_s=300.0)
        for i, (request, payload) in enumerate(zip(work.requests, work.payloads, strict=True))
    ]  # fmt: skip


@asynccontextmanager
async def open_engine(model: Path) -> AsyncGenerator[tuple[EngineLogProbs, ActorHandle]]:
    """One RolloutActor with proven weights, and the port over it."""
    engine = RemoteRolloutActor.options(num_cpus=1).remote(
        "rollout-0", str(model), ROLLOUT, WeightSync(), 1, str(model.parent / "logs"), scores=True
    )
    await answer(engine.start.remote(unproven(str(model))), "engine: start", ROLLOUT.startup_timeout_s)
    port = EngineLogProbs(1, SideBySide())
    port.announce({"rollout-0": engine})
    try:
        yield port, engine
    finally:
        await answer(engine.close.remote(), "engine: close", 60)
        ray.kill(engine)


async def seconds(port: LogProbs, asked: Sequence[LogProbRequest]) -> tuple[float, list[np.ndarray]]:
    """From the first request to the last answer, and all log-probs in order."""
    began = time.monotonic()
    results = await asyncio.gather(*(port(request) for request in asked))
    return time.monotonic() - began, [values for result in results for values in result.logprobs]


async def update_for_ever(policy: RayPolicy) -> None:
    """One supervised step after the other, 4 rows of 500 tokens."""
    rng = np.random.default_rng(0)
    ragged = {name: Ragged.from_rows([random_ids(rng, n) for _ in range(4)], np.int32)
              for name, n in (("prompt_ids", 300), ("output_ids", 200))}  # fmt: skip
    while True:
        await policy.fit(SftBatch(ragged=ragged), 0.0, 800)


async def generate_for_ever(engine: ActorHandle) -> None:
    """32 turns at a time, 200 tokens behind a prompt of 300."""
    rng = np.random.default_rng(0)

    async def turns(seed: int) -> None:
        while True:
            request = GenerateRequest(random_ids(rng, 300), seed, 200, f"g{seed}")
            await answer(engine.generate.remote(request), "turn", 120)

    await asyncio.gather(*(turns(seed) for seed in range(32)))


@asynccontextmanager
async def beside(work: Coroutine) -> AsyncGenerator[None]:
    """The work runs while the block does; it has a second to begin."""
    task = asyncio.create_task(work)
    await asyncio.sleep(1.0)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def measure(all_turns: Sequence[int], model: Path) -> dict[str, object]:
    entries, max_gap = [], 0.0
    config = Config.model_validate({"batch_executor": {"micro_batch_tokens": 16384}})
    async with open_policy(config, model) as policy, open_engine(model) as (engines, engine):
        warm = requests_of(2, seed=1000)
        await seconds(policy, warm)
        await seconds(engines, warm)
        for number, turns in enumerate(all_turns):
            asked = [requests_of(turns, seed=10 * number + i) for i in range(2)]
            policy_idle, theirs = await seconds(policy, asked[0])
            engine_idle, ours = await seconds(engines, asked[0])
            max_gap = max(max_gap, *(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True)))
            async with beside(update_for_ever(policy)):
                policy_busy, _ = await seconds(policy, asked[1])
            async with beside(generate_for_ever(engine)):
                engine_busy, _ = await seconds(engines, asked[1])
            entry = {
                "turns": turns,
                "tokens": sum(request.num_forest_tokens for request in asked[0]),
                "seconds": {
                    "policy_idle": policy_idle,
                    "policy_busy": policy_busy,
                    "engine_idle": engine_idle,
                    "engine_busy": engine_busy,
                },
                "idle_ratio": policy_idle / engine_idle,
                "busy_ratio": policy_busy / engine_idle,
                "both_busy_ratio": policy_busy / engine_busy,
            }
            print(json.dumps(entry), file=sys.stderr)
            entries.append(entry)
    ratios = ("idle_ratio", "busy_ratio", "both_busy_ratio")
    pays = [f"{name.removesuffix('_ratio')}, {e['turns']} turns" for name in ratios for e in entries if e[name] > 1]
    return {"cases": entries, "max_gap": max_gap, "pays": pays}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", default="4,12", help="comma-separated (default: 4,12)")
    parser.add_argument("--json", default="-", help="file for the figures, - for standard output")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        turns = [int(word) for word in arguments.turns.split(",")]
        figures = asyncio.run(measure(turns, write_model(model)))
    text = json.dumps(figures, indent=2)
    print(text) if arguments.json == "-" else Path(arguments.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
