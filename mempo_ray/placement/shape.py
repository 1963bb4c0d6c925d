"""The shape of a cluster: what is up, or the most that it can grow to, from a file in one of three forms. Pure.

nodes: [{count, cpus, …}]         own form, for a cluster that is only planned      ┐
available_node_types: {…}         Ray's cluster launcher (`ray up`)                 ├──▶ ClusterShape
kind: RayCluster | RayJob         KubeRay                                           ┘
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from mempo_ray.errors import ConfigError

GB = 1e9
MAX_NODES = 512
"""Nodes of one type that a plan looks at: an autoscaler may allow any number."""

GPU_GB = {"T4": 16, "V100": 32, "P100": 16, "L4": 24, "A10G": 24, "L40S": 48, "A100": 80, "A100-40G": 40,
          "A100-80G": 80, "H100": 80, "H200": 141, "B200": 192}  # fmt: skip
"""By Ray's name of a GPU (`ray.io/accelerator-type`); of its largest variant, so that a plan never refuses wrongly."""

GPU_LABEL = "ray.io/accelerator-type"
FORM = (
    "`nodes: [{count: 1, cpus: 96, gpus: 8, memory_gb: 1000, gpu_memory_gb: 80, labels: {}}]`, a file for `ray up`, or "
    "a RayCluster"
)


@dataclass(frozen=True)
class Node:
    """One machine as Ray's logical resources see it. Memory in GB (1e9 bytes; 0 = unknown), `gpu_…` of one GPU."""

    cpus: float
    gpus: float = 0
    memory_gb: float = 0.0
    gpu_memory_gb: float = 0.0
    name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)

    def has(self, labels: Mapping[str, str]) -> bool:
        return all(self.labels.get(key) == value for key, value in labels.items())


@dataclass(frozen=True)
class ClusterShape:
    """Nodes, and where they are known from. `max_nodes`: so many of them at once (0 = all)."""

    nodes: tuple[Node, ...]
    source: str = "this cluster"
    max_nodes: int = 0

    @property
    def cpus(self) -> float:
        return sum(n.cpus for n in self.nodes)

    @property
    def gpus(self) -> float:
        return sum(n.gpus for n in self.nodes)

    @property
    def memory_gb(self) -> float:
        return sum(n.memory_gb for n in self.nodes)

    def gpu_sizes_gb(self, labels: Mapping[str, str]) -> list[float]:
        """Memory of one GPU of each node with the labels, where it is known."""
        return [n.gpu_memory_gb for n in self.nodes if n.gpus and n.gpu_memory_gb and n.has(labels)]


@dataclass(frozen=True)
class ClusterView:
    """A running cluster: the most that it can take, what is free now, and who holds the rest, in words."""

    largest: ClusterShape
    free: ClusterShape
    held: str


def read_cluster_shape(file: str | Path, head: Node | None = None) -> ClusterShape:
    """The largest shape that a YAML file describes.

    Args:
        head: the head node, where it is up; a launcher's file need not say what it has.

    Raises:
        ConfigError: it is none of the three forms.
    """
    try:
        documents = list(yaml.safe_load_all(Path(file).read_text(encoding="utf-8")))
        shapes = [shape for raw in documents if (shape := shape_of(raw, str(file), head)) is not None]
        if not shapes:
            raise ValueError("no nodes in it")
        return shapes[0]
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"placement.cluster_shape: {file}: {_words(error)}; it takes {FORM}.") from None


def shape_of(raw: Mapping[str, Any], source: str, head: Node | None = None) -> ClusterShape | None:
    """The shape in a parsed file; None where it is about something else."""
    if "nodes" in raw:
        return ClusterShape(tuple(_own_nodes(raw["nodes"])), source)
    if "available_node_types" in raw:
        most = int(raw.get("max_workers", 2))  # Ray's default
        types = dict(raw["available_node_types"])
        head_type = types.pop(raw["head_node_type"])
        nodes = [head] if head is not None else [*_launched(raw["head_node_type"], head_type, 1)]
        for name, entry in types.items():
            nodes += _launched(name, entry, entry.get("max_workers", most))
        return ClusterShape(tuple(nodes), f"the largest cluster of {source}", max_nodes=most + 1)
    if raw.get("kind") in ("RayCluster", "RayJob"):
        spec = raw["spec"] if raw["kind"] == "RayCluster" else raw["spec"]["rayClusterSpec"]
        groups = [(spec["headGroupSpec"], "head", 1)]
        groups += [(g, g["groupName"], g.get("maxReplicas", g.get("replicas", 1))) for g in spec["workerGroupSpecs"]]
        nodes = tuple(node for group, name, count in groups for node in _pods(name, group, count))
        return ClusterShape(nodes, f"the largest cluster of {source}")
    return None


def _own_nodes(entries: list[dict[str, Any]]) -> Iterator[Node]:
    for number, entry in enumerate(entries):
        name = entry.get("name", f"type {number}" if len(entries) > 1 else "node")
        known = {key: value for key, value in entry.items() if key not in ("count", "name")}
        yield from _named(name, int(entry.get("count", 1)), known)


def _launched(name: str, entry: Mapping[str, Any], count: int) -> Iterator[Node]:
    resources = entry.get("resources", {})
    if "CPU" not in resources:
        raise ValueError(f"available_node_types.{name}: give its resources ({{CPU: …, GPU: …}})")
    yield from _named(name, count, _from_resources(resources, entry.get("labels", {})))


def _from_resources(resources: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    """What a Node knows of a node with Ray's resources (memory in bytes)."""
    types = (name.partition(":")[2] for name in resources if name.startswith("accelerator_type:"))
    gpu = labels.get(GPU_LABEL) or next(types, "")
    labels = {GPU_LABEL: gpu} | dict(labels) if gpu else dict(labels)
    return {
        "cpus": resources.get("CPU", 0),
        "gpus": resources.get("GPU", 0),
        "memory_gb": resources.get("memory", 0) / GB,
        "gpu_memory_gb": float(GPU_GB.get(gpu, 0)),
        "labels": labels,
    }


def ray_node(resources: Mapping[str, float], labels: Mapping[str, str], name: str) -> Node:
    """A node from what Ray says of it: resources by name (memory in bytes) and labels."""
    return Node(**_from_resources(resources, labels), name=name)


def _pods(name: str, group: Mapping[str, Any], count: int) -> Iterator[Node]:
    """Ray reads a pod's limits, unless rayStartParams say otherwise."""
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    started = group.get("rayStartParams") or {}
    pairs = (pair.split("=") for pair in str(started.get("labels", "")).split(",") if pair)
    resources = {
        "CPU": float(started.get("num-cpus", quantity(limits.get("cpu", 0)))),
        "GPU": float(started.get("num-gpus", quantity(limits.get("nvidia.com/gpu", 0)))),
        "memory": float(started.get("memory", quantity(limits.get("memory", 0)))),
    }
    labels = {key.strip(): value.strip() for key, value in pairs} | dict(group.get("labels") or {})
    yield from _named(name, count, _from_resources(resources, labels))


def quantity(text: str | float) -> float:
    """A Kubernetes quantity: '500m' = 0.5, '16Gi' = 16 · 2^30, '8' = 8."""
    units = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    number = str(text).rstrip("mkMGTi")
    return float(number) * units.get(str(text)[len(number) :], 1)


def _named(name: str, count: int, known: Mapping[str, Any]) -> Iterator[Node]:
    for number in islice(range(count), MAX_NODES):
        yield Node(**known, name=f"{name} {number}" if count > 1 else name)


def _words(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)
