"""What isolating and pooling scorers costs, and how much of scoring hides behind generation. About four minutes.

    python benchmarks/rewards.py [--items N] [--trajectories N] [--json FILE|-]

Hostile scorers (no Ray): one RewardManagerWorker with two scorer processes and a timeout of 1 s scores N (20,000)
responses that cost 5 ms of CPU each; then the same with one of each hostile kind spread evenly among them.

    healthy_throughput_share  healthy responses a second with the hostile ones, over that without them (bar: 0.8)
    num_wrong                 healthy responses without their right score, in both runs (must be 0)
    num_hostile_scored        hostile responses that got a score (must be 0)
    num_processes_left        scorer processes that live after the worker has closed (must be 0)

The batch form (Ray): two RewardManagerWorker actors with `manager: batch` and the MemPO scorer score payloads of 256
trajectories of four turns from the object store.

    mempo_batch_share     trajectories a second, over that of a plain loop in this process which reads, decodes and
                          scores the same payloads (bar: 0.9)
    mempo_items_per_s     of the pool
    scorer_only_per_s     of a loop over the scorer alone, nothing read or decoded

One trajectory a call (Ray): the driver's port `Rewards` over one RewardManagerWorker with exact match, as in a run.

    em_items_per_s   all at once
    em_hidden_share  trajectories end one by one over twice the time that this takes: the share of the scoring seconds
                     before the last one ends (1 − seconds from there to the last score / seconds all at once)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ray

from mempo_ray.actors.adapters import RayRewards
from mempo_ray.actors.reward import RewardManagerActor, RewardManagerWorker
from mempo_ray.config.schema import Reward
from mempo_ray.contracts import PayloadRef, Scored, Task, TrajectoryBatch
from mempo_ray.rewards.contract import Response, all_to_score
from mempo_ray.rewards.scorers.mempo import score_mempo
from tests.fakes import hostile_scorers
from tests.fakes.trajectories import trajectory, turn

CPU_S = 0.005
PAYLOAD = 256
WORDS = "the mentor of Boko is Sari and the mentor of Sari was born in Paris near the old river "
CHECKS = tuple(f"check_{i}" for i in range(11))


# -- hostile ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostileRun:
    seconds: float
    num_wrong: int
    num_hostile_scored: int
    num_processes_left: int


async def score_among(num_items: int, kinds: Sequence[str]) -> HostileRun:
    """Score `num_items` healthy responses with the hostile `kinds` spread evenly among them."""
    task = Task("q", "?", (("a",),), "test-org/hostile", {"cpu_s": CPU_S})
    answers = [str(i % 1000) for i in range(num_items)]
    for i, kind in enumerate(kinds):
        answers.insert(round((i + 0.5) * num_items / len(kinds)), kind)
    payload = TrajectoryBatch.from_trajectories([trajectory(answer, task=task) for answer in answers])
    settings = Reward(scorer="test-org/hostile", processes=2, timeout_s=1)
    worker = RewardManagerWorker(settings, [hostile_scorers.__name__])
    await worker.score(TrajectoryBatch.from_trajectories([trajectory("1", task=task)]))  # the processes have started
    started = time.perf_counter()
    scores = await worker.score_batch(payload)
    seconds = time.perf_counter() - started
    pids = await worker.pids()
    await worker.close()
    pairs = list(zip(answers, scores, strict=True))
    return HostileRun(
        seconds,
        sum(not (isinstance(s, Scored) and s.score == float(a)) for a, s in pairs if a not in kinds),
        sum(isinstance(s, Scored) for a, s in pairs if a in kinds),
        sum(Path(f"/proc/{pid}").exists() for pid in pids),
    )


def hostile(num_items: int) -> dict[str, float]:
    runs = {name: asyncio.run(score_among(num_items, kinds))
            for name, kinds in (("healthy", ()), ("hostile", tuple(hostile_scorers.KINDS)))}  # fmt: skip
    return {
        "healthy_throughput_share": runs["healthy"].seconds / runs["hostile"].seconds,
        "num_wrong": sum(run.num_wrong for run in runs.values()),
        "num_hostile_scored": runs["hostile"].num_hostile_scored,
        "num_processes_left": sum(run.num_processes_left for run in runs.values()),
        **{f"{name}_seconds": run.seconds for name, run in runs.items()},
    }


# -- through Ray --------------------------------------------------------------------------------------------


def episodes(num: int) -> list[TrajectoryBatch]:
    """Payloads of PAYLOAD trajectories each: four turns, eleven format checks, half of the answers right."""
    turns = [turn((1,) * 120, f"<mem>{WORDS * 3}</mem><think>{WORDS * 4}</think>", WORDS * 12) for _ in range(4)]
    rows = [
        replace(trajectory("Paris." if i % 2 else "Rome", turns=turns), format_report=dict.fromkeys(CHECKS, True))
        for i in range(num)
    ]
    return [TrajectoryBatch.from_trajectories(rows[i : i + PAYLOAD]) for i in range(0, num, PAYLOAD)]


def mempo_batch(num: int) -> dict[str, float]:
    payloads = [ray.put(batch) for batch in episodes(num)]
    settings = Reward(manager="batch", scorer="mempo")
    workers = [RewardManagerActor.options(num_cpus=0.1).remote(settings) for _ in range(2)]
    ray.get([worker.score_batch.remote(payloads[0]) for worker in workers])

    started = time.perf_counter()
    calls = [workers[i % 2].score_batch.remote(payload) for i, payload in enumerate(payloads)]
    pooled = [score for scores in ray.get(calls) for score in scores]
    pool_s = time.perf_counter() - started

    started = time.perf_counter()
    plain = [score_mempo(r, settings) for p in payloads for r in all_to_score(ray.get(p)) if isinstance(r, Response)]
    loop_s = time.perf_counter() - started

    responses = [r for p in payloads for r in all_to_score(ray.get(p)) if isinstance(r, Response)]
    started = time.perf_counter()
    for response in responses:
        score_mempo(response, settings)
    scorer_s = time.perf_counter() - started
    assert [s.score for s in pooled if isinstance(s, Scored)] == [s.score for s in plain]
    for worker in workers:
        ray.kill(worker)
    return {
        "mempo_batch_share": loop_s / pool_s,
        "mempo_items_per_s": num / pool_s,
        "plain_loop_per_s": num / loop_s,
        "scorer_only_per_s": num / scorer_s,
    }


async def single(num: int) -> dict[str, float]:
    """The driver's port, first all at once, then in the order and at the times at which episodes end."""
    (batch,) = episodes(1)
    settings = Reward(scorer="exact_match")
    worker = RewardManagerActor.options(num_cpus=0.1).remote(settings)
    rewards = RayRewards([worker], settings)
    refs = [PayloadRef(f"q/{i}", ray.put(batch)) for i in range(num)]
    await asyncio.gather(*(rewards.score(ref) for ref in refs[:16]))

    started = time.perf_counter()
    scores = await asyncio.gather(*(rewards.score(ref) for ref in refs))
    at_once_s = time.perf_counter() - started
    assert all(isinstance(score, Scored) for score in scores)

    calls = []
    started = time.perf_counter()
    for i, ref in enumerate(refs):
        await asyncio.sleep(max(0.0, started + 2 * at_once_s * (i + 1) / num - time.perf_counter()))
        calls.append(asyncio.create_task(rewards.score(ref)))
    last_ended = time.perf_counter()
    await asyncio.gather(*calls)
    exposed_s = time.perf_counter() - last_ended
    ray.kill(worker)
    return {"em_items_per_s": num / at_once_s, "em_hidden_share": 1 - exposed_s / at_once_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=20_000, help="healthy responses of 5 ms (default: 20,000)")
    parser.add_argument("--trajectories", type=int, default=8_192, help="of the MemPO part (default: 8,192)")
    parser.add_argument("--json", default="-", help="file for the figures, - for standard output")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}

    def keep(part: dict[str, float]) -> None:
        figures.update(part)
        print(json.dumps(part), file=sys.stderr)

    keep(hostile(arguments.items))
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=500_000_000)
    keep(mempo_batch(arguments.trajectories))
    keep(asyncio.run(single(min(2_000, arguments.trajectories))))
    ray.shutdown()
    text = json.dumps(figures, indent=2)
    print(text) if arguments.json == "-" else Path(arguments.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
