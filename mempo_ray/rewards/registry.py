"""Scorers and managers by name. A built-in is listed by path, so that checking a name imports nothing."""

from __future__ import annotations

from typing import Protocol

from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Score, Trajectory
from mempo_ray.registry import Registry


class Scorer(Protocol):
    """The outcome of one trajectory: a number, a dict with 'score' and anything else to report, or a `Score`.

    Reads structured fields (`answer`, `format_report`, `turns[t].text`), never prompt or tool text as if the policy
    had written it. May raise: the manager makes an `Unscored` of it.
    """

    def __call__(self, trajectory: Trajectory, settings: Reward) -> object: ...


class Manager(Protocol):
    """A plain synchronous class, made as `Manager(settings)`; called from several threads at once."""

    def score(self, trajectory: Trajectory) -> Score:
        """Never raises for what a scorer does; that is an `Unscored`."""
        ...


class ManagerFactory(Protocol):
    def __call__(self, settings: Reward) -> Manager: ...


SCORERS: Registry[Scorer] = Registry("reward.scorer")
"""By scorer name or by `data_source`: `reward.scorer: auto` looks up the row's data source here first."""

SCORERS.register_path("mempo", "mempo_ray.rewards.scorers.mempo:score_mempo")
SCORERS.register_path("exact_match", "mempo_ray.rewards.scorers.search_qa:score_exact_match")
SCORERS.register_path("substring_match", "mempo_ray.rewards.scorers.search_qa:score_substring_match")
SCORERS.register_path("f1", "mempo_ray.rewards.scorers.search_qa:score_f1")

MANAGERS: Registry[ManagerFactory] = Registry("reward.manager")
MANAGERS.register_path("naive", "mempo_ray.rewards.managers.naive:NaiveManager")


def load_manager(settings: Reward) -> Manager:
    """The configured manager, ready to score.

    Raises:
        ConfigError: unknown manager or scorer, or a custom function that cannot be loaded. The preflight calls this
            before anything starts.
    """
    return MANAGERS.get(settings.manager)(settings)
