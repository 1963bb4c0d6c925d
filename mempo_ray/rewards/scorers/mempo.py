"""MemPO's outcome reward R^T (arXiv 2603.00680; algorithm.md §2): right format first, then exact match."""

from __future__ import annotations

from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Scored
from mempo_ray.rewards.contract import Response
from mempo_ray.rewards.scorers.text import score_objectives


def score_mempo(response: Response, settings: Reward) -> Scored:
    """0 where a format check failed (exact match is then not evaluated), else exact match of the answer.

    extra: format_valid; `format/<check>` for every check; and, where the format is right, exact_match (per
    objective) and num_surplus_parts.
    """
    checks = {f"format/{name}": passed for name, passed in response.format_report.items()}
    if not response.format_valid:
        return Scored(0.0, {"format_valid": False, **checks})
    result = score_objectives(response.answer, response.golds, multi_objective=settings.multi_objective)
    return Scored(
        result.score,
        {"format_valid": True, **checks, "exact_match": result.parts, "num_surplus_parts": result.num_surplus},
    )
