"""The only place that makes Ray placement groups: a `Plan` becomes a `Reservation`.

consumes: a `Plan` without shortages and a running Ray · waits for: the cluster to hold all bundles, with a
deadline, logging what is missing · on failure: the group is removed and PlacementError says what was not free
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mempo_ray.errors import PlacementError
from mempo_ray.placement.plan import ClusterShape, Node, Plan, read_cluster_shape

log = logging.getLogger(__name__)

POLL_S = 0.1  # in Ray's call, and as long again for the rest of the loop
LOG_EVERY_POLLS = 50  # 10 s


@dataclass(frozen=True, eq=False)
class Reservation:
    """Reserved bundles. Actors are made with `Actor.options(**reservation.options(role, index)).remote(...)`."""

    plan: Plan
    group: PlacementGroup

    def options(self, role: str, index: int = 0) -> dict[str, object]:
        """Ray options of one actor of a role: its CPUs, GPUs and bundle. Raises KeyError for an unknown actor."""
        bundle = self.plan.bundle_of(role, index)
        return {
            "num_cpus": self.plan.role(role).cpus,
            "num_gpus": self.plan.role(role).gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, bundle),
        }

    def release(self) -> None:
        """Give the resources back; actors that still live on them are ended by Ray."""
        remove_placement_group(self.group)


def cluster_shape(largest: str = "") -> ClusterShape:
    """The live nodes of the connected Ray cluster, or the file `largest` (`placement.cluster_shape`).

    An autoscaling cluster has nodes only once something asks for them, so there the largest shape counts.
    """
    if largest:
        return read_cluster_shape(largest)
    nodes = []
    for info in ray.nodes():
        resources = info["Resources"]
        if info["Alive"]:
            nodes.append(Node(resources.get("CPU", 0), resources.get("GPU", 0), resources.get("memory", 0) / 1e9,
                              name=info["NodeManagerAddress"]))  # fmt: skip
    return ClusterShape(tuple(nodes), f"the Ray cluster ({len(nodes)} node{'s' if len(nodes) != 1 else ''})")


async def reserve(plan: Plan, timeout_s: float) -> Reservation:
    """Make the placement group and wait until it is ready. Cancelling gives it back.

    Ray is called from this loop, never from a thread: one that is inside Ray when Ray shuts down does not return.

    Raises:
        PlacementError: the plan has shortages, or the resources did not come free within `timeout_s` seconds.
    """
    plan.require()
    group = placement_group([dict(b.resources) for b in plan.bundles], strategy="PACK")
    try:
        async with asyncio.timeout(timeout_s):
            await _ready(group, plan)
    except TimeoutError:
        missing = _missing_now(plan)
        remove_placement_group(group)
        raise PlacementError(
            f"placement.timeout_s: after {timeout_s:g} s the cluster has not freed what the run needs: {missing}. "
            "End another run, add nodes, or lower placement.num_cpus."
        ) from None
    except asyncio.CancelledError:
        remove_placement_group(group)
        raise
    return Reservation(plan, group)


async def _ready(group: PlacementGroup, plan: Plan) -> None:
    """Returns when the group is ready; says every now and then what is missing."""
    for polls in itertools.count(1):
        if group.wait(POLL_S):
            return
        if polls % LOG_EVERY_POLLS == 0:
            log.warning("waiting for the cluster: %s", _missing_now(plan))
        await asyncio.sleep(POLL_S)


def _missing_now(plan: Plan) -> str:
    free = ray.available_resources()
    wants = {"CPU": plan.cpus, "GPU": plan.gpus}
    return ", ".join(f"{unit} {free.get(unit, 0):g} free of {need:g} needed" for unit, need in wants.items() if need)
