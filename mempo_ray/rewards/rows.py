"""Can the rows of a data set be scored? Asked when they are loaded, not when the first reward is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Task
from mempo_ray.rewards.golds import program_golds
from mempo_ray.rewards.registry import scorer_for


def row_check(settings: Reward) -> Callable[[Task], Task]:
    """For `data.tasks.read_tasks`: is there a scorer for the row, and are its gold answers of the kind that it takes?

    The check returns the task with the golds that can be matched. A custom function takes any row.

    Raises (the check):
        ConfigError: `reward.scorer` is unknown.
        DataError: the row's data source is unknown, or its answers cannot be used; says why and the remedy.
    """

    def check(task: Task) -> Task:
        if settings.custom_function.path:
            return task
        return replace(task, golds=scorer_for(task.data_source, settings).golds(task.golds))

    return check


def has_programs(data_source: str, settings: Reward) -> bool:
    """Are this source's answers programs, which a scorer runs in the sandbox?"""
    return not settings.custom_function.path and scorer_for(data_source, settings).golds is program_golds
