"""Does the rollout pool scale, and does its router keep the load even?

    python benchmarks/elastic.py [--replicas 8] [--groups 64] [--turns 4] [--json FILE|-]

Real agent workers, engine actors and routing over a local Ray; only the engines are scripted: 16 slots each, a turn
takes log-normal time (mean 0.5 s, σ 0.8) by asyncio.sleep. 64 groups of 16 episodes, each of `--turns` turns with a
search that finds nothing.

    linear_share_at_8     throughput(8) / (8 · throughput(1)), turns a second between 20 % and 80 % of the turns: what
                          the pool sustains. Both sides run in one call, one after the other.
    whole_step_share_at_8 the same from the first turn to the last. At the end the slots of a pool wait for the slowest
                          turn, some 4 s whatever their number: in simulated time, without any cost of the machinery,
                          this is 0.83 at 4 turns and 0.91 at 8, and linear_share_at_8 is 1.00
    imbalance             largest / mean over the replicas of time-averaged tokens in flight (prompt + most output),
                          read every 0.25 s, without the first and last fifth of the time
    affinity_hit_rate     turns that went where their group had its last one, of those whose group had one
    cpu_ms_per_turn       CPU time of all processes of this run, over its turns: what the machinery costs
    slots_busy_share      turns · their mean time / (slots · seconds): 1 would be no gap at all
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil
import ray

from mempo_ray.actors.agent_loop import RemoteAgentLoopWorker
from mempo_ray.actors.rollout import CALLS_AT_ONCE, RolloutActor
from mempo_ray.actors.rollout_pool import RayRollouts
from mempo_ray.agent.group import siblings
from mempo_ray.agent.tokenizer import FileTokenizer
from mempo_ray.config.load import load_file
from mempo_ray.config.models import model_folder
from mempo_ray.config.schema import Config
from mempo_ray.contracts import Task
from mempo_ray.generation.engine import unproven
from mempo_ray.generation.fake_engine import TimedEngine

SLOTS, TURN_S, GROUP_SIZE = 16, 0.5, 16
READ_EVERY_S = 0.25
CUT = 0.2  # of the time, at each end
MODEL = str(model_folder("builtin:tiny"))
TURN = "<mem>Boko Sari</mem><think>mentor</think><search>Boko mentor</search>"


def turn_ids() -> list[int]:
    tokenizer = FileTokenizer.from_folder(MODEL)
    return [*tokenizer.encode(TURN), tokenizer.end_of_turn_id]


@ray.remote(num_cpus=0, max_concurrency=CALLS_AT_ONCE)
class Engine(RolloutActor):
    """A RolloutActor whose engine says the same turn every time, when its time is over."""

    def __init__(self, name: str, config: Config, logs: str) -> None:
        ids = turn_ids()
        engine = TimedEngine(name, lambda request: ids, config.rollout)
        super().__init__(name, MODEL, config.rollout, config.weight_sync, ids[-1], logs, engine)


@ray.remote(num_cpus=0, max_concurrency=CALLS_AT_ONCE)
class Retrieval:
    """Finds nothing, at once: search is not what is measured."""

    async def search_each(self, searches: list[tuple[list[str], int]]) -> list[list[list]]:
        return [[[] for _ in queries] for queries, _ in searches]


@dataclass(frozen=True)
class Run:
    """One side: a step over so many replicas."""

    replicas: int
    turns: int
    seconds: float
    turns_per_s: float
    steady_turns_per_s: float
    slots_busy_share: float
    imbalance: float
    affinity_hit_rate: float
    cpu_ms_per_turn: float


def configuration(replicas: int, turns: int, workers: int) -> Config:
    words = {
        "rollout.engine": "fake",
        "rollout.fake_turn_s": TURN_S,
        "rollout.max_num_seqs": SLOTS,
        "rollout.replicas": replicas,
        "rollout.min_replicas": replicas,
        "rollout.max_replicas": replicas,
        "rollout.request_timeout_s": 3600,
        "agent.max_turns": turns,
        "agent.limits.episode_s": 3600,
        "agent.workers": workers,
        "agent.episodes_per_worker": 1024,
    }
    return load_file(None, [f"{key}={value}" for key, value in words.items()])


async def measure(replicas: int, groups: int, turns: int, workers: int, logs: str) -> Run:
    """One step over a fresh pool."""
    config = configuration(replicas, turns, workers)

    def make(index: int) -> ray.actor.ActorHandle:
        return Engine.remote(f"rollout-{index}", config, logs)

    makers = RemoteAgentLoopWorker.options(num_cpus=0, max_concurrency=16)
    agents = [makers.remote(i, config.agent, config.rollout, MODEL) for i in range(workers)]
    rollouts = RayRollouts(config, make, agents)
    await rollouts.connect_retrieval({"retrieval-0": Retrieval.remote()})
    rollouts.start()
    await rollouts.sync(unproven(MODEL))
    tasks = [Task(f"q{i}", "mentor Boko ?", (("Sari",),), "test") for i in range(groups)]
    requests = [request for task in tasks for request in siblings(task, GROUP_SIZE, run_seed=0)]
    ended = []

    async def step() -> None:
        async for finished in rollouts.run(requests):
            ended.append(finished.summary)

    before, began = cpu_seconds(), time.monotonic()
    running = asyncio.create_task(step())
    readings = []  # (seconds, tokens in flight by replica, turns so far)
    while not running.done():
        await asyncio.wait([running], timeout=READ_EVERY_S)
        loads = await asyncio.gather(*(rollouts.load_of(member) for member in rollouts.members))
        tokens, done = ([load[key] for load in loads] for key in ("in_flight_tokens", "output_tokens"))
        readings.append((time.monotonic() - began, tokens, sum(done) / len(turn_ids())))
    await running
    seconds, used = time.monotonic() - began, cpu_seconds() - before
    stats = await rollouts.stats()
    await rollouts.close()
    for agent in agents:
        ray.kill(agent)
    num_turns = sum(summary.num_turns for summary in ended)
    return Run(
        replicas,
        num_turns,
        seconds,
        num_turns / seconds,
        steady_rate(readings),
        num_turns * TURN_S / (SLOTS * replicas * seconds),
        imbalance([tokens for at, tokens, _ in readings if CUT <= at / seconds <= 1 - CUT]),
        stats["rollout/affinity_hit_rate"],
        1000 * used / num_turns,
    )


def imbalance(tokens_by_replica: Iterable[list[float]]) -> float:
    """Example: time averages [100, 120, 80] → 1.2."""
    means = np.mean(list(tokens_by_replica), axis=0)
    return float(means.max() / means.mean())


def steady_rate(readings: list[tuple[float, list[float], float]]) -> float:
    """Turns a second between 20 % and 80 % of the turns."""
    at, done = np.array([r[0] for r in readings]), np.array([r[2] for r in readings])
    kept = (done >= CUT * done[-1]) & (done <= (1 - CUT) * done[-1])
    return float((done[kept][-1] - done[kept][0]) / (at[kept][-1] - at[kept][0]))


def cpu_seconds() -> float:
    """Of this process and all that it started, while they live."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since it was listed
            total += sum(process.cpu_times()[:2])
    return total


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4, help="of each episode")
    parser.add_argument("--workers", type=int, default=2, help="agent workers")
    parser.add_argument("--json", default="", help="where the figures go; '-' for stdout")
    arguments = parser.parse_args()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    runs = {}
    with tempfile.TemporaryDirectory() as logs:
        for replicas in (1, arguments.replicas):
            runs[replicas] = asyncio.run(measure(replicas, arguments.groups, arguments.turns, arguments.workers, logs))
            say(f"{replicas} replicas: {asdict(runs[replicas])}")
    ray.shutdown()
    one, many = runs[1], runs[arguments.replicas]
    figures = {
        f"linear_share_at_{many.replicas}": many.steady_turns_per_s / (many.replicas * one.steady_turns_per_s),
        f"whole_step_share_at_{many.replicas}": many.turns_per_s / (many.replicas * one.turns_per_s),
        "imbalance": many.imbalance,
        "affinity_hit_rate": many.affinity_hit_rate,
        "cpu_ms_per_turn": many.cpu_ms_per_turn,
        "runs": [asdict(run) for run in runs.values()],
        "groups": arguments.groups,
        "group_size": GROUP_SIZE,
    }
    text = json.dumps(figures, indent=2)
    if arguments.json == "-":
        print(text)
    elif arguments.json:
        Path(arguments.json).write_text(text + "\n")
    else:
        say(text)


if __name__ == "__main__":
    main()
