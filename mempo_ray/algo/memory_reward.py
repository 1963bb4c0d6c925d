"""The memory reward R^M of algorithm.md §3: which log-probs to ask for, and what they are worth.

    plan_probes   Task              ──▶ texts to encode        (the agent encodes them, once an episode)
    build_request TrajectorySummary ──▶ MemoryRequest          (a forest of contexts, sent when the trajectory ends)
    memory_rewards  + LogProbResult ──▶ MemorySample per turn  (MemPO, eq. for R^M: P_mem − P_full)

All pure, on summaries: the payload is named by `Slice`s and never opened here.
Axes: `_S` turns of a trajectory, `_C` contexts of a request, `_K` probes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mempo_ray.config.schema import MemoryReward
from mempo_ray.contracts import (
    LogProbRequest,
    LogProbResult,
    PayloadRef,
    Probe,
    Segment,
    Slice,
    Task,
    TrajectorySummary,
)
from mempo_ray.errors import TrainingError


class ProbeText(NamedTuple):
    """A gold text to score behind `<answer>`; texts of one `objective` are aliases of each other."""

    text: str
    objective: int = 0


def plan_probes(task: Task, settings: MemoryReward) -> tuple[ProbeText, ...]:
    """The texts that §3 scores for this task, objective by objective, aliases in their given order.

    - `alias: first`, `objectives: joined` (default): one text, the primary answers joined with '; '.
    - `objectives: per_objective`: one text per objective.
    - `alias: max | mean`: one text per alias. An alias belongs to one objective, so with several objectives
      this asks per objective even under `joined`.

    Example: golds (("Paris", "Paris, France"), ("1889",)) give ["Paris; 1889"], ["Paris", "1889"] and
    ["Paris", "Paris, France", "1889"] in the three cases.
    """
    if settings.alias == "first":
        if settings.objectives == "joined":
            return (ProbeText(task.gold_text),)
        return tuple(ProbeText(aliases[0], objective) for objective, aliases in enumerate(task.golds))
    return tuple(ProbeText(alias, objective) for objective, aliases in enumerate(task.golds) for alias in aliases)


@dataclass(frozen=True)
class SamplePlan:
    """One memory sample: the turn, and which contexts of the request it compares (`baseline` None: with nothing)."""

    turn: int
    memory: int
    baseline: int | None
    weight_version: int  # of the weights that wrote this memory


@dataclass(frozen=True)
class MemoryRequest:
    """A request and the way back: marked segment `c · len(objectives_K) + k` is probe k behind context c.

    A context that several samples compare with (the question alone; the memory of t−1) stands there once.
    """

    request: LogProbRequest
    samples: tuple[SamplePlan, ...]
    objectives_K: tuple[int, ...]
    num_dropped: int = 0  # samples given up: history above `max_history_tokens`
    num_truncated: int = 0  # samples whose history lost its oldest turns


def build_request(
    summary: TrajectorySummary,
    payload: PayloadRef,
    settings: MemoryReward,
    *,
    policy_version: int | None,
    deadline_s: float,
    priority: int = 0,
) -> MemoryRequest | None:
    """All contexts of one trajectory as one forest; None where no turn gives a sample.

    Memory context of turn t = prompt of turn 1 ++ mem_t. Baseline context, by `settings.baseline`:

        full_history     prompt of turn 1 ++ Σ_{s<t} (output_s ++ tool_s)
        previous_memory  prompt of turn 1 ++ mem_{t−1};  the question only at t = 1 and where t−1 has no valid memory
        question_only    prompt of turn 1
        none             no second side

    Turns that `settings.turns` keeps out of the pool are not asked for. Sampling temperature plays no part: P(·) is
    always at temperature 1.

    Example: two turns with memories, full_history, one probe: the forest in `contracts/scoring.py`.
    """
    probes = tuple(probe for probe in summary.probes if probe.stop > probe.start)
    dropped = dropped_turns(summary, settings)
    turns = _pool_turns([t for t in _memory_turns(summary) if t not in dropped], settings)
    if not turns or not probes:
        return None

    forest = _Forest(summary, probes)
    baseline: Mapping[str, Callable[[int], int | None]] = {
        "full_history": lambda t: forest.context(forest.history(_history_start(summary, t, settings), t)),
        "previous_memory": lambda t: forest.context(
            forest.memory(t - 1) if t > 0 and summary.memory_tokens_S[t - 1] > 0 else forest.root
        ),
        "question_only": lambda t: forest.context(forest.root),
        "none": lambda t: None,
    }
    samples = tuple(
        SamplePlan(
            t,
            forest.context(forest.memory(t)),
            baseline[settings.baseline](t),
            summary.weight_versions_S[t],
        )
        for t in turns
    )
    request = LogProbRequest(
        id=f"memory/{summary.task_id}/{summary.sibling}/{summary.attempt}",
        segments=forest.segments_with_probes(),
        payload=payload,
        policy_version=policy_version,
        model=settings.scorer,
        deadline_s=deadline_s,
        priority=priority,
        affinity=summary.task_id,
    )
    return MemoryRequest(
        request,
        samples,
        tuple(probe.objective for probe in probes),
        len(dropped),
        sum(1 for t in turns if settings.baseline == "full_history" and _history_start(summary, t, settings) > 0),
    )


def dropped_turns(summary: TrajectorySummary, settings: MemoryReward) -> tuple[int, ...]:
    """Turns with a memory that give no sample because the history before them exceeds `max_history_tokens`."""
    if settings.baseline != "full_history" or settings.long_history != "drop":
        return ()
    return tuple(t for t in _memory_turns(summary) if _history_start(summary, t, settings) > 0)


@dataclass(frozen=True)
class MemorySample:
    """R^M of one turn. `p_mem`, `p_base` are probabilities in [0, 1] whatever the transform (metrics read them)."""

    turn: int
    reward: float
    p_mem: float
    p_base: float  # 0 under `baseline: none`
    weight_version: int  # that wrote the memory
    scorer_version: int  # that scored it


def memory_rewards(asked: MemoryRequest, result: LogProbResult, settings: MemoryReward) -> tuple[MemorySample, ...]:
    """R^M = f(memory) − f(baseline) per sample, in turn order.

    With P = exp(mean log-prob of the marked tokens): aliases of an objective are reduced on each side separately
    (max | mean), then the differences of the objectives are averaged. `transform: logprob` does all of this on the
    mean log-probs instead; `sign` takes the sign of the probability difference, 0 inside ± `dead_band`.

    Raises:
        TrainingError: the scorer answered another number of segments, or a log-prob that is not finite.
    """
    if len(result.logprobs) != len(asked.request.marked):
        raise TrainingError(
            f"{asked.request.id}: scorer answered {len(result.logprobs)} segments, {len(asked.request.marked)} asked"
        )
    mean_CK = np.array([np.mean(logprobs, dtype=np.float64) for logprobs in result.logprobs])
    mean_CK = mean_CK.reshape(-1, len(asked.objectives_K))
    if not np.isfinite(mean_CK).all():
        raise TrainingError(f"{asked.request.id}: scorer (version {result.version}) answered a non-finite log-prob")
    p_CO = _per_objective(np.exp(mean_CK), asked.objectives_K, settings)
    value_CO = _per_objective(mean_CK, asked.objectives_K, settings) if settings.transform == "logprob" else p_CO

    samples = []
    for plan in asked.samples:
        base_O = 0.0 if plan.baseline is None else value_CO[plan.baseline]
        reward = float(np.mean(value_CO[plan.memory] - base_O))
        if settings.transform == "sign":
            reward = float(np.sign(reward)) if abs(reward) > settings.dead_band else 0.0
        p_base = 0.0 if plan.baseline is None else float(p_CO[plan.baseline].mean())
        samples.append(
            MemorySample(
                plan.turn, reward, float(p_CO[plan.memory].mean()), p_base, plan.weight_version, result.version
            )
        )
    return tuple(samples)


class MemoryRewardMethod(NamedTuple):
    """What `memory_reward.name` selects: the question to the scorer, and what its answer is worth."""

    request: Callable[..., MemoryRequest | None]
    """Signature of `build_request`."""
    rewards: Callable[..., tuple[MemorySample, ...]]
    """Signature of `memory_rewards`."""


MEMPO = MemoryRewardMethod(build_request, memory_rewards)


def _memory_turns(summary: TrajectorySummary) -> list[int]:
    return [t for t, num_tokens in enumerate(summary.memory_tokens_S) if num_tokens > 0]


def _history_start(summary: TrajectorySummary, turn: int, settings: MemoryReward) -> int:
    """The first turn from which on the history before `turn` fits into `max_history_tokens`; 0: all of it fits."""
    tokens_S = [o + q for o, q in zip(summary.output_tokens_S, summary.tool_tokens_S, strict=True)]
    limit = settings.max_history_tokens
    if limit == 0:
        return 0
    return next(start for start in range(turn + 1) if sum(tokens_S[start:turn]) <= limit)


def _pool_turns(turns: list[int], settings: MemoryReward) -> list[int]:
    if settings.turns == "exclude_first":
        return [t for t in turns if t > 0]
    return turns[-1:] if settings.turns == "final_only" else turns


def _per_objective(values_CK: np.ndarray, objectives_K: tuple[int, ...], settings: MemoryReward) -> np.ndarray:
    """[C, K] → [C, objectives]: aliases reduced. Under `first` there is one probe per objective."""
    reduce = np.max if settings.alias == "max" else np.mean
    objectives = np.array(objectives_K)
    return np.stack([reduce(values_CK[:, objectives == o], axis=1) for o in sorted(set(objectives_K))], axis=1)


class _Forest:
    """Builder: each segment and each context is stated once, however many samples use it."""

    def __init__(self, summary: TrajectorySummary, probes: tuple[Probe, ...]) -> None:
        self._summary = summary
        self._probes = probes
        self._nodes: dict[tuple, int] = {}  # (parent, column, row) → segment
        self._segments: list[Segment] = []
        self._contexts: dict[int, int] = {}  # last segment of a context → its number
        self.root = self._segment(-1, "prompt_ids", 0, summary.prompt_tokens_S[0])

    def _segment(self, parent: int, column: str, row: int, length: int) -> int:
        key = (parent, column, row)
        if key not in self._nodes:
            self._nodes[key] = len(self._segments)
            self._segments.append(Segment(parent, Slice(column, row), length))
        return self._nodes[key]

    def memory(self, turn: int) -> int:
        return self._segment(self.root, "memory_ids", turn, self._summary.memory_tokens_S[turn])

    def history(self, start: int, stop: int) -> int:
        """Outputs and tool responses of turns start … stop−1 behind the first prompt."""
        node = self.root
        for turn in range(start, stop):
            node = self._segment(node, "output_ids", turn, self._summary.output_tokens_S[turn])
            if self._summary.tool_tokens_S[turn]:
                node = self._segment(node, "tool_ids", turn, self._summary.tool_tokens_S[turn])
        return node

    def context(self, node: int) -> int:
        return self._contexts.setdefault(node, len(self._contexts))

    def segments_with_probes(self) -> tuple[Segment, ...]:
        probes = [
            Segment(node, probe.ids, len(probe.ids), (probe.start, probe.stop))
            for node in self._contexts
            for probe in self._probes
        ]
        return (*self._segments, *probes)
