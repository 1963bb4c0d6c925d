"""The batch manager: a list of responses per call of the scorer, for those that are faster together."""

from __future__ import annotations

from collections.abc import Sequence

from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Score, Unscored
from mempo_ray.errors import DataError
from mempo_ray.rewards.contract import Response, as_score, told
from mempo_ray.rewards.custom import BatchFunction, load_custom_batch_function
from mempo_ray.rewards.managers.naive import NaiveManager


class BatchManager(NaiveManager):
    """The custom function takes and returns lists (`custom.load_custom_batch_function`).

    Registered scorers take one response, and are called in a row.
    """

    def __init__(self, settings: Reward) -> None:
        super().__init__(settings.model_copy(update={"custom_function": type(settings.custom_function)()}))
        custom = settings.custom_function
        self._function: BatchFunction | None = load_custom_batch_function(custom) if custom.path else None

    def score(self, response: Response) -> Score:
        (score,) = self.score_batch([response])
        return score

    def score_batch(self, responses: Sequence[Response]) -> list[Score]:
        """A score, or why there is none, for each response, in order.

        If the function fails for all of them together, it is asked for each alone: one bad response fails nobody else.
        """
        if self._function is None:
            return [super(BatchManager, self).score(response) for response in responses]
        try:
            values = list(self._function(responses))
            if len(values) != len(responses):
                raise ValueError(f"{len(values)} scores for {len(responses)} responses")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it may raise anything; it becomes a counted value
            if len(responses) > 1:
                return [self.score(response) for response in responses]
            if isinstance(error, DataError):
                return [Unscored(str(error), "data")]
            return [Unscored(told(error), "scorer_error")]
        return [as_score(v, num_turns=len(r.turns)) for v, r in zip(values, responses, strict=True)]
