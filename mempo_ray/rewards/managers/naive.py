"""The naive manager: one trajectory, one scorer, in the calling thread."""

from __future__ import annotations

from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Score, Trajectory, Unscored
from mempo_ray.errors import DataError
from mempo_ray.rewards.contract import as_score
from mempo_ray.rewards.custom import load_custom_scorer
from mempo_ray.rewards.registry import SCORERS, Scorer


class NaiveManager:
    """Scores by the custom function, else by `reward.scorer`; 'auto' = by data source, MemPO's where it has none."""

    def __init__(self, settings: Reward) -> None:
        """Raises ConfigError: unknown scorer, or a custom function that cannot be loaded."""
        self._settings = settings
        self._fixed: Scorer | None = None
        if settings.custom_function.path:
            self._fixed = load_custom_scorer(settings.custom_function)
        elif settings.scorer != "auto":
            self._fixed = SCORERS.get(settings.scorer)

    def score(self, trajectory: Trajectory) -> Score:
        """The score, or why there is none: kind data (the row), infrastructure (the episode), scorer_error."""
        if trajectory.end_reason.is_infrastructure:
            return Unscored(f"the episode ended as {trajectory.end_reason}: {trajectory.detail}", "infrastructure")
        try:
            return as_score(self._scorer_of(trajectory)(trajectory, self._settings))
        except DataError as error:
            return Unscored(str(error), "data")
        except Exception as error:  # noqa: BLE001 - a scorer may raise anything; here it becomes a counted value
            return Unscored(f"{type(error).__name__}: {error}", "scorer_error")

    def _scorer_of(self, trajectory: Trajectory) -> Scorer:
        if self._fixed is not None:
            return self._fixed
        source = trajectory.task.data_source
        return SCORERS.get(source if source in SCORERS.names else "mempo")
