"""What an episode is made of, and how it crosses a process.

    Task ──▶ EpisodeRequest ──▶ [agent] ──▶ Trajectory ──▶ TrajectoryBatch   (payload, by reference)
                                                     └────▶ TrajectorySummary (by value: all that scheduling needs)

Axes: `_S` turns of a trajectory (= training rows), `_T` tokens.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from mempo_ray.contracts.batch import Batch, Column, Ragged

GIVEN_TRUTH = "reward_model.ground_truth"
"""Key of `Task.metadata`: verl's ground truth as its row holds it, where that is no plain text."""
SPAN_NAMES = ("mem", "think", "search", "answer")
NO_SPAN = (-1, -1)


class EndReason(StrEnum):
    """Why an episode ended. The first four are the policy's own doing; the rest is infrastructure."""

    ANSWERED = "answered"
    MAX_TURNS = "max_turns"
    LENGTH = "length"
    FORMAT_STOP = "format_stop"
    DEADLINE = "deadline"
    TOOL_FAILED = "tool_failed"
    ENGINE_FAILED = "engine_failed"

    @property
    def is_infrastructure(self) -> bool:
        """True: the trajectory is sampled again or excluded, never scored."""
        return self in (EndReason.DEADLINE, EndReason.TOOL_FAILED, EndReason.ENGINE_FAILED)


@dataclass(frozen=True)
class Task:
    """One question.

    Example:
        >>> Task("q7", "Where was X born?", golds=(("Paris", "Paris, France"),), data_source="hotpotqa").gold_text
        'Paris'
    """

    task_id: str
    question: str
    golds: tuple[tuple[str, ...], ...]  # objectives × aliases; the first alias is the primary one
    data_source: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def gold_text(self) -> str:
        """The primary answers joined with '; ' (the probe text of algorithm.md §3, `alias: first`)."""
        return "; ".join(aliases[0] for aliases in self.golds)


@dataclass(frozen=True)
class EpisodeRequest:
    """Run one episode: sibling `sibling` of `task`, its `attempt`-th try. Same sibling, same seeds.

    `forced_memory_S` (evaluation only) replaces the `<mem>` block of turn t by the ids of its entry t, the last entry
    standing for all later turns: the turn starts with them and the policy samples the rest.
    """

    task: Task
    sibling: int
    seed: int  # of the sibling; turn t samples with turn_seed(seed, t)
    attempt: int = 0
    greedy: bool = False
    forced_memory_S: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class Passage:
    """One search result. `text` excludes the title."""

    id: str
    title: str
    text: str
    score: float = 0.0


@dataclass(frozen=True)
class Probe:
    """`<answer>` + gold + `</answer>` encoded once; `ids[start:stop]` are the scored gold tokens (§3).

    Probes of one `objective` are its aliases; `algo.memory_reward.plan_probes` says which texts to encode.
    """

    ids: tuple[int, ...]
    start: int
    stop: int
    objective: int = 0


@dataclass(frozen=True, eq=False)
class Turn:
    """One sampled turn: exactly the ids that went in and came out.

    `output_mask` is 1 where the policy sampled the token, 0 where the system added it. `spans[name]` is the
    half-open token range of that block in `output_ids`, tags included, or NO_SPAN; a block that is missing,
    truncated or repeated has NO_SPAN. `memory_ids` is what the memory context of §3 holds for this turn
    (empty: no sample).
    """

    prompt_ids: np.ndarray  # int32 [P]
    output_ids: np.ndarray  # int32 [O]
    output_logprobs: np.ndarray  # float32 [O], of the sampler, at its temperature; 0 where mask is 0
    output_mask: np.ndarray  # uint8 [O]
    tool_ids: (
        np.ndarray
    )  # int32 [Q]; from after the end-of-turn token to the next assistant header; empty in the last turn
    memory_ids: np.ndarray  # int32 [M]
    spans: Mapping[str, tuple[int, int]]
    weight_version: int
    seed: int
    finish_reason: str  # "stop" | "length"
    text: str  # output_ids decoded, without the end-of-turn token
    query: str = ""
    passage_ids: tuple[str, ...] = ()
    tool_text: str = ""


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One finished episode. `format_report[check]` is True where the check of §2 passed."""

    task: Task
    sibling: int
    attempt: int
    turns: tuple[Turn, ...]
    end_reason: EndReason
    format_report: Mapping[str, bool]
    probes: tuple[Probe, ...]
    answer: str | None = None  # content of the last <answer> of the policy's own tokens, stripped
    detail: str = ""  # of an infrastructure end: what failed
    num_reencoded: int = 0  # memory tails that were encoded again (§3)
    tool_rewards: Mapping[str, float] = field(default_factory=dict)  # by tool, of those that gave one

    @property
    def format_valid(self) -> bool:
        return all(self.format_report.values())

    def summary(self) -> TrajectorySummary:
        return TrajectorySummary(
            task_id=self.task.task_id,
            sibling=self.sibling,
            attempt=self.attempt,
            end_reason=self.end_reason,
            detail=self.detail,
            format_valid=self.format_valid,
            prompt_tokens_S=tuple(len(t.prompt_ids) for t in self.turns),
            output_tokens_S=tuple(len(t.output_ids) for t in self.turns),
            tool_tokens_S=tuple(len(t.tool_ids) for t in self.turns),
            memory_tokens_S=tuple(len(t.memory_ids) for t in self.turns),
            weight_versions_S=tuple(t.weight_version for t in self.turns),
            probes=self.probes,
            num_reencoded=self.num_reencoded,
        )


@dataclass(frozen=True)
class TrajectorySummary:
    """All that the driver needs to schedule a trajectory without opening its payload."""

    task_id: str
    sibling: int
    attempt: int
    end_reason: EndReason
    detail: str
    format_valid: bool
    prompt_tokens_S: tuple[int, ...]
    output_tokens_S: tuple[int, ...]
    tool_tokens_S: tuple[int, ...]
    memory_tokens_S: tuple[int, ...]  # 0: this turn gives no memory sample
    weight_versions_S: tuple[int, ...]
    probes: tuple[Probe, ...]
    num_reencoded: int = 0
    num_bytes: int = 0  # of the payload, in the object store

    @property
    def num_turns(self) -> int:
        return len(self.output_tokens_S)

    @property
    def num_output_tokens(self) -> int:
        """|V(i)| before the mask; system-added end tokens are counted by the trainer, not here."""
        return sum(self.output_tokens_S)

    @property
    def num_row_tokens(self) -> int:
        """Tokens of all training rows: Σ_t prompt_t + output_t."""
        return sum(self.prompt_tokens_S) + sum(self.output_tokens_S)


@dataclass(frozen=True)
class PayloadRef:
    """An opaque handle of a payload. Who only schedules passes it on; who reads it gets it as a top-level argument.

    `handle` is a ray.ObjectRef in a cluster and the payload itself in process (tests, `ask`).
    """

    key: str
    handle: Any
    num_bytes: int = 0


@dataclass(frozen=True)
class Finished:
    """What an AgentLoopWorker yields for one episode. `payload` is None when there is not a single turn."""

    summary: TrajectorySummary
    payload: PayloadRef | None


_RAGGED = {
    "prompt_ids": (np.int32, "prompt as sampled from"),
    "output_ids": (np.int32, "sampled ids, end-of-turn included"),
    "output_logprobs": (np.float32, "log-prob of each output id under the sampler"),
    "output_mask": (np.uint8, "1 = sampled by the policy"),
    "tool_ids": (np.int32, "ids between this output and the next"),
    "memory_ids": (np.int32, "the <mem> block in the memory context; empty: no sample"),
}
_FIXED = {
    "sibling": (np.int32, "index in the group"),
    "turn": (np.int32, "0-based"),
    "attempt": (np.int32, "0 = first try"),
    "seed": (np.int64, "of this turn's sampling"),
    "weight_version": (np.int64, "of the sampler"),
    "num_reencoded": (np.int32, "memory tails encoded again, per trajectory"),
    **{f"{name}_span": (np.int32, f"[S, 2] token range of <{name}>, -1 -1: none") for name in SPAN_NAMES},
}
_TABLE = {
    "task_id": (pa.string(), "of the question"),
    "task": (pa.string(), "the Task as JSON"),
    "end_reason": (pa.string(), "EndReason"),
    "detail": (pa.string(), "of an infrastructure end"),
    "format_failed": (pa.list_(pa.string()), "names of the failed checks"),
    "format_passed": (pa.list_(pa.string()), "names of the passed checks"),
    "answer": (pa.string(), "extracted answer or null"),
    "probes": (pa.string(), "Probe list as JSON"),
    "finish_reason": (pa.string(), "stop | length"),
    "text": (pa.string(), "output decoded, without the end-of-turn token"),
    "query": (pa.string(), "search query or empty"),
    "passage_ids": (pa.list_(pa.string()), "of the search result"),
    "tool_text": (pa.string(), "tool response"),
    "tool_rewards": (pa.string(), "by tool, as JSON"),
}


class TrajectoryBatch(Batch):
    """One row per turn; trajectory-level values are repeated on each of its rows (dictionary-sized in Parquet).

    Example: a trajectory of two turns (3 and 2 output tokens) is a batch of two rows with
    `ragged["output_ids"].lengths == [3, 2]`, `fixed["turn"] == [0, 1]` and equal `task_id`.
    """

    SCHEMA: ClassVar[Mapping[str, Column]] = {
        **{n: Column("ragged", np.dtype(d), m) for n, (d, m) in _RAGGED.items()},
        **{n: Column("fixed", np.dtype(d), m) for n, (d, m) in _FIXED.items()},
        **{n: Column("table", d, m) for n, (d, m) in _TABLE.items()},
    }

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory]) -> TrajectoryBatch:
        """Rows of all turns of all trajectories, in order. A trajectory without turns leaves no row."""
        rows = [(trajectory, index, turn) for trajectory in trajectories for index, turn in enumerate(trajectory.turns)]
        ragged = {n: Ragged.from_rows([getattr(turn, n) for _, _, turn in rows], d) for n, (d, _) in _RAGGED.items()}
        spans = {
            f"{name}_span": np.array([turn.spans[name] for _, _, turn in rows], np.int32).reshape(-1, 2)
            for name in SPAN_NAMES
        }
        fixed = {
            "sibling": np.array([t.sibling for t, _, _ in rows], np.int32),
            "turn": np.array([index for _, index, _ in rows], np.int32),
            "attempt": np.array([t.attempt for t, _, _ in rows], np.int32),
            "seed": np.array([turn.seed for _, _, turn in rows], np.int64),
            "weight_version": np.array([turn.weight_version for _, _, turn in rows], np.int64),
            "num_reencoded": np.array([t.num_reencoded for t, _, _ in rows], np.int32),
            **spans,
        }
        texts = {
            "task_id": [t.task.task_id for t, _, _ in rows],
            "task": [_task_to_json(t.task) for t, _, _ in rows],
            "end_reason": [t.end_reason.value for t, _, _ in rows],
            "detail": [t.detail for t, _, _ in rows],
            "format_failed": [[n for n, ok in t.format_report.items() if not ok] for t, _, _ in rows],
            "format_passed": [[n for n, ok in t.format_report.items() if ok] for t, _, _ in rows],
            "answer": [t.answer for t, _, _ in rows],
            "probes": [json.dumps([[p.ids, p.start, p.stop, p.objective] for p in t.probes]) for t, _, _ in rows],
            "finish_reason": [turn.finish_reason for _, _, turn in rows],
            "text": [turn.text for _, _, turn in rows],
            "query": [turn.query for _, _, turn in rows],
            "passage_ids": [list(turn.passage_ids) for _, _, turn in rows],
            "tool_text": [turn.tool_text for _, _, turn in rows],
            "tool_rewards": [json.dumps(dict(t.tool_rewards)) for t, _, _ in rows],
        }
        table = pa.table({n: pa.array(values, _TABLE[n][0]) for n, values in texts.items()})
        return cls(ragged, fixed, table)

    def trajectories(self) -> list[Trajectory]:
        """The trajectories back, in order: a row with turn 0 opens a new one. Arrays are views of this batch."""
        texts = {n: self.strings(n) for n in _TABLE}
        starts = [*np.flatnonzero(self.fixed["turn"] == 0).tolist(), len(self)]
        return [self._trajectory(start, stop, texts) for start, stop in itertools.pairwise(starts)]

    def _trajectory(self, start: int, stop: int, texts: Mapping[str, list]) -> Trajectory:
        turns = tuple(
            Turn(
                **{n: self.ragged[n][row] for n in _RAGGED},
                spans={name: tuple(self.fixed[f"{name}_span"][row].tolist()) for name in SPAN_NAMES},
                weight_version=int(self.fixed["weight_version"][row]),
                seed=int(self.fixed["seed"][row]),
                finish_reason=texts["finish_reason"][row],
                text=texts["text"][row],
                query=texts["query"][row],
                passage_ids=tuple(texts["passage_ids"][row]),
                tool_text=texts["tool_text"][row],
            )
            for row in range(start, stop)
        )
        failed, passed = texts["format_failed"][start], texts["format_passed"][start]
        return Trajectory(
            task=_task_from_json(texts["task"][start]),
            sibling=int(self.fixed["sibling"][start]),
            attempt=int(self.fixed["attempt"][start]),
            turns=turns,
            end_reason=EndReason(texts["end_reason"][start]),
            format_report={**dict.fromkeys(passed, True), **dict.fromkeys(failed, False)},
            probes=tuple(Probe(tuple(ids), *rest) for ids, *rest in json.loads(texts["probes"][start])),
            answer=texts["answer"][start],
            detail=texts["detail"][start],
            num_reencoded=int(self.fixed["num_reencoded"][start]),
            tool_rewards=json.loads(texts["tool_rewards"][start]),
        )


def _task_to_json(task: Task) -> str:
    return json.dumps([task.task_id, task.question, task.golds, task.data_source, task.metadata], default=str)


def _task_from_json(text: str) -> Task:
    task_id, question, golds, data_source, metadata = json.loads(text)
    return Task(task_id, question, tuple(tuple(g) for g in golds), data_source, metadata)
