"""The naive manager: one response, one scorer, in the calling thread."""

from __future__ import annotations

from dataclasses import replace

from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Score, Unscored
from mempo_ray.errors import DataError
from mempo_ray.rewards.contract import Response, score_with
from mempo_ray.rewards.custom import load_custom_scorer
from mempo_ray.rewards.registry import SCORERS, ScorerEntry, scorer_for


class NaiveManager:
    """Scores by the custom function, else by `reward.scorer`; 'auto' = by data source."""

    isolation = "auto"

    def __init__(self, settings: Reward) -> None:
        """Raises ConfigError: unknown scorer, or a custom function that cannot be loaded."""
        self._settings = settings
        self._entries: dict[str, ScorerEntry] = {}  # by data source
        self._fixed: ScorerEntry | None = None
        if settings.custom_function.path:
            self._fixed = ScorerEntry(load_custom_scorer(settings.custom_function))
        elif settings.scorer != "auto":
            self._fixed = SCORERS.get(settings.scorer)

    def score(self, response: Response) -> Score:
        """The score, or why there is none: kind data (the row) or scorer_error."""
        try:
            entry = self._fixed or self._entry_of(response.data_source)
        except DataError as error:
            return Unscored(str(error), "data")
        if response.tool_texts and not entry.transcript:
            response = replace(response, tool_texts=())
        return score_with(entry.load(), response, self._settings)

    def _entry_of(self, data_source: str) -> ScorerEntry:
        if data_source not in self._entries:
            self._entries[data_source] = scorer_for(data_source, self._settings)
        return self._entries[data_source]
