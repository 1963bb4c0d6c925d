"""Which engine gets the next turn. A decision only; the caller keeps the loads and obeys."""

from __future__ import annotations

from collections.abc import Mapping


def choose_engine(
    loads: Mapping[str, int], group: str, affinity: Mapping[str, str], slack_tokens: int = 4096
) -> str | None:
    """The engine for a turn of `group`: where the group was last, unless that is too busy; else the least loaded.

    Siblings share a prompt, so an engine that has seen one has it in its prefix cache.

    Args:
        loads: serving engines → their tokens in flight (prompt + most output). Others are simply absent.
        group: task id.
        affinity: group → the engine that had it last.
        slack_tokens: how much more than the least loaded the group's engine may carry and still be preferred.

    Returns:
        A name of `loads`, ties to the first in alphabetical order; None where there is no serving engine.

    Example:
        loads {"a": 500, "b": 0}, group last on "a": slack 1000 → "a"; slack 100 → "b".
    """
    if not loads:
        return None
    least = min(loads, key=lambda name: (loads[name], name))
    last = affinity.get(group)
    if last in loads and loads[last] - loads[least] <= slack_tokens:
        return last
    return least
