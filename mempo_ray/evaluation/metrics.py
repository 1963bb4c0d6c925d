"""EM, F1, total and peak tokens, and a paired interval.

TT and PT follow MemPO §4: TT = tokens that the model processed for a task over all turns (prompt + output),
PT = the largest prompt + output of a single turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mempo_ray.contracts import Trajectory, TrajectorySummary
from mempo_ray.rewards.scorers.text import exact_match, f1, score_objectives


@dataclass(frozen=True)
class Evaluated:
    """One held-out question: its scores and its costs. Excluded episodes are not among them but counted."""

    task_id: str
    em: float
    f1: float
    format_valid: bool
    total_tokens: int
    peak_tokens: int


def evaluated(trajectory: Trajectory) -> Evaluated:
    """EM and F1 of the answer alone, whatever the format verdict and the configured scorer say."""
    golds = trajectory.task.golds
    em, f1_ = (score_objectives(trajectory.answer, golds, multi_objective="mean", match=m) for m in (exact_match, f1))
    total, peak = token_costs(trajectory.summary())
    return Evaluated(trajectory.task.task_id, em.score, f1_.score, trajectory.format_valid, total, peak)


def token_costs(summary: TrajectorySummary) -> tuple[int, int]:
    """(total, peak) tokens of an episode.

    Example: turns of 10+5 and 20+7 tokens cost 42 in total, 27 at the peak.
    """
    turns = [p + o for p, o in zip(summary.prompt_tokens_S, summary.output_tokens_S, strict=True)]
    return sum(turns), max(turns, default=0)


def aggregate(results: Sequence[Evaluated]) -> dict[str, float]:
    """Means over the evaluated questions (the denominator is `eval/num_questions`)."""
    if not results:
        return {"eval/num_questions": 0.0}
    return {
        "eval/em": float(np.mean([r.em for r in results])),
        "eval/f1": float(np.mean([r.f1 for r in results])),
        "eval/format_valid_share": float(np.mean([r.format_valid for r in results])),
        "eval/total_tokens_mean": float(np.mean([r.total_tokens for r in results])),
        "eval/peak_tokens_mean": float(np.mean([r.peak_tokens for r in results])),
        "eval/num_questions": float(len(results)),
    }


def paired_interval(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """Mean of after − before over the same questions, with its normal 95 % interval (mean, low, high).

    Example:
        >>> paired_interval([0, 0, 1, 0], [1, 1, 1, 1])[0]
        0.75
    """
    difference = np.asarray(after, float) - np.asarray(before, float)
    mean = float(difference.mean())
    half = 1.96 * float(difference.std(ddof=1)) / np.sqrt(len(difference)) if len(difference) > 1 else 0.0
    return mean, mean - half, mean + half
