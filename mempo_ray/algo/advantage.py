"""Advantages of a step (algorithm.md §4), who counts (§1), and the order of optimiser steps (§5).

    survivors of all groups ──▶ step_advantages ──▶ two numbers a turn: outcome (algo/estimators.py) and memory

The rank expands them to tokens: A[k] = outcome of turn t + (memory of turn t where k lies inside its <mem> span).
Axes: `_G` surviving siblings, `_S` turns, `_T` tokens. Statistics are float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mempo_ray.algo.estimators import EPS, Groups, ScoredTrajectory
from mempo_ray.algo.memory_reward import MemorySample
from mempo_ray.algo.registry import ADV_ESTIMATORS
from mempo_ray.config.schema import Algorithm, GroupFilter, MemoryReward
from mempo_ray.contracts import Score, TrajectorySummary, Unscored

# -- who counts -------------------------------------------------------------------------------------------


def exclusion_reason(summary: TrajectorySummary, score: Score | None) -> str | None:
    """Why a trajectory leaves all statistics and rows (§1); None: it survives.

    `score` None = not asked for, because the episode already broke. A reward on a row without tokens would move its
    siblings' advantages without ever being trained, so such a trajectory is excluded too.
    """
    if summary.end_reason.is_infrastructure:
        return f"{summary.end_reason.value}: {summary.detail}"
    if summary.num_output_tokens == 0:
        return "no output tokens"
    if score is None or isinstance(score, Unscored):
        return f"unscored: {score.kind}: {score.reason}" if score else "unscored"
    if not math.isfinite(score.score):  # one of them would turn the whole group's advantages into NaN
        return f"unscored: the scorer answered {score.score}"
    return None


# -- one step ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PooledSample:
    """A sample that took part in a pool's statistics, and what they made of it (before weight and `combine`)."""

    sample: MemorySample
    advantage: float


@dataclass(frozen=True, eq=False)
class GroupAdvantages:
    """Result for one group, in the order of its survivors."""

    outcome_GS: tuple[tuple[float, ...], ...]  # [G][S]
    memory_GS: tuple[tuple[float, ...], ...]  # [G][S], × weight and combined; 0 without a sample
    pooled: tuple[PooledSample, ...]
    num_pools: int
    num_flat_pools: int
    num_gated: int  # samples that the gate kept out of the pools

    @property
    def is_outcome_flat(self) -> bool:
        return not any(any(outcome_S) for outcome_S in self.outcome_GS)

    @property
    def is_memory_flat(self) -> bool:
        """No pool has an advantage to give (true as well where there is no pool)."""
        return self.num_flat_pools == self.num_pools

    @property
    def is_flat(self) -> bool:
        return self.is_outcome_flat and self.is_memory_flat


def step_advantages(groups: Groups, algorithm: Algorithm, memory: MemoryReward) -> list[GroupAdvantages]:
    """Outcome and memory advantages of the survivors of all tasks of a step (§4), group by group.

    Worked example (grpo): one group, outcomes [1, 0]; R^M [0.2, 0.6] and [−0.1]. outcome_GS = ((.707106, .707106),
    (−.707106,)); the pool of three has mean .233333 and std .351188: memory_GS = ((−.094916, 1.044071), (−.949155,)).
    """
    outcomes = ADV_ESTIMATORS.get(algorithm.adv_estimator)(groups, algorithm) if groups else []
    return [
        _with_memory(group, tuple(tuple(map(float, a_S)) for a_S in outcome), algorithm, memory)
        for group, outcome in zip(groups, outcomes, strict=True)
    ]


def _with_memory(
    group: Sequence[ScoredTrajectory],
    outcome_GS: tuple[tuple[float, ...], ...],
    algorithm: Algorithm,
    memory: MemoryReward,
) -> GroupAdvantages:
    pools: dict[int, list[tuple[int, MemorySample]]] = {}
    for i, trajectory in enumerate(group):
        if _passes_gate(trajectory, memory):
            for sample in trajectory.samples:
                pools.setdefault(_pool_of(i, sample, memory), []).append((i, sample))

    memory_GS = [[0.0] * trajectory.num_turns for trajectory in group]
    pooled: list[PooledSample] = []
    num_flat = 0
    for pool in pools.values():
        rewards = np.array([sample.reward for _, sample in pool], np.float64)
        advantages = _standardise(rewards, memory.min_std)
        num_flat += advantages is None
        for (i, sample), advantage in zip(pool, np.zeros(len(pool)) if advantages is None else advantages, strict=True):
            pooled.append(PooledSample(sample, float(advantage)))
            memory_GS[i][sample.turn] = memory.weight * _combine(float(advantage), group[i], algorithm)
    return GroupAdvantages(
        outcome_GS=outcome_GS,
        memory_GS=tuple(map(tuple, memory_GS)),
        pooled=tuple(pooled),
        num_pools=len(pools),
        num_flat_pools=num_flat,
        num_gated=sum(len(trajectory.samples) for trajectory in group) - len(pooled),
    )


def _passes_gate(trajectory: ScoredTrajectory, settings: MemoryReward) -> bool:
    if settings.gate == "success_only":
        return trajectory.outcome > 0
    return trajectory.format_valid if settings.gate == "format_ok" else True


def _pool_of(trajectory: int, sample: MemorySample, settings: MemoryReward) -> int:
    return {"group_turns": 0, "turn_index": sample.turn, "trajectory": trajectory}[settings.pool]


def _standardise(rewards: np.ndarray, min_std: float) -> np.ndarray | None:
    """(R − mean) / (std + 1e-6), ddof 1; None where the pool is flat: one sample, or a std below `min_std`."""
    if len(rewards) < 2 or np.ptp(rewards) == 0 or (std := rewards.std(ddof=1)) < min_std:
        return None
    return (rewards - rewards.mean()) / (std + EPS)


def _combine(advantage: float, trajectory: ScoredTrajectory, settings: Algorithm) -> float:
    if settings.combine == "success_only":
        return advantage if trajectory.outcome > 0 else 0.0
    return max(advantage, 0.0) if settings.combine == "positive_only" else advantage


def memory_metrics(groups: Sequence[GroupAdvantages]) -> Mapping[str, float]:
    """Means over the pooled samples of a step, in all and by turn (from 1); empty where there is no sample.

    `flat_pool_share` is over pools; `version_gap` is the largest distance between scorer and writer of a memory.
    """
    pooled = [entry for group in groups for entry in group.pooled]
    if not pooled:
        return {}
    samples = [entry.sample for entry in pooled]
    metrics = {
        "memory/reward": _mean([s.reward for s in samples]),
        "memory/p_mem": _mean([s.p_mem for s in samples]),
        "memory/p_base": _mean([s.p_base for s in samples]),
        "memory/num_samples": float(len(samples)),
        "memory/num_gated": float(sum(group.num_gated for group in groups)),
        "memory/flat_pool_share": sum(g.num_flat_pools for g in groups) / sum(g.num_pools for g in groups),
        "memory/version_gap": float(max(abs(s.scorer_version - s.weight_version) for s in samples)),
    }
    for turn in sorted({s.turn for s in samples}):
        own = [entry for entry in pooled if entry.sample.turn == turn]
        metrics[f"memory/advantage_turn_{turn + 1}"] = _mean([entry.advantage for entry in own])
        metrics[f"memory/p_mem_turn_{turn + 1}"] = _mean([entry.sample.p_mem for entry in own])
        metrics[f"memory/p_base_turn_{turn + 1}"] = _mean([entry.sample.p_base for entry in own])
        metrics[f"memory/reward_variance_turn_{turn + 1}"] = float(np.var([entry.sample.reward for entry in own]))
    return metrics


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


# -- between groups ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FilterDecision:
    """Indices of the groups to train on, and how many new tasks to sample in place of the others."""

    kept: tuple[int, ...]
    num_resample: int


def filter_groups(
    groups: Sequence[GroupAdvantages], settings: GroupFilter, *, num_wanted: int, round_: int = 0
) -> FilterDecision:
    """Drop groups whose outcome and memory pools are all flat (DAPO's dynamic sampling, extended to memory).

    Args:
        groups: of all rounds of the step so far; tasks without a survivor are not among them.
        num_wanted: groups that the step should train on.
        round_: rounds of resampling already done in this step; from `max_resamples` on, flat groups are just dropped.

    Example: 16 wanted, 4 of 16 flat: 4 new tasks; all 4 of those good: 16 of 20 kept, none asked for.
    """
    if settings.mode == "off":
        return FilterDecision(tuple(range(len(groups))), 0)
    kept = tuple(i for i, group in enumerate(groups) if not group.is_flat)
    resample = settings.mode == "resample" and round_ < settings.max_resamples
    return FilterDecision(kept, max(0, num_wanted - len(kept)) if resample else 0)


def mini_batches(group_tokens: Sequence[int], num_parts: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Whole groups in a seeded order, cut into exactly `num_parts` runs of nearly equal tokens (§5).

    More turns never mean more optimiser steps. No part is empty while there are as many groups as parts; with fewer
    groups the last parts are.

    Args:
        group_tokens: training tokens (all rows of all survivors) of each group.

    Example: four groups of 10 tokens in 2 parts: two and two, e.g. ((2, 0), (3, 1)).
    """
    order = np.random.default_rng(seed).permutation(len(group_tokens))
    num_filled = min(num_parts, len(order))
    ends = np.cumsum(np.array(group_tokens, np.int64)[order]) if len(order) else np.zeros(0, np.int64)
    borders = [0]
    for part in range(1, num_filled):
        ideal = ends[-1] * part / num_filled
        nearest = int(np.argmin(np.abs(ends - ideal))) + 1
        borders.append(min(max(nearest, borders[-1] + 1), len(order) - (num_filled - part)))
    borders.append(len(order))
    parts = [tuple(order[a:b].tolist()) for a, b in itertools.pairwise(borders)] if len(order) else []
    return tuple(parts + [()] * (num_parts - len(parts)))
