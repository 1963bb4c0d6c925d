"""The DAPO manager: the naive score minus a soft penalty for long trajectories (Yu et al. 2025, eq. 13)."""

from __future__ import annotations

from dataclasses import replace

from mempo_ray.contracts import Score, Unscored
from mempo_ray.rewards.contract import Response
from mempo_ray.rewards.managers.naive import NaiveManager
from mempo_ray.rewards.scorers.overlong import overlong_penalty


class DapoManager(NaiveManager):
    """extra: accuracy (the score before), overlong_reward (≤ 0) and overlong, as verl's users know them."""

    def score(self, response: Response) -> Score:
        score = super().score(response)
        if isinstance(score, Unscored):
            return score
        limits = self._settings.overlong
        penalty = overlong_penalty(
            response.num_tokens,
            max_response_tokens=limits.max_response_tokens,
            buffer_tokens=limits.buffer_tokens,
            penalty_factor=limits.penalty_factor,
        )
        told = {"accuracy": score.score, "overlong_reward": penalty, "overlong": penalty < 0}
        return replace(score, score=score.score + penalty, extra={**score.extra, **told})
