"""Search question answering without the format gate: the answer alone decides."""

from __future__ import annotations

from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Scored, Trajectory
from mempo_ray.rewards.scorers.text import Match, exact_match, f1, score_objectives, substring_match


def score_exact_match(trajectory: Trajectory, settings: Reward) -> Scored:
    """1 where the normalised answer is a normalised alias."""
    return _score(trajectory, settings, exact_match)


def score_substring_match(trajectory: Trajectory, settings: Reward) -> Scored:
    """1 where a normalised alias occurs in the normalised answer."""
    return _score(trajectory, settings, substring_match)


def score_f1(trajectory: Trajectory, settings: Reward) -> Scored:
    """F1 of the answer's words, best alias."""
    return _score(trajectory, settings, f1)


def _score(trajectory: Trajectory, settings: Reward, match: Match) -> Scored:
    result = score_objectives(
        trajectory.answer, trajectory.task.golds, multi_objective=settings.multi_objective, match=match
    )
    return Scored(result.score, {"parts": result.parts, "num_surplus_parts": result.num_surplus})
