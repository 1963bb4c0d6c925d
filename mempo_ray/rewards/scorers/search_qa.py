"""Search question answering without the format gate: the answer alone decides."""

from __future__ import annotations

from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Scored
from mempo_ray.rewards.contract import Response
from mempo_ray.rewards.scorers.text import Match, exact_match, f1, score_objectives, substring_match


def score_exact_match(response: Response, settings: Reward) -> Scored:
    """1 where the normalised answer is a normalised alias."""
    return _score(response, settings, exact_match)


def score_substring_match(response: Response, settings: Reward) -> Scored:
    """1 where a normalised alias occurs in the normalised answer."""
    return _score(response, settings, substring_match)


def score_f1(response: Response, settings: Reward) -> Scored:
    """F1 of the answer's words, best alias."""
    return _score(response, settings, f1)


def _score(response: Response, settings: Reward, match: Match) -> Scored:
    result = score_objectives(response.answer, response.golds, multi_objective=settings.multi_objective, match=match)
    return Scored(result.score, {"parts": result.parts, "num_surplus_parts": result.num_surplus})
