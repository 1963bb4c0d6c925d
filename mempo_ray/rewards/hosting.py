"""Where a response is scored, and what a scorer process does: it makes the managers once, and scores by them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Literal

from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Score
from mempo_ray.errors import DataError
from mempo_ray.rewards.contract import Response
from mempo_ray.rewards.registry import MANAGERS, Manager, load_manager, scorer_for

Place = Literal["thread", "sandbox", "process", "ray"]

_managers: dict[str, Manager] = {}  # of this process, if it is a scorer process, by part of a hybrid reward ("" = none)


def place_of(settings: Reward, data_source: str) -> Place:
    """Where the manager scores a response of this source: the strictest of what anybody asks for.

    The manager's own `isolation` decides first; then `reward.isolation: process`; then a custom function, unless the
    user trusts it with a thread; then what the source's scorer is registered with.
    """
    own: Place | Literal["auto"] = getattr(MANAGERS.get(settings.manager), "isolation", "auto")
    if own != "auto":
        return own
    if settings.isolation == "process":
        return "process"
    if settings.custom_function.path:
        return "thread" if settings.isolation == "thread" else "process"
    try:
        return scorer_for(data_source, settings).isolation
    except DataError:  # the manager will say what is wrong with the row
        return "thread"


def import_plugins(plugins: Sequence[str]) -> None:
    for plugin in plugins:
        importlib.import_module(plugin)


def host(settings: Mapping[str, Reward], plugins: Sequence[str]) -> None:
    """Initializer of a scorer process: a manager for each part."""
    import_plugins(plugins)
    _managers.update({part: load_manager(own) for part, own in settings.items()})


def ready() -> None:
    """Does nothing; that it returns says that the process has made its managers."""


def score_hosted(part: str, response: Response) -> Score:
    return _managers[part].score(response)


def score_batch_hosted(part: str, responses: Sequence[Response]) -> list[Score]:
    return _managers[part].score_batch(responses)  # pyrefly: ignore[missing-attribute]
