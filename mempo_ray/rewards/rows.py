"""Can the rows of a data set be scored? Asked when they are loaded, not when the first reward is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Task
from mempo_ray.errors import DataError
from mempo_ray.rewards.golds import program_golds
from mempo_ray.rewards.managers.hybrid import part_settings, parts_for
from mempo_ray.rewards.registry import ScorerEntry, scorer_for


def row_check(settings: Reward) -> Callable[[Task], Task]:
    """For `data.tasks.read_tasks`: is there a scorer for the row, and are its gold answers of the kind that it takes?

    The check returns the task with the golds that can be matched: by every rule, where the reward has several parts. A
    custom function, a judge and a reward model take any row.

    Raises (the check):
        ConfigError: a scorer is unknown.
        DataError: the row's data source is unknown or no part's, or its answers cannot be used; says the remedy.
    """

    def check(task: Task) -> Task:
        for entry in _entries_of(task.data_source, settings):
            task = replace(task, golds=entry.golds(task.golds))
        return task

    return check


def has_programs(data_source: str, settings: Reward) -> bool:
    """Are this source's answers programs, which a scorer runs in the sandbox?"""
    return any(entry.golds is program_golds for entry in _entries_of(data_source, settings))


def _entries_of(data_source: str, settings: Reward) -> list[ScorerEntry]:
    """The registered scorers of a row: one, or one for each rule among the parts of a hybrid reward."""
    if not settings.styles:
        return [] if settings.custom_function.path else [scorer_for(data_source, settings)]
    names = parts_for(settings.styles, data_source)
    if not names:
        raise DataError(
            f"data_source {data_source!r}: no part of reward.styles scores it; add it to the data_sources of one"
        )
    rules = [name for name in names if settings.styles[name].style in ("rule", "sandbox")]
    return [entry for name in rules for entry in _entries_of(data_source, part_settings(name, settings))]
