"""Which episodes a task needs: its siblings, and those that infrastructure broke once more.

Task ──siblings──▶ EpisodeRequest ──run──▶ Trajectory ──next_attempt──▶ EpisodeRequest | None
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import replace

from mempo_ray.contracts import EndReason, EpisodeRequest, Task, Trajectory


def stable_seed(*parts: object) -> int:
    """A seed in [0, 2⁶³) that depends on the parts alone: the same in every process and on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def episode_seed(run_seed: int, task_id: str, sibling: int) -> int:
    """Seed of one sibling. It does not depend on order of completion, worker or attempt."""
    return stable_seed(run_seed, task_id, sibling)


def turn_seed(seed: int, turn: int) -> int:
    """Seed with which turn `turn` (0-based) of an episode samples."""
    return stable_seed(seed, turn)


def siblings(task: Task, group_size: int, run_seed: int, *, greedy: bool = False) -> list[EpisodeRequest]:
    """The group of a task: `group_size` requests that differ in sibling and seed."""
    return [EpisodeRequest(task, g, episode_seed(run_seed, task.task_id, g), greedy=greedy) for g in range(group_size)]


def next_attempt(request: EpisodeRequest, end_reason: EndReason, max_resamples: int) -> EpisodeRequest | None:
    """The same sibling under the same seeds again, if infrastructure broke this attempt and one is left.

    None: the episode stands; after an infrastructure end that means excluded (`EndReason.is_infrastructure`).
    """
    again = end_reason.is_infrastructure and request.attempt < max_resamples
    return replace(request, attempt=request.attempt + 1) if again else None


async def run_with_resamples(
    request: EpisodeRequest, run: Callable[[EpisodeRequest], Awaitable[Trajectory]], max_resamples: int
) -> Trajectory:
    """The trajectory that stands: the first one that infrastructure left whole, else the last broken one."""
    trajectory = await run(request)
    while again := next_attempt(request, trajectory.end_reason, max_resamples):
        request = again
        trajectory = await run(request)
    return trajectory
