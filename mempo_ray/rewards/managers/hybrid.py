"""The hybrid manager: a weighted sum of named parts (`reward.styles`), each reported beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from mempo_ray.config.schema import CustomFunction, Reward, Style
from mempo_ray.contracts import Score, Scored, Unscored
from mempo_ray.contracts.scoring import PART
from mempo_ray.errors import ConfigError
from mempo_ray.rewards.contract import Response
from mempo_ray.rewards.managers.naive import NaiveManager

Part = Callable[[Response], Score]


class HybridManager:
    """Asks the parts that apply to the row's data source, one after the other, in the calling thread.

    A run's worker (actors/reward.py) asks them side by side, each where it belongs, and combines them as here.
    """

    isolation = "thread"

    def __init__(self, settings: Reward, parts: Mapping[str, Part] | None = None) -> None:
        """Raises ConfigError: a part that is no rule, and is not given."""
        self._styles = settings.styles
        self._parts = parts or {name: rule_part(name, settings) for name in settings.styles}

    def score(self, response: Response) -> Score:
        names = parts_for(self._styles, response.data_source)
        return combine(self._styles, {name: self._parts[name](response) for name in names})


def parts_for(styles: Mapping[str, Style], data_source: str) -> list[str]:
    """Names of the parts that score rows of this source, in order."""
    return [
        name
        for name, style in styles.items()
        if not style.data_sources or any(fnmatchcase(data_source, pattern) for pattern in style.data_sources)
    ]


def part_settings(name: str, settings: Reward) -> Reward:
    """A rule part as a reward section of its own."""
    style = settings.styles[name]
    custom = style.scorer == "custom_function"
    return settings.model_copy(
        update={
            "manager": "naive",
            "styles": {},
            "scorer": "auto" if custom else style.scorer,
            "custom_function": settings.custom_function if custom else CustomFunction(),
        }
    )


def rule_part(name: str, settings: Reward) -> Part:
    style = settings.styles[name]
    if style.style not in ("rule", "sandbox"):
        raise ConfigError(f"reward.styles.{name}: style={style.style} needs the reward worker; it is no plain function")
    return NaiveManager(part_settings(name, settings)).score


def combine(styles: Mapping[str, Style], scores: Mapping[str, Score]) -> Score:
    """Σ weight · score, with each part's score as part/<name> and what it reported as <name>/<key>.

    One part without a score leaves the whole without one: a sum of the others would be another reward. Process scores
    are summed with the same weights over the parts that have them.

    Example: weights 0.8 and 0.2, scores 1 and 0.5: Scored(0.9, {"part/em": 1.0, "part/judge": 0.5}).
    """
    if not scores:
        return Unscored("no part of reward.styles scores this data_source", "data")
    for name, score in scores.items():
        if isinstance(score, Unscored):
            return Unscored(f"{name}: {score.reason}", score.kind)
    scored = {name: score for name, score in scores.items() if isinstance(score, Scored)}
    extra: dict[str, object] = {f"{PART}{name}": score.score for name, score in scored.items()}
    for name, score in scored.items():
        extra |= {f"{name}/{key}": value for key, value in score.extra.items()}
    steps = [
        [styles[name].weight * step for step in score.process_scores]
        for name, score in scored.items()
        if score.process_scores is not None
    ]
    total = sum(styles[name].weight * score.score for name, score in scored.items())
    return Scored(total, extra, tuple(map(sum, zip(*steps, strict=True))) if steps else None)
