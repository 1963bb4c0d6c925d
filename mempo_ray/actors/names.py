"""What an actor is called on the dashboard."""

from __future__ import annotations

import ray


def own_name() -> str:
    """Role and rank of the actor that this process is, e.g. `rollout-0`: the end of its Ray name. '' outside an actor.

    For `__repr__`, which Ray takes once, right after construction.
    """
    name = ray.get_runtime_context().get_actor_name() if ray.is_initialized() else None
    return (name or "").rpartition("/")[2]
