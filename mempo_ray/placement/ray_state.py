"""What the connected Ray cluster says of itself: nodes, what is free, who holds the rest, what may be added.

Ray 2.60 publishes node types, maxima and the needs of actors nowhere: the functions that read its internals for them
stand last, and whoever moves to another Ray looks here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import psutil
import ray
from ray._private import state as internals
from ray._private.state import GlobalState
from ray.core.generated.gcs_pb2 import ActorTableData  # pyrefly: ignore[missing-module-attribute]
from ray.util.placement_group import placement_group_table

from mempo_ray.placement.plan import few
from mempo_ray.placement.shape import MAX_NODES, ClusterShape, ClusterView, Node, ray_node, read_cluster_shape

NODE_ID, NODE_GROUP = "ray.io/node-id", "ray.io/node-group"
HEAD = "node:__internal_head__"
UNITS = ("CPU", "GPU")
OURS = "mempo"
"""Placement groups of runs are called `mempo:<run>:<reservation>:<group>`."""


@dataclass(frozen=True)
class Holder:
    """Somebody who holds CPUs or GPUs: a run, another placement group, or an actor outside of any."""

    name: str
    resources: Mapping[str, float]

    def __str__(self) -> str:
        amounts = [f"{self.resources[unit]:g} {unit}" for unit in UNITS if self.resources.get(unit)]
        return f"{self.name} ({', '.join(amounts)})"


def largest_shape(file: str = "") -> ClusterShape:
    """The most that the cluster can take: by the autoscaler's node types, else the file
    (`placement.cluster_shape`), else what is up. Raises ConfigError: the file is not of a known form."""
    return autoscaler_shape() or (read_cluster_shape(file) if file else live_shape())


def live_shape() -> ClusterShape:
    """The nodes that are up."""
    nodes = tuple(_node(info, info["Resources"]) for info in _alive())
    up = f"{len(nodes)} node{'s' if len(nodes) != 1 else ''} up"
    return ClusterShape(nodes, f"the Ray cluster: {up}, and no more known of (placement.cluster_shape)")


def view(file: str = "") -> ClusterView:
    """All that a plan can be held against. `file` as in `largest_shape`."""
    return ClusterView(largest_shape(file), free_shape(), held_by())


def free_shape() -> ClusterShape:
    """What nobody has reserved on the nodes that are up. Memory is left out: Ray does not give it away."""
    free = internals.available_resources_per_node()
    nodes = (_node(info, {unit: free.get(info["NodeID"], {}).get(unit, 0) for unit in UNITS}) for info in _alive())
    return ClusterShape(tuple(nodes), "what is free")


def held_by(mine: str = "") -> str:
    """Who holds CPUs and GPUs, most GPUs first; `mine` is the name of a reservation that is left out."""
    return few([str(holder) for holder in holders(mine)]) or "nobody"


def holders(mine: str = "") -> list[Holder]:
    """As `held_by`, one by one."""
    held: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for group in placement_group_table().values():
        if group["state"] in ("CREATED", "PREPARED", "RESCHEDULING") and not (mine and group["name"].startswith(mine)):
            for bundle in group["bundles"].values():
                _add(held[_group_owner(group["name"], group["placement_group_id"])], bundle)
    for name, resources in _actors_outside_groups():
        _add(held[name], resources)
    found = [Holder(name, dict(resources)) for name, resources in held.items() if any(resources.values())]
    return sorted(found, key=lambda h: [-h.resources.get(unit, 0) for unit in reversed(UNITS)])


def _add(total: dict[str, float], resources: Mapping[str, float]) -> None:
    for unit in UNITS:
        total[unit] += resources.get(unit, 0)


def _group_owner(name: str, group_id: str) -> str:
    prefix, _, rest = name.partition(":")
    return f"run {rest.partition(':')[0]}" if prefix == OURS and rest else f"placement group {name or group_id[:12]}"


def _alive() -> list[dict]:
    return [info for info in ray.nodes() if info["Alive"]]


def _node(info: Mapping, resources: Mapping[str, float]) -> Node:
    labels = {key: value for key, value in info["Labels"].items() if key != NODE_ID}
    return ray_node(resources, labels, info["NodeName"])


# -- Ray's internals -----------------------------------------------------------------------------------------


def _actors_outside_groups() -> Iterator[tuple[str, Mapping[str, float]]]:
    """Name and resources of each living actor that no placement group holds."""
    state: GlobalState = internals.state
    for raw in state._connect_and_get_accessor().get_actor_table(None, "ALIVE"):
        actor = ActorTableData.FromString(raw)
        if not actor.placement_group_id:
            yield f"actor {actor.name or actor.class_name} of {actor.ray_namespace}", actor.required_resources


def autoscaler_shape() -> ClusterShape | None:
    """The autoscaler's node types at their maxima, where they are known: published in the cluster's state (managed
    platforms), or in the file that the autoscaler on this machine was started with (a driver on the head node)."""
    config = internals.state.get_cluster_config()
    if config is not None and config.node_group_configs:
        known = {info["Labels"].get(NODE_GROUP): info["Labels"] for info in _alive()}
        nodes = [
            ray_node(group.resources, known.get(group.name, {}), f"{group.name} {number}")
            for group in config.node_group_configs
            for number in range(MAX_NODES if group.max_count < 0 else min(group.max_count, MAX_NODES))
        ]
        return ClusterShape(tuple(nodes), "the autoscaler's node types")
    file = _autoscaler_file(ray.get_runtime_context().gcs_address)
    head = next((_node(info, info["Resources"]) for info in _alive() if HEAD in info["Resources"]), None)
    return read_cluster_shape(file, head) if file else None


def _autoscaler_file(gcs_address: str) -> str:
    """What follows --autoscaling-config of the monitor that serves this cluster; '' if it does not run here."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or ()
        if f"--gcs-address={gcs_address}" in words:
            for word in words:
                if word.startswith("--autoscaling-config="):
                    return word.partition("=")[2]
    return ""
