"""The only place that makes Ray placement groups: a `Plan` becomes a `Reservation`.

consumes: a `Plan` without shortages and a running Ray · waits for: all of its groups, with a deadline, saying what is
missing, what was asked for and who holds it · on failure: the groups are removed and PlacementError says the same words

A run has several groups, and Ray reserves each of them at once but not all together. So that two runs do not wait for
each other for ever, each with half of its groups, the one whose name comes later gives its groups back for a while.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import uuid4

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mempo_ray.errors import PlacementError
from mempo_ray.placement.fit import Bundle, Group
from mempo_ray.placement.plan import STRATEGIES, Plan, describe, few, own_group, who
from mempo_ray.placement.ray_state import OURS, free_shape, held_by

log = logging.getLogger(__name__)

POLL_S = 0.2
FIRST_WORDS_S, WORDS_EVERY_S = 3.0, 10.0
"""When a wait is first explained, and how often from then on."""
GRACE_S, GIVE_WAY_S = 3.0, 20.0
"""How long groups may wait for each other while another run waits too, and how long they are then given back."""


@dataclass(frozen=True, eq=False)
class Reservation:
    """Reserved bundles. Actors are made with `Actor.options(**reservation.options(role, index)).remote(...)`."""

    plan: Plan
    groups: dict[str, PlacementGroup]

    def options(self, role: str, index: int = 0) -> dict[str, object]:
        """Ray options of one actor of a role: its CPUs, GPUs, and its bundle.

        A replica of an elastic role that the plan does not hold, or whose group was given back, gets the same without
        a bundle: Ray, or its autoscaler, finds a node for it, away from the others where the role is spread. Raises
        KeyError for a role that is not in the plan.
        """
        planned = self.plan.role(role)
        options: dict[str, object] = {"num_cpus": planned.cpus, "num_gpus": planned.gpus}
        if index >= planned.count or (home := self._home(role, index))[0].name not in self.groups:
            spread = {"scheduling_strategy": "SPREAD"} if STRATEGIES[role] == "SPREAD" else {}
            return options | spread | ({"label_selector": dict(planned.labels)} if planned.labels else {})
        group, bundle = home
        return options | {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.groups[group.name], bundle)}

    def give_back(self, role: str, index: int) -> bool:
        """Free a replica's node for others, where it has a group of its own. Whether it had."""
        group = self.groups.pop(own_group(role, index), None)
        if group is not None:
            remove_placement_group(group)
        return group is not None

    def release(self) -> None:
        """Give all resources back; actors that still live on them are ended by Ray."""
        _remove(self.groups)

    def _home(self, role: str, index: int) -> tuple[Group, int]:
        group, bundle = self.plan.find(role, index)
        return self.plan.groups[group], bundle


async def reserve(plan: Plan, timeout_s: float) -> Reservation:
    """Make the placement groups and wait until all are there. Cancelling gives them back.

    Ray is called from this loop, never from a thread: one that is inside Ray when Ray shuts down does not return.

    Raises:
        PlacementError: the plan has shortages, or the resources did not come free within `timeout_s` seconds.
    """
    waiting = _Waiting(plan.require(), timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            await waiting.until_ready()
    except BaseException as error:
        words = waiting.words() if isinstance(error, TimeoutError) else ""
        _remove(waiting.groups)
        if not words:
            raise
        raise PlacementError(
            f"placement.timeout_s: after {timeout_s:g} s the cluster has not given what the run needs: {words}. "
            "End another run, add nodes, or ask for less (placement.num_cpus, policy.ranks, rollout.replicas)."
        ) from None
    return Reservation(plan, waiting.groups)


class _Waiting:
    """The groups of one reservation, from the asking to the last one's arrival."""

    def __init__(self, plan: Plan, timeout_s: float) -> None:
        self._plan, self._timeout_s = plan, timeout_s
        self._name = f"{OURS}:{ray.get_runtime_context().namespace}:{uuid4().hex[:8]}"
        self.groups: dict[str, PlacementGroup] = {}

    async def until_ready(self) -> None:
        began = asked = time.monotonic()
        next_words, next_ask = FIRST_WORDS_S, began
        while True:
            now = time.monotonic()
            if not self.groups:
                if now >= next_ask or not self._others_first():
                    self._ask()
                    asked = now
            elif not self._missing():
                return
            elif now - asked >= GRACE_S and self._others_first():
                _remove(self.groups)
                next_ask = now + GIVE_WAY_S
            if now - began >= next_words:
                log.warning("waiting for the cluster (%.0f of %g s): %s", now - began, self._timeout_s, self.words())
                next_words += WORDS_EVERY_S
            await asyncio.sleep(POLL_S)

    def words(self) -> str:
        """What is missing, what was asked for, what is free, and who holds the rest."""
        missing = self._missing()
        bundles = [bundle for group in missing for bundle in group.bundles]
        free = [f"{node.name} {node.cpus:g} CPU, {node.gpus:g} GPU" for node in free_shape().nodes]
        return (
            f"{few([who(bundle) for bundle in bundles])} {'have' if len(bundles) > 1 else 'has'} no place; asked for "
            f"{_asked(bundles)}; free now: {few(free, '; ') or 'no node'}; held by {held_by(self._name)}"
        )

    def _ask(self) -> None:
        for group in self._plan.groups:
            labels = [dict(bundle.labels) for bundle in group.bundles]
            self.groups[group.name] = placement_group(
                [dict(bundle.resources) for bundle in group.bundles],
                strategy=group.strategy,
                name=f"{self._name}:{group.name}",
                bundle_label_selector=labels if any(labels) else None,
            )

    def _missing(self) -> list[Group]:
        states = {name: group["state"] for name, group in placement_group_table().items()}
        ready = {name for name, group in self.groups.items() if states.get(group.id.hex()) == "CREATED"}
        return [group for group in self._plan.groups if group.name not in ready]

    def _others_first(self) -> bool:
        """Whether a reservation that comes before this one has groups that wait."""
        pending = {
            group["name"].rpartition(":")[0]
            for group in placement_group_table().values()
            if group["state"] == "PENDING" and group["name"].startswith(f"{OURS}:")
        }
        return min(pending, default=self._name) < self._name


def _remove(groups: dict[str, PlacementGroup]) -> None:
    while groups:
        remove_placement_group(groups.popitem()[1])


def _asked(bundles: Sequence[Bundle]) -> str:
    """Example: `2 × (1 GPU, 0.3 CPU)`, a kind at a time."""
    kinds = Counter(describe(bundle, with_memory=False) for bundle in bundles)
    return few([f"{times} × ({kind})" for kind, times in kinds.items()])
