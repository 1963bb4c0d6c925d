"""Outcome advantages (algorithm.md §4): the scores of a step → one number a turn of every trajectory.

    groups of ScoredTrajectory ──▶ estimator ──▶ float64 [S] a trajectory; each output token of a turn gets its turn's

An estimator sees the whole step, so that it may normalise over it. One that looks at a group at a time is written on
plain scores and wrapped:

    @ADV_ESTIMATORS.register("mine")
    @per_group
    def mine(scores_G, settings): ...

Axes: `_G` surviving siblings, `_S` turns, `_N` all trajectories of the step. Statistics are float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mempo_ray.algo.memory_reward import MemorySample
from mempo_ray.config.schema import Algorithm
from mempo_ray.errors import TrainingError

EPS = 1e-6
MIN_STD = 1e-4
"""Sums of normalised parts that differ by less are equal but for EPS; dividing by that would train on noise."""


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
    num_tokens: int = 1  # output tokens of all turns
    process_S: tuple[float, ...] | None = None  # a score for each turn, beside the outcome
    parts: Mapping[str, float] = field(default_factory=dict)  # of a hybrid reward, before their weights
    part_weights: Mapping[str, float] = field(default_factory=dict)  # `reward.styles.*.weight`; 1 where not named

    @property
    def score(self) -> float:
        return self.outcome - self.penalty


Groups = Sequence[Sequence[ScoredTrajectory]]
Advantages = list[list[np.ndarray]]
"""[group][sibling] → float64 [S]."""
Estimator = Callable[[Groups, Algorithm], Advantages]


def per_group(estimate: Callable[[np.ndarray, Algorithm], np.ndarray]) -> Estimator:
    """An estimator from a function of one group's scores, float64 [G ≥ 2], not all equal → [G]."""

    def of_group(group: Sequence[ScoredTrajectory], settings: Algorithm) -> np.ndarray:
        scores_G, settled_G = _scores(group, settings)
        return estimate(scores_G, settings) if settled_G is None else settled_G

    @functools.wraps(estimate)
    def estimator(groups: Groups, settings: Algorithm) -> Advantages:
        return [_by_turn(group, of_group(group, settings)) for group in groups]

    return estimator


@per_group
def grpo(scores_G: np.ndarray, settings: Algorithm) -> np.ndarray:
    """(s − mean) / (std + 1e-6), sample deviation (ddof 1) (Shao et al. 2024, §4.1.2).

    `normalize_by_std: false` drops the division, which makes it `dr_grpo`.
    """
    centred_G = scores_G - scores_G.mean()
    return centred_G / (scores_G.std(ddof=1) + EPS) if settings.normalize_by_std else centred_G


@per_group
def dr_grpo(scores_G: np.ndarray, settings: Algorithm) -> np.ndarray:
    """s − mean (Liu et al. 2025); its loss is `aggregation: trajectory_sum_norm`."""
    return scores_G - scores_G.mean()


@per_group
def rloo(scores_G: np.ndarray, settings: Algorithm) -> np.ndarray:
    """Score minus the mean of the others (Ahmadian et al. 2024, eq. 8)."""
    num = len(scores_G)
    return (scores_G - scores_G.mean()) * (num / (num - 1))


def opo(groups: Groups, settings: Algorithm) -> Advantages:
    """s − Σ l·s / Σ l with l output tokens: the baseline of least variance, under equal gradients per token
    (Hao et al. 2025, eq. 9)."""

    def of_group(group: Sequence[ScoredTrajectory]) -> np.ndarray:
        scores_G, settled_G = _scores(group, settings)
        if settled_G is not None:
            return settled_G
        return scores_G - np.average(scores_G, weights=[trajectory.num_tokens for trajectory in group])

    return [_by_turn(group, of_group(group)) for group in groups]


def gdpo(groups: Groups, settings: Algorithm) -> Advantages:
    """Each part of a hybrid reward normalised on its own within the group, times its weight (`reward.styles.*.weight`),
    summed, then divided by their deviation over the step (Liu et al. 2026, "GDPO"): parts on different scales keep
    their say.

    The mean over the step is 0 as it is, since each group's is; taking off what rounding leaves of it would have groups
    of equal scores learn from noise.

    Raises:
        TrainingError: the scores have no parts.
    """
    names = sorted({name for group in groups for trajectory in group for name in trajectory.parts})
    if not names:
        raise TrainingError(
            "algorithm.adv_estimator=gdpo normalises the parts of a reward, and the scores have none; use "
            "reward.manager=hybrid, or another estimator"
        )

    def of_group(group: Sequence[ScoredTrajectory]) -> np.ndarray:
        sum_G = np.zeros(len(group))
        for name in names:
            part_G = np.array([trajectory.parts.get(name, 0.0) for trajectory in group], np.float64)
            if len(group) > 1 and np.ptp(part_G) > 0:
                weight = group[0].part_weights.get(name, 1.0)
                sum_G += weight * (part_G - part_G.mean()) / (part_G.std(ddof=1) + EPS)
        return sum_G

    sums = [of_group(group) for group in groups]
    all_N = np.concatenate(sums)
    if len(all_N) < 2 or all_N.std(ddof=1) < MIN_STD:
        return [_by_turn(group, np.zeros(len(group))) for group in groups]
    scale = all_N.std(ddof=1) + EPS
    return [_by_turn(group, sum_G / scale) for group, sum_G in zip(groups, sums, strict=True)]


def reinforce_plus_plus(groups: Groups, settings: Algorithm) -> Advantages:
    """Discounted return of each turn, whitened over the step, no group baseline (Hu 2025, "REINFORCE++")."""
    return _whitened_returns(groups, gamma=settings.gamma, lam=1.0)


def gae_by_turn(groups: Groups, settings: Algorithm) -> Advantages:
    """`gae` with the turn as time step and no critic (values 0): the reward of a turn is its process score, the last
    turn's the outcome on top."""
    return _whitened_returns(groups, gamma=settings.gamma, lam=settings.gae_lambda)


def gae(
    rewards_GT: np.ndarray, values_GT: np.ndarray, mask_GT: np.ndarray, *, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimation over policy tokens (Schulman et al. 2016, eq. 16), whitened over the mask.

    Tokens with mask 0 are skipped: the token before them sees the value of the next policy token.

    Args:
        rewards_GT: float64 [G, T], token-level rewards; `values_GT`, `mask_GT` the same shape.

    Returns:
        (advantages, returns), float64 [G, T], 0 where the mask is 0. Advantages have mean 0 and unbiased variance 1
        over the mask (eps 1e-8), and are 0 where all are equal; returns = raw advantage + value.
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
    if np.ptp(kept) == 0:
        return np.zeros_like(returns_GT), returns_GT
    return np.where(is_policy_GT, (advantages_GT - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8), 0.0), returns_GT


def _whitened_returns(groups: Groups, *, gamma: float, lam: float) -> Advantages:
    trajectories = [trajectory for group in groups for trajectory in group]
    shape = len(trajectories), max(trajectory.num_turns for trajectory in trajectories)
    rewards_NS, mask_NS = np.zeros(shape), np.zeros(shape)
    for n, trajectory in enumerate(trajectories):
        rewards_NS[n, : trajectory.num_turns] = trajectory.process_S or 0.0
        rewards_NS[n, trajectory.num_turns - 1] += trajectory.score
        mask_NS[n, : trajectory.num_turns] = 1
    advantages_NS, _ = gae(rewards_NS, np.zeros(shape), mask_NS, gamma=gamma, lam=lam)
    rows = iter(advantages_NS)
    return [[next(rows)[: trajectory.num_turns] for trajectory in group] for group in groups]


def _scores(group: Sequence[ScoredTrajectory], settings: Algorithm) -> tuple[np.ndarray, np.ndarray | None]:
    """Scores of a group, float64 [G], and its advantages where no estimator may get them wrong by rounding: all equal →
    exactly 0; a group of one → 0, or the score itself under `singleton: raw`. None: the estimator decides."""
    scores_G = np.array([trajectory.score for trajectory in group], np.float64)
    if len(group) == 1 and settings.singleton == "raw":
        return scores_G, scores_G
    return scores_G, np.zeros_like(scores_G) if len(group) < 2 or np.ptp(scores_G) == 0 else None


def _by_turn(group: Sequence[ScoredTrajectory], advantages_G: np.ndarray) -> list[np.ndarray]:
    return [np.full(t.num_turns, advantage) for t, advantage in zip(group, advantages_G, strict=True)]
