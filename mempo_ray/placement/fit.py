"""Bundles onto nodes, as Ray's two strategies would: packed close together, or spread wide. Pure.

A bundle lies on one node. Groups are placed one after the other, as they are asked for: PACK takes the node that holds
most of what is left of the group, SPREAD the node with fewest of the role's bundles; both leave GPUs to those who need
them. Only if that leaves a bundle out, all bundles are placed again, largest first, wherever they fit tightest: Ray's
strategies are preferences too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mempo_ray.placement.shape import ClusterShape, Node

Strategy = Literal["PACK", "SPREAD"]
EPSILON = 1e-9
UNKNOWN = float("inf")


@dataclass(frozen=True)
class Bundle:
    """Resources reserved together on one node, the actors (role, index) that live on them, and the labels of that node.

    `memory_gb` is what they are sure to hold in host memory; a plan counts it, Ray is not asked for it.
    """

    resources: Mapping[str, float]
    tenants: tuple[tuple[str, int], ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    memory_gb: float = 0.0

    @property
    def need(self) -> tuple[float, float, float]:
        """CPUs, GPUs, GB of host memory."""
        return self.resources.get("CPU", 0), self.resources.get("GPU", 0), self.memory_gb

    @property
    def size(self) -> tuple[float, float, float]:
        """By which bundles are ordered: GPUs first."""
        cpus, gpus, memory_gb = self.need
        return gpus, cpus, memory_gb


@dataclass(frozen=True)
class Group:
    """Bundles that Ray reserves all at once, by one strategy: a placement group. Its name is that of its role, or
    `<role>-<index>` where one replica has it to itself."""

    name: str
    strategy: Strategy
    bundles: tuple[Bundle, ...]

    @property
    def role(self) -> str:
        return self.name.partition("-")[0]


Places = tuple[tuple[int | None, ...], ...]
"""For each bundle of each group the position of its node; None where no node holds it."""


def fit(groups: Sequence[Group], shape: ClusterShape) -> Places:
    """Where each bundle would lie. No node is over-subscribed, and no bundle lies on a node without its labels."""
    places = _fit_by_strategy(groups, _Free(shape))
    if any(node is None for group in places for node in group):
        tight = _fit_tightest(groups, _Free(shape))
        if all(node is not None for group in tight for node in group):
            return tight
    return places


def _fit_by_strategy(groups: Sequence[Group], free: _Free) -> Places:
    here: defaultdict[str, Counter[int]] = defaultdict(Counter)  # Ray takes the emptiest node for a group of one bundle
    return tuple(
        _pack(group.bundles, free) if group.strategy == "PACK" else _spread(group.bundles, free, here[group.role])
        for group in groups
    )


def _pack(bundles: Sequence[Bundle], free: _Free) -> tuple[int | None, ...]:
    places: dict[int, int] = {}
    waiting = sorted(range(len(bundles)), key=lambda i: bundles[i].size, reverse=True)
    while waiting:
        offers = {node: free.taken_together([bundles[i] for i in waiting], node) for node in free.different_nodes()}
        node = max(offers, key=lambda n: (len(offers[n]), n in free.used, *free.tightness(n)), default=None)
        if node is None or not offers[node]:
            break
        chosen = [waiting[position] for position in offers[node]]
        for i in chosen:
            free.take(bundles[i], node)
            places[i] = node
        waiting = [i for i in waiting if i not in places]
    return tuple(places.get(i) for i in range(len(bundles)))


def _spread(bundles: Sequence[Bundle], free: _Free, here: Counter[int]) -> tuple[int | None, ...]:
    """`here` counts the role's bundles by node."""
    places: list[int | None] = []
    for bundle in bundles:
        nodes = [node for node in free.different_nodes(here) if free.holds(bundle, node)]
        node = min(nodes, key=lambda n: (here[n], n not in free.used, free.gpus(n), -free.cpus(n)), default=None)
        if node is not None:
            free.take(bundle, node)
            here[node] += 1
        places.append(node)
    return tuple(places)


def _fit_tightest(groups: Sequence[Group], free: _Free) -> Places:
    places: dict[tuple[int, int], int] = {}
    every = [(bundle, g, b) for g, group in enumerate(groups) for b, bundle in enumerate(group.bundles)]
    for bundle, g, b in sorted(every, key=lambda entry: entry[0].size, reverse=True):
        nodes = [node for node in free.different_nodes() if free.holds(bundle, node)]
        if nodes:
            places[g, b] = max(nodes, key=lambda n: (n in free.used, *free.tightness(n)))
            free.take(bundle, places[g, b])
    return tuple(tuple(places.get((g, b)) for b in range(len(group.bundles))) for g, group in enumerate(groups))


class _Free:
    """What is left on each node while a plan is made."""

    def __init__(self, shape: ClusterShape) -> None:
        self._nodes = shape.nodes
        self._left = [[n.cpus, n.gpus, n.memory_gb or UNKNOWN] for n in shape.nodes]
        self._max_nodes = shape.max_nodes or len(shape.nodes)
        self.used: set[int] = set()

    def cpus(self, node: int) -> float:
        return self._left[node][0]

    def gpus(self, node: int) -> float:
        return self._left[node][1]

    def tightness(self, node: int) -> tuple[float, float]:
        """Larger where less is left, GPUs first."""
        return -self._left[node][1], -self._left[node][0]

    def holds(self, bundle: Bundle, node: int) -> bool:
        if node not in self.used and len(self.used) >= self._max_nodes:
            return False
        return self._nodes[node].has(bundle.labels) and _covers(self._left[node], bundle.need)

    def taken_together(self, bundles: Sequence[Bundle], node: int) -> list[int]:
        """Positions of the bundles that this node holds, tried in order."""
        before, taken = list(self._left[node]), []
        for position, bundle in enumerate(bundles):
            if self.holds(bundle, node):
                self._subtract(bundle, node)
                taken.append(position)
        self._left[node] = before
        return taken

    def take(self, bundle: Bundle, node: int) -> None:
        self._subtract(bundle, node)
        self.used.add(node)

    def _subtract(self, bundle: Bundle, node: int) -> None:
        self._left[node] = [left - need for left, need in zip(self._left[node], bundle.need, strict=True)]

    def different_nodes(self, here: Mapping[int, int] | None = None) -> list[int]:
        """One node of each kind that is left: a thousand empty machines are one choice."""
        kinds: dict[object, int] = {}
        for position, node in enumerate(self._nodes):
            count = here.get(position, 0) if here is not None else 0
            labels = tuple(sorted(node.labels.items()))
            kinds.setdefault((*self._left[position], labels, position in self.used, count), position)
        return list(kinds.values())


def _covers(left: Sequence[float], need: Sequence[float]) -> bool:
    return all(has + EPSILON >= wants for has, wants in zip(left, need, strict=True))


def holds_alone(node: Node, bundle: Bundle) -> bool:
    """Whether a node, empty, holds a bundle, labels aside."""
    return _covers((node.cpus, node.gpus, node.memory_gb or UNKNOWN), bundle.need)
