"""A `ports.Rewards` over a dictionary."""

from __future__ import annotations

from mempo_ray.contracts import PayloadRef, Score, Scored, Unscored


class FakeRewards:
    """`scores` by payload key, `q_0` for `q/0`. `asked` keeps the keys of all calls."""

    def __init__(self, **scores: Score | float) -> None:
        self._scores = {key.replace("_", "/"): s if isinstance(s, Unscored) else Scored(s) for key, s in scores.items()}
        self.asked: list[str] = []

    async def score(self, payload: PayloadRef) -> Score:
        self.asked.append(payload.key)
        return self._scores[payload.key]
