"""The naive manager: one response, one scorer, in the calling thread."""

from __future__ import annotations

from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Score, Unscored
from mempo_ray.errors import DataError
from mempo_ray.rewards.contract import Response, Scorer, score_with
from mempo_ray.rewards.custom import load_custom_scorer
from mempo_ray.rewards.registry import SCORERS, scorer_for


class NaiveManager:
    """Scores by the custom function, else by `reward.scorer`; 'auto' = by data source."""

    def __init__(self, settings: Reward) -> None:
        """Raises ConfigError: unknown scorer, or a custom function that cannot be loaded."""
        self._settings = settings
        self._fixed: Scorer | None = None
        if settings.custom_function.path:
            self._fixed = load_custom_scorer(settings.custom_function)
        elif settings.scorer != "auto":
            self._fixed = SCORERS.get(settings.scorer).load()

    def score(self, response: Response) -> Score:
        """The score, or why there is none: kind data (the row) or scorer_error."""
        try:
            scorer = self._fixed or scorer_for(response.data_source, self._settings).load()
        except DataError as error:
            return Unscored(str(error), "data")
        return score_with(scorer, response, self._settings)
