"""Advantages of one task's group (algorithm.md §4), who counts (§1), and the order of optimiser steps (§5).

    survivors of a group ──▶ group_advantages ──▶ one number a trajectory (outcome) + one a turn (memory)

The rank expands them to tokens: A[k] = outcome + (memory of turn t where k lies inside its <mem> span).
Axes: `_G` surviving siblings, `_S` turns, `_T` tokens. Statistics are float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mempo_ray.algo.memory_reward import MemorySample
from mempo_ray.algo.registry import ADV_ESTIMATORS
from mempo_ray.config.schema import Algorithm, GroupFilter, MemoryReward
from mempo_ray.contracts import Score, TrajectorySummary, Unscored

EPS = 1e-6


# -- outcome ----------------------------------------------------------------------------------------------


def outcome_advantages(scores_G: np.ndarray, settings: Algorithm) -> np.ndarray:
    """A^T of the survivors of one group, by the registered estimator. float64 [G] → [G].

    What no estimator may get wrong by rounding is settled here: all equal → exactly 0; a group of one → 0, or the
    score itself under `singleton: raw`.
    """
    if len(scores_G) == 1 and settings.singleton == "raw":
        return scores_G.copy()
    if len(scores_G) < 2 or np.ptp(scores_G) == 0:
        return np.zeros_like(scores_G)
    return ADV_ESTIMATORS.get(settings.adv_estimator)(scores_G, settings)


def grpo(scores_G: np.ndarray, settings: Algorithm) -> np.ndarray:
    """(s − mean) / (std + 1e-6), sample deviation (ddof 1) (Shao et al. 2024, §4.1.2). G ≥ 2.

    `normalize_by_std: false` drops the division (Dr. GRPO, Liu et al. 2025).
    """
    centred_G = scores_G - scores_G.mean()
    return centred_G / (scores_G.std(ddof=1) + EPS) if settings.normalize_by_std else centred_G


def rloo(scores_G: np.ndarray, settings: Algorithm) -> np.ndarray:
    """Score minus the mean of the others (Ahmadian et al. 2024, eq. 8). G ≥ 2."""
    num = len(scores_G)
    return (scores_G - scores_G.mean()) * (num / (num - 1))


def gae(
    rewards_GT: np.ndarray, values_GT: np.ndarray, mask_GT: np.ndarray, *, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimation over policy tokens (Schulman et al. 2016, eq. 16), whitened over the mask.

    Tokens with mask 0 are skipped: the token before them sees the value of the next policy token.

    Args:
        rewards_GT: float64 [G, T], token-level rewards; `values_GT`, `mask_GT` the same shape.

    Returns:
        (advantages, returns), float64 [G, T], 0 where the mask is 0. Advantages have mean 0 and unbiased variance 1
        over the mask (eps 1e-8); returns = raw advantage + value.
    """
    advantages_GT = np.zeros_like(values_GT)
    next_value_G = np.zeros(len(values_GT))
    next_advantage_G = np.zeros(len(values_GT))
    for t in reversed(range(values_GT.shape[1])):
        delta_G = rewards_GT[:, t] + gamma * next_value_G - values_GT[:, t]
        advantages_GT[:, t] = delta_G + gamma * lam * next_advantage_G
        is_policy_G = mask_GT[:, t] > 0
        next_value_G = np.where(is_policy_G, values_GT[:, t], next_value_G)
        next_advantage_G = np.where(is_policy_G, advantages_GT[:, t], next_advantage_G)
    is_policy_GT = mask_GT > 0
    returns_GT = np.where(is_policy_GT, advantages_GT + values_GT, 0.0)
    kept = advantages_GT[is_policy_GT]
    scale = np.sqrt(kept.var(ddof=1) + 1e-8) if len(kept) > 1 else 1.0
    return np.where(is_policy_GT, (advantages_GT - kept.mean()) / scale, 0.0), returns_GT


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


# -- one group --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoredTrajectory:
    """A survivor, as the statistics see it.

    Example: ScoredTrajectory(outcome=1.0, num_turns=3, format_valid=True, samples=(s0, s2)): turn 1 has no memory.
    """

    outcome: float  # R^T ∈ [0, 1]
    num_turns: int
    format_valid: bool
    samples: tuple[MemorySample, ...] = ()
    penalty: float = 0.0  # κ · Σ KL under `kl_in_reward`; R^M and the gates do not see it

    @property
    def score(self) -> float:
        return self.outcome - self.penalty


@dataclass(frozen=True)
class PooledSample:
    """A sample that took part in a pool's statistics, and what they made of it (before weight and `combine`)."""

    sample: MemorySample
    advantage: float


@dataclass(frozen=True, eq=False)
class GroupAdvantages:
    """Result for one group, in the order of its survivors."""

    outcome_G: np.ndarray  # float64 [G]
    memory_GS: tuple[tuple[float, ...], ...]  # [G][S], × weight and combined; 0 without a sample
    pooled: tuple[PooledSample, ...]
    num_pools: int
    num_flat_pools: int
    num_gated: int  # samples that the gate kept out of the pools

    @property
    def is_outcome_flat(self) -> bool:
        return not self.outcome_G.any()

    @property
    def is_memory_flat(self) -> bool:
        """No pool has an advantage to give (true as well where there is no pool)."""
        return self.num_flat_pools == self.num_pools

    @property
    def is_flat(self) -> bool:
        return self.is_outcome_flat and self.is_memory_flat


def group_advantages(group: Sequence[ScoredTrajectory], algorithm: Algorithm, memory: MemoryReward) -> GroupAdvantages:
    """Outcome and memory advantages of the survivors of one task (§4). A group without survivors has none to give.

    Worked example: outcomes [1, 0]; R^M [0.2, 0.6] and [−0.1]. outcome_G = [.707106, −.707106]; the pool of three
    has mean .233333 and std .351188, so memory_GS = ((−.094916, 1.044071), (−.949155,)).
    """
    scores_G = np.array([trajectory.score for trajectory in group], np.float64)
    outcome_G = outcome_advantages(scores_G, algorithm)

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
        outcome_G=outcome_G,
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
