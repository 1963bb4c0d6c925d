"""What the forest saves: the memory reward of whole trajectories, beside one forward per turn and side.

    python benchmarks/memory_scoring.py [--turns 5,10,16] [--group N] [--json FILE|-]     a list, one entry a length
    python benchmarks/memory_scoring.py --exponents                                       growth from 5 to 32 turns
    python benchmarks/memory_scoring.py --planning 1000000                                what the plan itself costs
    python benchmarks/memory_scoring.py --update                                          the same idea in the update
    python benchmarks/memory_scoring.py --model DIR [--questions FILE --corpus FILE]      a real model, real passages

Both sides are the same weights behind the same `PolicyRank.run(ScoreCommand)`, in one run and one process: `forest` is
sent all requests at once, `naive` one sequence at a time. Seconds are this process's CPU time, the best of `--repeat`.

    tokens_naive, tokens_forest   tokens that pass through the model
    speedup                       seconds_naive / seconds_forest, memory and history side together
    speedup_full                  the same for the history side (P_full) alone
    max_abs_error                 largest |Δ log-prob| between the two

The worker is one FSDP2 rank on one core (OMP_NUM_THREADS=1). The model is a random 6-layer Llama, 256 wide, in float32
(4,096 words, 4 heads of 64, 2 of keys, MLP 896). A trajectory has a question of 150 tokens, turns of 350 (200 written,
150 of search result), memories of 100 and an answer of 16 behind a one-token opener. All ids are random. (A real memory
is the beginning of its output, so the forest would also merge that of turn 1: 100 tokens fewer.)
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from scoring_model import VOCAB, rank_settings, write_model

from mempo_ray.agent.memory import encode_probe
from mempo_ray.agent.prompt import PastTurn, Renderer
from mempo_ray.agent.tokenizer import FileTokenizer
from mempo_ray.algo.memory_reward import MemoryRequest, build_request
from mempo_ray.cold_start import turn_text
from mempo_ray.config.schema import Config, MemoryReward
from mempo_ray.contracts import (
    EndReason,
    LogProbRequest,
    Passage,
    PayloadRef,
    Probe,
    ScoreCommand,
    Task,
    Trajectory,
    TrajectoryBatch,
    Turn,
)
from mempo_ray.data.oracle import OracleTrajectory, oracle_trajectories, plan_of
from mempo_ray.data.tasks import read_tasks
from mempo_ray.training.forest import ForestPlan, plan_forest
from mempo_ray.training.rank import PolicyRank
from mempo_ray.training.rows import Row, expand
from mempo_ray.training.sharding import Gang
from mempo_ray.training.step import supervised_step

QUESTION, MEMORY, OUTPUT, TOOL, ANSWER = 150, 100, 200, 150, 16


# -- trajectories -------------------------------------------------------------------------------------------


def random_group(num_turns: int, group: int, seed: int = 0) -> list[Trajectory]:
    """Siblings of one question, of the lengths above; ids are random, so that nothing else is shared."""
    rng = np.random.default_rng((seed, num_turns))

    def ids(length: int) -> np.ndarray:
        return rng.integers(0, VOCAB, length).astype(np.int32)

    question, opener, answer = ids(QUESTION), ids(1), ids(ANSWER)
    probe = Probe((*opener.tolist(), *answer.tolist(), 0), 1, 1 + ANSWER)
    return [
        trajectory(
            f"random-{num_turns}",
            sibling,
            probe,
            question,
            turns=[(ids(OUTPUT), ids(TOOL)) for _ in range(num_turns)],
            memories=[ids(MEMORY) for _ in range(num_turns)],
        )
        for sibling in range(group)
    ]


def trajectory(
    task_id: str,
    sibling: int,
    probe: Probe,
    initial: np.ndarray,
    turns: Sequence[tuple[np.ndarray, np.ndarray]],
    memories: Sequence[np.ndarray],
) -> Trajectory:
    """An episode of these turns: output, search result, memory."""
    spans = {"mem": (0, 0), "think": (-1, -1), "search": (-1, -1), "answer": (-1, -1)}
    made = [
        Turn(
            prompt_ids=initial,
            output_ids=output,
            output_logprobs=np.zeros(len(output), np.float32),
            output_mask=np.ones(len(output), np.uint8),
            tool_ids=tool,
            memory_ids=memory,
            spans=spans | {"mem": (0, len(memory))},
            weight_version=0,
            seed=0,
            finish_reason="stop",
            text="",
        )
        for (output, tool), memory in zip(turns, memories, strict=True)
    ]
    return Trajectory(
        Task(task_id, "", (("a",),), "benchmark"), sibling, 0, tuple(made), EndReason.ANSWERED, {}, (probe,)
    )


@dataclass(frozen=True)
class Real:
    """Oracle trajectories on real questions: the passages that BM25 finds for each hop, in the model's chat format."""

    model: Path
    questions: Path
    corpus: Path
    num: int = 8

    def trajectories(self) -> list[Trajectory]:
        config = Config.model_validate({"agent": {"system_prompt": "Search and take notes."}})
        renderer = Renderer.from_folder(self.model, FileTokenizer.from_folder(self.model), config.agent)
        tasks = [task for task in read_tasks(str(self.questions)) if plan_of(task) is not None]
        tasks.sort(key=lambda task: (-len(plan_of(task).hops), task.task_id))
        found = asyncio.run(oracle_trajectories(tasks[: 8 * self.num], bm25(self.corpus)))[: self.num]
        return [self._rendered(trajectory, renderer) for trajectory in found]

    def _rendered(self, oracle: OracleTrajectory, renderer: Renderer) -> Trajectory:
        past = []
        for turn in oracle.turns:
            output = renderer.output_ids(turn_text(turn))
            tool = renderer.tool_ids(turn.passages, 1024).ids if turn.query else np.empty(0, np.int32)
            past.append(PastTurn(output, tool, renderer.memory_ids(output)))
        probe = encode_probe("<answer>", oracle.task.gold_text, "</answer>", renderer.tokenizer)
        initial = renderer.initial_ids(oracle.task.question)
        turns = [(turn.output_ids, turn.tool_ids) for turn in past]
        return trajectory(oracle.task.task_id, 0, probe, initial, turns, [turn.memory_ids for turn in past])


def bm25(corpus: Path) -> Callable:
    """A `Search` over the corpus, in this process."""
    import bm25s

    passages = [json.loads(line) for line in corpus.open(encoding="utf-8")]
    index = bm25s.BM25()
    index.index(
        bm25s.tokenize([f"{p['title']}. {p['text']}" for p in passages], show_progress=False), show_progress=False
    )

    async def search(queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        tokens = bm25s.tokenize(list(queries), show_progress=False)
        found, _ = index.retrieve(tokens, k=top_k, show_progress=False)
        return [[Passage(**passages[i]) for i in row] for row in found]

    return search


# -- requests -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """Requests and the payload of each."""

    requests: list[LogProbRequest]
    payloads: list[TrajectoryBatch]

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], *, history_only: bool = False) -> Work:
        payloads = [TrajectoryBatch.from_trajectories([t]) for t in trajectories]
        asked = [
            build_request(t.summary(), PayloadRef(str(i), None, 0), MemoryReward(), policy_version=None, deadline_s=1e6)
            for i, t in enumerate(trajectories)
        ]
        return cls([history(a) if history_only else a.request for a in asked], payloads)

    def one_by_one(self) -> list[Work]:
        """One plain sequence each."""
        pairs = zip(self.requests, self.payloads, strict=True)
        return [Work([only(r, [marked])], [payload]) for r, payload in pairs for marked in r.marked]

    def run(self, rank: PolicyRank) -> list[np.ndarray]:
        """Log-probs of every marked segment, in order."""
        command = ScoreCommand(tuple(self.requests), tuple(range(len(self.requests))))
        results = rank.run(rank.next_sequence, command, *self.payloads).value
        return [logprobs for result in results for logprobs in result.logprobs]

    def plan(self, rank: PolicyRank) -> ForestPlan:
        pairs = zip(self.requests, self.payloads, strict=True)
        return plan_forest([row for r, p in pairs for row in expand(r, p, rank.limits)], rank.settings.score_tokens)


def only(request: LogProbRequest, marked: Sequence[int]) -> LogProbRequest:
    """The request without the other marked segments and what only they need."""
    kept = sorted({i for m in marked for i in request.path(m)})
    number = {old: new for new, old in enumerate(kept)} | {-1: -1}
    segments = tuple(replace(s, parent=number[s.parent]) for i, s in enumerate(request.segments) if i in number)
    return replace(request, segments=segments)


def history(asked: MemoryRequest) -> LogProbRequest:
    """P_full alone."""
    marked = asked.request.marked
    return only(asked.request, [marked[c] for c in sorted({s.baseline for s in asked.samples})])


# -- measuring ----------------------------------------------------------------------------------------------


def cpu_seconds(call: Callable[[], object], repeat: int) -> tuple[float, object]:
    """Least process CPU time of `repeat` calls, and the last result."""
    best, result = float("inf"), None
    for _ in range(repeat):
        started = time.process_time()
        result = call()
        best = min(best, time.process_time() - started)
    return best, result


def compare(work: Work, rank: PolicyRank, repeat: int) -> dict[str, float]:
    single = work.one_by_one()
    seconds_forest, forest = cpu_seconds(lambda: work.run(rank), repeat)
    seconds_naive, naive = cpu_seconds(lambda: [w.run(rank)[0] for w in single], repeat)
    plan = work.plan(rank)
    return {
        "tokens_naive": plan.num_plain_tokens,
        "tokens_forest": plan.num_tokens,
        "seconds_naive": round(seconds_naive, 4),
        "seconds_forest": round(seconds_forest, 4),
        "speedup": round(seconds_naive / seconds_forest, 3),
        "max_abs_error": max(float(np.abs(a - b).max()) for a, b in zip(forest, naive, strict=True)),
        "num_passes": len(plan.passes),
        "num_trunks": plan.num_trunks,
    }


def measure(trajectories: list[Trajectory], rank: PolicyRank, repeat: int) -> dict[str, float]:
    whole = compare(Work.of(trajectories), rank, repeat)
    full = compare(Work.of(trajectories, history_only=True), rank, repeat)
    entry = {
        "turns": max(len(t.turns) for t in trajectories),
        "group": len(trajectories),
        **whole,
        "token_ratio": round(whole["tokens_naive"] / whole["tokens_forest"], 3),
        "speedup_full": full["speedup"],
        "token_ratio_full": round(full["tokens_naive"] / full["tokens_forest"], 3),
        "max_abs_error": max(whole["max_abs_error"], full["max_abs_error"]),
    }
    print(json.dumps(entry), file=sys.stderr)
    return entry


def exponents(rank: PolicyRank, repeat: int) -> dict[str, object]:
    """Slopes of log(tokens) and log(seconds) over log(turns), by least squares."""
    turns = (5, 8, 12, 20, 32)
    points = [compare(Work.of(random_group(t, 1)), rank, repeat) for t in turns]
    x = np.log(turns)
    names = ("tokens_naive", "tokens_forest", "seconds_naive", "seconds_forest")
    slopes = {f"exponent_{n}": round(float(np.polyfit(x, np.log([p[n] for p in points]), 1)[0]), 3) for n in names}
    return slopes | {"points": [{"turns": t} | p for t, p in zip(turns, points, strict=True)]}


def planning(rank: PolicyRank, num_tokens: int, repeat: int) -> dict[str, float]:
    """CPU time of `expand` and `plan_forest` on that many forest tokens, as a share of running them.

    Run is one group of 8 trajectories of 10 turns; the time of all is extrapolated by tokens.
    """
    sample = Work.of(random_group(10, 8))
    run_s, _ = cpu_seconds(lambda: sample.run(rank), repeat)
    groups = -(-num_tokens // sample.plan(rank).num_tokens)
    whole = Work.of([t for seed in range(groups) for t in random_group(10, 8, seed)])
    plan_s, plan = cpu_seconds(lambda: whole.plan(rank), repeat)
    run_s *= plan.num_tokens / sample.plan(rank).num_tokens
    return {"tokens": plan.num_tokens, "seconds_plan": plan_s, "seconds_run": run_s, "share": plan_s / (plan_s + run_s)}


def update(rank: PolicyRank, repeat: int) -> list[dict[str, object]]:
    """Forward, backward and step over one mini-batch, with `policy.share_prefixes` and without it."""
    rng = np.random.default_rng(0)

    def row(*parts: np.ndarray) -> Row:
        ids = np.concatenate(parts).astype(np.int64)
        return Row(ids, np.arange(len(ids) - len(parts[-1]), len(ids)))

    def siblings(
        system: int,
        context: str = "last_turn",
        group: int = 4,
        num_turns: int = 6,
        output: int = OUTPUT,
        tool: int = TOOL,
    ) -> list[Row]:
        question, rows = rng.integers(0, VOCAB, system), []
        for _ in range(group):
            turns = [(rng.integers(0, VOCAB, output), rng.integers(0, VOCAB, tool)) for _ in range(num_turns)]
            for t, (written, _) in enumerate(turns):
                shown = turns[:t] if context == "full" else turns[max(0, t - 1) : t]
                rows.append(row(question, *itertools.chain(*shown), written))
        return rows

    cases = {
        "question 40, 16 siblings of 3 turns, 25 written and 30 found": siblings(
            40, group=16, num_turns=3, output=25, tool=30
        ),
        "question 150, 4 siblings of 6 turns": siblings(150),
        "question 600, 4 siblings of 6 turns": siblings(600),
        "question 1500, 4 siblings of 6 turns": siblings(1500),
        "question 150, 4 siblings of 6 turns, context: full": siblings(150, "full"),
    }
    entries = []
    for name, rows in cases.items():
        entry: dict[str, object] = {"case": name}
        for share in (False, True):
            policy = rank.policy.model_copy(update={"share_prefixes": share})

            def step(rows: list[Row] = rows, policy=policy) -> None:
                supervised_step(
                    rank.model, rank.optimizer, rows, lr=0.0, num_target_tokens=1, policy=policy, gang=rank.gang
                )

            key = "shared" if share else "plain"
            entry[f"tokens_{key}"] = plan_forest(rows, policy.micro_batch_tokens, share=share).num_tokens
            entry[f"seconds_{key}"] = round(cpu_seconds(step, repeat)[0], 3)
        entry["speedup"] = round(entry["seconds_plain"] / entry["seconds_shared"], 3)
        print(json.dumps(entry), file=sys.stderr)
        entries.append(entry)
    return entries


# -- the worker ---------------------------------------------------------------------------------------------


def open_rank(folder: Path) -> PolicyRank:
    """A gang of one, as the project makes it: gloo, FSDP2, one thread."""
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return PolicyRank(rank_settings(folder), Gang.join(0, 1, ("127.0.0.1", port), "cpu", 60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", default="5,10,16", help="lengths of the trajectories")
    parser.add_argument("--group", type=int, default=1, help="trajectories on one question")
    parser.add_argument("--repeat", type=int, default=3, help="each measurement is the best of so many")
    parser.add_argument("--exponents", action="store_true", help="growth with the number of turns")
    parser.add_argument("--planning", type=int, default=0, metavar="TOKENS", help="cost of the plan")
    parser.add_argument("--update", action="store_true", help="shared prefixes in the update")
    parser.add_argument("--model", type=Path, help="a model folder, for real passages")
    shared = Path(os.environ.get("MEMPO_SHARED", "../shared"))
    parser.add_argument("--questions", type=Path, default=shared / "data/dev.jsonl")
    parser.add_argument("--corpus", type=Path, default=shared / "data/corpus.jsonl")
    parser.add_argument("--json", default="-", help="file for the figures, - for standard output")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rank = open_rank(a.model or write_model(Path(folder)))
        if a.model:
            figures = [measure(Real(a.model, a.questions, a.corpus).trajectories(), rank, a.repeat)]
        elif a.exponents:
            figures = exponents(rank, a.repeat)
        elif a.planning:
            figures = planning(rank, a.planning, a.repeat)
        elif a.update:
            figures = update(rank, a.repeat)
        else:
            figures = [measure(random_group(int(t), a.group), rank, a.repeat) for t in a.turns.split(",")]
        rank.gang.leave()
    text = json.dumps(figures, indent=2)
    print(text) if a.json == "-" else Path(a.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
