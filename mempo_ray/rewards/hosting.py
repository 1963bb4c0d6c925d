"""Where a response is scored, and what a scorer process does: it makes the manager once, and scores by it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Literal

from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Score
from mempo_ray.errors import DataError
from mempo_ray.rewards.contract import Response
from mempo_ray.rewards.registry import MANAGERS, Manager, load_manager, scorer_for

Place = Literal["thread", "sandbox", "process", "ray"]

_manager: Manager | None = None  # of this process, if it is a scorer process


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


def host(settings: Reward, plugins: Sequence[str]) -> None:
    """Initializer of a scorer process."""
    global _manager
    import_plugins(plugins)
    _manager = load_manager(settings)


def ready() -> None:
    """Does nothing; that it returns says that the process has made its manager."""


def score_hosted(response: Response) -> Score:
    assert _manager is not None, "host() first"
    return _manager.score(response)


def score_batch_hosted(responses: Sequence[Response]) -> list[Score]:
    assert _manager is not None, "host() first"
    return _manager.score_batch(responses)  # pyrefly: ignore[missing-attribute]
