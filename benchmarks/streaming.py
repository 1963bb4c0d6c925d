"""What scoring beside generation saves: one step's episodes and scores, streamed and behind a barrier.

    python benchmarks/streaming.py [--tasks 16] [--group 8] [--json FILE|-]          a minute and a half

Both sides run `experience.collect` over the same trajectories with the same turn times, in one run: streaming asks for
the memory reward when a trajectory ends, the barrier when the last one has. Generation is a fake engine: each turn
takes a log-normal time (mean 0.5 s, σ 1), each trajectory 1 to 16 turns, asleep, so that no CPU is spent on it. Scoring
is real: the batch executor and one FSDP2 rank as Ray actors, on one core, with the quickstart's model (0.5 M
parameters). A turn has 55 tokens (40 written, of which 25 are the memory, and 15 of search result), the question 60,
the answer 8: scoring then takes about a quarter of the time that generation takes. No update: it would add the same to
both.

    exposed_s      seconds from the last trajectory's end to the last log-prob
    busy_s         seconds in which the executor was scoring
    hidden_share   1 - exposed_s / busy_s
    step_s         seconds of the episodes and scores together
    step_ratio     step_s, streaming / barrier
    max_gap        largest |Δ R^M| between the two
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import ray
from memory_scoring import trajectory
from ray.actor import ActorHandle
from scoring_model import rank_settings

from mempo_ray.actors.adapters import RayPolicy
from mempo_ray.actors.batch_executor import BatchExecutorActor, GangRunner
from mempo_ray.actors.fleet import GangHost
from mempo_ray.actors.lease import SideBySide
from mempo_ray.actors.policy import PolicyActor
from mempo_ray.config.models import model_folder
from mempo_ray.config.schema import Config
from mempo_ray.contracts import (
    EpisodeRequest,
    Finished,
    PayloadRef,
    Probe,
    Score,
    Scored,
    Task,
    Trajectory,
    TrajectoryBatch,
)
from mempo_ray.experience import Collected, collect, scoring_metrics

VOCAB = 544  # of the quickstart's model
QUESTION, MEMORY, OUTPUT, TOOL, ANSWER = 60, 25, 40, 15, 8
MAX_TURNS, TURN_S, SIGMA = 16, 0.5, 1.0


class Actors:
    """What `GangHost` starts: the rank and the executor, without a reservation."""

    def __init__(self, config: Config, model: Path) -> None:
        self.config, self._model = config, model

    def policy(self, index: int) -> ActorHandle:
        return PolicyActor.options(num_cpus=1).remote(rank_settings(self._model))

    def executor(self, ranks: Sequence[ActorHandle], version: int) -> ActorHandle:
        section = self.config.batch_executor
        gang = GangRunner(ranks, section.command_timeout_s, version)
        return BatchExecutorActor.options(num_cpus=0).remote(section, gang)


@asynccontextmanager
async def open_policy(config: Config, model: Path) -> AsyncGenerator[RayPolicy]:
    """The policy as a run has it; on a cluster of its own."""
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=200 * 2**20, log_to_driver=False)
    gang = GangHost(Actors(config, model), startup_s=300)
    try:
        yield RayPolicy(gang, await gang.start(), config, Path("unused: nothing is published"), SideBySide())
    finally:
        await gang.close()
        ray.shutdown()


class SleepingRollouts:
    """`Rollouts.run` without engines: the trajectories are there, and take their time to end."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._ended: dict[tuple[str, int], tuple[float, Finished]] = {}

    def prepare(self, requests: Sequence[EpisodeRequest]) -> None:
        """Make the trajectories and their turn times; payloads go to the object store."""
        rng, probes, questions = self._rng, {}, {}
        for request in requests:
            task_id = request.task.task_id
            question = questions.setdefault(task_id, random_ids(rng, QUESTION))
            probe = probes.setdefault(task_id, random_probe(rng))
            turns = [(random_ids(rng, OUTPUT), random_ids(rng, TOOL)) for _ in range(rng.integers(1, MAX_TURNS + 1))]
            memories = [output[:MEMORY] for output, _ in turns]
            made = trajectory(task_id, request.sibling, probe, question, turns, memories)
            turn_times_s = rng.lognormal(np.log(TURN_S) - SIGMA**2 / 2, SIGMA, len(turns))
            self._ended[task_id, request.sibling] = float(turn_times_s.sum()), finished(made)

    async def run(self, requests: Sequence[EpisodeRequest]) -> AsyncIterator[Finished]:
        async def episode(request: EpisodeRequest) -> Finished:
            seconds, ended = self._ended[request.task.task_id, request.sibling]
            await asyncio.sleep(seconds)
            return ended

        for ended in asyncio.as_completed([episode(request) for request in requests]):
            yield await ended


class NoRewards:
    """Outcome scores cost nothing here."""

    async def score(self, payload: PayloadRef) -> Score:
        return Scored(0.0)


def random_ids(rng: np.random.Generator, length: int) -> np.ndarray:
    return rng.integers(0, VOCAB, length).astype(np.int32)


def random_probe(rng: np.random.Generator) -> Probe:
    """An opener, the answer, a closing tag."""
    return Probe(tuple(random_ids(rng, ANSWER + 2).tolist()), 1, 1 + ANSWER)


def finished(made: Trajectory) -> Finished:
    batch = TrajectoryBatch.from_trajectories([made])
    return Finished(made.summary(), PayloadRef(f"{made.task.task_id}/{made.sibling}", ray.put(batch), batch.num_bytes))


async def measure(num_tasks: int, group: int, model: Path) -> dict[str, object]:
    sides = {name: Config.model_validate({"memory_reward": {"streaming": name == "streaming"}})
             for name in ("streaming", "barrier")}  # fmt: skip
    tasks = [Task(f"q{i}", "?", (("a",),), "benchmark") for i in range(num_tasks)]
    requests = [EpisodeRequest(task, sibling, 0) for task in tasks for sibling in range(group)]
    figures: dict[str, dict[str, float]] = {}
    rewards: dict[str, np.ndarray] = {}
    async with open_policy(sides["streaming"], model) as policy:
        rollouts = SleepingRollouts()
        rollouts.prepare(requests)
        await warm_up(rollouts, requests[0], policy, sides["streaming"])
        for name, config in sides.items():
            await policy.stats()
            collected = await collect(requests, rollouts, NoRewards(), policy, config, version=0)
            stats = await policy.stats()
            figures[name] = figures_of(collected, stats["executor/score_s"])
            figures[name]["num_micro_batches"] = stats["executor/num_micro_batches"]
            rewards[name] = np.array([m.reward for sample in collected.samples for m in sample.memory])
            print(f"{name}: {figures[name]}", file=sys.stderr)
    streaming, barrier = figures["streaming"], figures["barrier"]
    return {
        **streaming,
        "step_ratio": streaming["step_s"] / barrier["step_s"],
        "barrier": barrier,
        "max_gap": float(np.abs(rewards["streaming"] - rewards["barrier"]).max()),
        "num_trajectories": len(requests),
        "num_memories": len(rewards["barrier"]),
    }


async def warm_up(rollouts: SleepingRollouts, request: EpisodeRequest, policy: RayPolicy, config: Config) -> None:
    await collect([request], rollouts, NoRewards(), policy, config, version=0)


def figures_of(collected: Collected, busy_s: float) -> dict[str, float]:
    scoring = scoring_metrics(busy_s, collected.exposed_logprobs_s)
    return {
        **{name.removeprefix("scoring/"): value for name, value in scoring.items()},
        "generation_s": collected.generation_s,
        "step_s": collected.generation_s + collected.exposed_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=16, help="default: 16")
    parser.add_argument("--group", type=int, default=8, help="siblings of a task (default: 8)")
    parser.add_argument("--json", default="-", help="file for the figures, - for standard output")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    figures = asyncio.run(measure(arguments.tasks, arguments.group, model_folder("builtin:tiny")))
    text = json.dumps(figures, indent=2)
    print(text) if arguments.json == "-" else Path(arguments.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
