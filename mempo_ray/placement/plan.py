"""Placement as a value: configuration + cluster shape → bundles, or what is short, in words. Pure.

    Config ──┐
             ├──▶ make_plan ──▶ Plan ──▶ table() (a person)   reserve() (Ray, placement/reserve.py)
    Shape ───┘                   └─────▶ shortages, notes

One bundle holds one actor; in the colocated layout a rank and an engine share a bundle and its GPU. A bundle lies on
one node, so a tensor-parallel engine is never split. The bundles of a role make a group with a strategy: ranks are
packed on few nodes, all others are spread over many. A replica that may leave again is a group of its own, which goes
with it. The whole run asks for at most `placement.num_cpus` logical CPUs, shared out as fractions: actors that wait
most of the time need no core each, and two runs fit on two CPUs. The driver itself asks for none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from mempo_ray.config.models import ModelShape
from mempo_ray.config.schema import Config
from mempo_ray.errors import PlacementError
from mempo_ray.placement.fit import Bundle, Group, Places, Strategy, fit, holds_alone
from mempo_ray.placement.memory import SLEEPING_GB, Estimate, estimate
from mempo_ray.placement.shape import ClusterShape, ClusterView, Node

CPU_WEIGHTS = {
    "policy": 4,
    "batch_executor": 1,
    "rollout": 4,
    "retrieval": 2,
    "reward": 1,
    "reward_model": 4,
    "agent_loop": 1,
}
"""How the run's CPUs are shared out: an actor of a role with weight 4 gets twice that of one with weight 2. Roles are
reserved in this order."""

STRATEGIES: Mapping[str, Strategy] = {
    "policy": "PACK",  # ranks exchange gradients: few nodes
    "rollout": "SPREAD",  # one by one, so Ray takes the emptiest node for each; on a rank's GPU with the rank
    "retrieval": "SPREAD",
    "reward": "SPREAD",
    "reward_model": "SPREAD",
    "agent_loop": "SPREAD",
}

TRAINING_ROLES = ("policy", "batch_executor")
"""Roles that a run without training leaves out."""

ELASTIC = "those that join ask for the same, beyond this plan"

SECTIONS = {"batch_executor": "policy", "agent_loop": "agent", "reward_model": "reward"}
"""Where `placement.labels` names a role by another word."""


@dataclass(frozen=True)
class Role:
    """`count` equal actors: logical CPUs and GPUs of each, labels of their nodes, and what lies in their memory."""

    name: str
    count: int
    cpus: float
    gpus: float = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    memory: Estimate = field(default_factory=Estimate)


@dataclass(frozen=True)
class Plan:
    """What a run asks of a cluster. `shortages` is empty when the shape holds it; `places` says where."""

    layout: str
    shape: ClusterShape
    roles: tuple[Role, ...]
    groups: tuple[Group, ...]
    object_store_gb: float
    places: Places = ()
    shortages: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        return tuple(bundle for group in self.groups for bundle in group.bundles)

    @property
    def cpus(self) -> float:
        return round(sum(b.resources.get("CPU", 0) for b in self.bundles), 4)

    @property
    def gpus(self) -> float:
        return round(sum(b.resources.get("GPU", 0) for b in self.bundles), 4)

    @property
    def host_gb(self) -> float:
        return sum(r.count * sum(r.memory.host.values()) for r in self.roles) + self.object_store_gb

    def role(self, name: str) -> Role:
        """Raises KeyError for a role that is not in the plan."""
        return {role.name: role for role in self.roles}[name]

    def find(self, role: str, index: int) -> tuple[int, int]:
        """Positions of an actor's group, and of its bundle in it. Raises KeyError for an actor that is not planned."""
        for g, group in enumerate(self.groups):
            for b, bundle in enumerate(group.bundles):
                if (role, index) in bundle.tenants:
                    return g, b
        raise KeyError(f"the plan has no {role}[{index}]")

    def node_of(self, role: str, index: int) -> Node | None:
        """Where the plan expects an actor; None where nothing holds it. Ray decides (strategies are preferences)."""
        group, bundle = self.find(role, index)
        node = self.places[group][bundle]
        return None if node is None else self.shape.nodes[node]

    def require(self) -> Plan:
        """The plan itself, or PlacementError with every shortage."""
        if self.shortages:
            raise PlacementError("\n".join(self.shortages) + f" (Checked against {self.shape.source}.)")
        return self

    def busy(self, view: ClusterView) -> str:
        """Which bundles would have to wait, and for whom; '' where all are free."""
        places = [node for group in fit(self.groups, view.free) for node in group]
        waiting = [who(bundle) for bundle, node in zip(self.bundles, places, strict=True) if node is None]
        return f"{few(waiting)} would have to wait; held by {view.held}" if waiting else ""

    def table(self) -> str:
        """The plan for a person: where each role goes, what lies in memory, totals, notes and shortages."""
        where: list[tuple[str, ...]] = [("role", "actors", "CPU each", "GPU each", "strategy", "bundles", "nodes")]
        memory: list[tuple[str, ...]] = [("GB each (estimate)", "RAM", "GPU", "of which")]
        number = {position: n for n, position in enumerate(self._positions())}
        for r in self.roles:
            at = [self.find(r.name, i) for i in range(r.count)]
            nodes = Counter(node.name if (node := self.node_of(r.name, i)) else "NOWHERE" for i in range(r.count))
            names = [f"{name} ×{times}" if times > 1 else name for name, times in nodes.items()]
            where.append((r.name, str(r.count), f"{r.cpus:g}", f"{r.gpus:g}", self.groups[at[0][0]].strategy,
                          _ranges([number[position] for position in at]), few(names)))  # fmt: skip
            terms = [*r.memory.host.items(), *((f"GPU {what}", gb) for what, gb in r.memory.gpu.items())]
            gpu_gb = f"{sum(r.memory.gpu.values()):.1f}" if r.memory.gpu else "-"
            memory.append((r.name, f"{sum(r.memory.host.values()):.2f}", gpu_gb,
                           ", ".join(f"{what} {gb:.2f}" for what, gb in terms if gb >= 0.005)))  # fmt: skip
        lines = [f"Plan: layout {self.layout} on {self.shape.source}", "", *_columns(where), "", *_columns(memory), ""]
        lines += [
            f"  asks for {self.cpus:g} CPUs and {self.gpus:g} GPUs; the cluster has {self.shape.cpus:g} and "
            f"{self.shape.gpus:g}",
            f"  about {self.host_gb:.1f} GB of host memory, {self.object_store_gb:g} GB of it object store (estimates)",
        ]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  SHORT: {shortage}" for shortage in self.shortages]
        return "\n".join(lines)

    def _positions(self) -> Iterator[tuple[int, int]]:
        return ((g, b) for g, group in enumerate(self.groups) for b in range(len(group.bundles)))


def make_plan(
    config: Config, shape: ClusterShape, model: ModelShape | None = None, *, with_policy: bool = True
) -> Plan:
    """Groups of bundles for every actor of a run, where they would lie, and what the shape lacks.

    Args:
        model: the policy's shape for the memory estimates; None leaves weights out and says so.
        with_policy: False for a run that only generates (`mempo-ray eval`, `ask`).
    """
    counts = _counts(config)
    names = [name for name in CPU_WEIGHTS if counts[name] and (with_policy or name not in TRAINING_ROLES)]
    cpus = _share_cpus({name: counts[name] for name in names}, config.placement.num_cpus)
    gpus = _gpus_each(config)
    roles = []
    for name in names:
        labels = _labels_of(config, name)
        roles.append(Role(name, counts[name], cpus[name], gpus[name], labels, estimate(name, config, model, 0)))
    groups = _groups(roles, config)
    store_gb = config.placement.object_store_gb
    plan = Plan(config.placement.layout, shape, tuple(roles), groups, store_gb, fit(groups, shape))
    estimates = {role.name: estimate(role.name, config, model, _gpu_gb(plan, role)) for role in roles}
    plan = replace(plan, roles=tuple(replace(role, memory=estimates[role.name]) for role in roles))
    shortages = (*_contradictions(config), *_missing(plan, config))
    return replace(plan, shortages=shortages, notes=_notes(config, plan, model))


def folder_roles(config: Config) -> tuple[str, ...]:
    """Roles that use the run's folder: published weights, checkpoints, logs, the index, searches that are recorded."""
    records = config.retrieval.mode == "record" and not config.retrieval.record
    return ("policy", "rollout", "retrieval", *(["agent_loop"] if records else []))


# -- what each role asks for --------------------------------------------------------------------------------


def _counts(config: Config) -> dict[str, int]:
    return {
        "policy": config.policy.ranks,
        "batch_executor": 1,
        "rollout": config.rollout.replicas,
        "retrieval": config.retrieval.replicas if config.retrieval.needs_index else 0,
        "reward": config.reward.workers,
        "reward_model": len(config.reward.models),
        "agent_loop": config.agent.workers,
    }


def _share_cpus(counts: Mapping[str, int], num_cpus: float) -> dict[str, float]:
    """Logical CPUs of one actor of each role; rounded down to Ray's unit, so the sum stays within `num_cpus`."""
    unit = num_cpus / sum(CPU_WEIGHTS[name] * count for name, count in counts.items())
    return {name: math.floor(1e4 * unit * CPU_WEIGHTS[name] + 1e-6) / 1e4 for name in counts}


def _gpus_each(config: Config) -> dict[str, float]:
    layout = config.placement.layout
    shared = 0.5 if layout == "colocated" else 1
    return {
        "policy": 0 if layout == "cpu" else shared,
        "rollout": 0 if layout == "cpu" else shared * config.rollout.tensor_parallel,
        "retrieval": 1 if config.retrieval.device == "cuda" else 0,
        "reward": 0,
        "reward_model": 1 if any(model.device == "cuda" for model in config.reward.models.values()) else 0,
        "agent_loop": 0,
        "batch_executor": 0,
    }


def _labels_of(config: Config, role: str) -> Mapping[str, str]:
    section = SECTIONS.get(role, role)
    return next((labels for name, labels in config.placement.labels.items() if name == section), {})


def _groups(roles: Sequence[Role], config: Config) -> tuple[Group, ...]:
    """A group a role, in the order of roles. The executor goes with the ranks; a colocated engine into a rank's bundle.

    Example: 2 ranks, 2 engines, 1 worker, disaggregated: groups `policy` (2 ranks, executor), `rollout-0`, `rollout-1`,
    `agent_loop`.
    """
    colocated = config.placement.layout == "colocated"
    groups: dict[str, dict[tuple[str, int], list[tuple[Role, int]]]] = {}
    for role in roles:
        for index in range(role.count):
            # engines beyond the ranks keep a bundle of their own (and are refused)
            joins = colocated and role.name == "rollout" and index < roles[0].count and roles[0].name == "policy"
            home = "policy" if joins or role.name == "batch_executor" else role.name
            name = own_group(home, index) if not joins and may_leave(config, role.name) else home
            bundle = ("policy", index) if joins else (role.name, index)
            groups.setdefault(name, {}).setdefault(bundle, []).append((role, index))
    return tuple(
        Group(name, STRATEGIES[name.partition("-")[0]], tuple(_bundle(tenants) for tenants in bundles.values()))
        for name, bundles in groups.items()
    )


def own_group(role: str, index: int) -> str:
    """Name of the group of a replica that may leave."""
    return f"{role}-{index}"


def may_leave(config: Config, role: str) -> bool:
    """Whether replicas of a role come and go while the run goes on: what one had must become free for others then.

    Engines leave a node that is about to go even where the pool is fixed, and another comes in the place of each.
    """
    pools = {"rollout": config.placement.layout != "colocated", "retrieval": config.retrieval.is_elastic}
    return pools.get(role, False)


def _bundle(tenants: Sequence[tuple[Role, int]]) -> Bundle:
    roles = [role for role, _ in tenants]
    cpus, gpus = sum(r.cpus for r in roles), sum(r.gpus for r in roles)
    resources = {"CPU": round(cpus, 4)}
    if gpus:
        resources["GPU"] = float(math.ceil(gpus))  # a rank alone in the colocated layout still needs a whole GPU
    labels = {key: value for role in roles for key, value in role.labels.items()}
    memory_gb = sum(role.memory.sure_host_gb for role in roles)
    return Bundle(resources, tuple((role.name, index) for role, index in tenants), labels, memory_gb)


# -- what is short ------------------------------------------------------------------------------------------


def _contradictions(config: Config) -> list[str]:
    """Keys that exclude each other in a layout, whatever the cluster."""
    layout, found = config.placement.layout, []
    if layout == "cpu" and config.policy.device == "cuda":
        found.append("policy.device=cuda needs placement.layout=colocated or disaggregated; the layout is cpu.")
    if layout != "cpu" and config.policy.device == "cpu":
        found.append(f"placement.layout={layout} needs policy.device=cuda; it is cpu.")
    transport = config.weight_sync.transport
    if (transport == "ipc") != (layout == "colocated") and transport != "auto":
        found.append(f"weight_sync.transport={transport} does not fit placement.layout={layout}: colocated engines "
                     "take CUDA IPC, all others nccl or pull; set weight_sync.transport=auto.")  # fmt: skip
    if transport == "nccl" and layout == "cpu":
        found.append("weight_sync.transport=nccl needs GPUs (placement.layout=disaggregated); set it to auto.")
    if layout != "colocated":
        return found
    if config.rollout.tensor_parallel > 1:
        found.append("placement.layout=colocated shares one GPU between a rank and an engine: set "
                     "rollout.tensor_parallel=1, or layout=disaggregated.")  # fmt: skip
    if config.rollout.replicas > config.policy.ranks:
        found.append(f"placement.layout=colocated: rollout.replicas={config.rollout.replicas} is more than "
                     f"policy.ranks={config.policy.ranks}; each engine shares a rank's GPU.")  # fmt: skip
    ranks, engines = (config.placement.labels.get(role, {}) for role in ("policy", "rollout"))
    for label in sorted(ranks.keys() & engines.keys()):
        if ranks[label] != engines[label]:
            found.append(f"placement.labels: colocated ranks and engines share nodes, but policy wants {label}="
                         f"{ranks[label]} and rollout {label}={engines[label]}; make them equal.")  # fmt: skip
    return found


def _missing(plan: Plan, config: Config) -> list[str]:
    """Sentences for what the shape lacks: of the whole cluster first, then of a node, then bundle by bundle."""
    shape, short = plan.shape, []
    if plan.gpus > shape.gpus:
        wants = _wants(plan, "gpus", "GPU")
        short.append(f"{wants}; the cluster has {_amount(shape.gpus, 'GPU')}. Lower policy.ranks or rollout.replicas, "
                     "or set placement.layout=cpu and policy.device=cpu.")  # fmt: skip
    if plan.cpus > shape.cpus:
        wants = _wants(plan, "cpus", "CPU")
        short.append(f"{wants}; the cluster has {_amount(shape.cpus, 'CPU')}. Lower placement.num_cpus "
                     f"(now {config.placement.num_cpus:g}).")  # fmt: skip
    limit = config.placement.num_gpus
    if limit and plan.gpus > limit:
        short.append(f"{_wants(plan, 'gpus', 'GPU')}; placement.num_gpus allows {limit}. Raise it, or lower "
                     "policy.ranks or rollout.replicas.")  # fmt: skip
    short += _gpu_memory_short(plan, config)
    return short or [*_too_large(plan, config)] or _unplaced(plan)


def _wants(plan: Plan, attribute: str, unit: str) -> str:
    parts = []
    for role in plan.roles:
        each = getattr(role, attribute)
        if each:
            times = f" ({role.count} × {each:g})" if role.count > 1 else ""
            parts.append(f"{role.name} needs {_amount(each * role.count, unit)}{times}")
    return ", ".join(parts)


def _amount(number: float, unit: str) -> str:
    return f"{number:g} {unit}{'' if number == 1 else 's'}"


def _too_large(plan: Plan, config: Config) -> Iterator[str]:
    """Bundles that no single node holds, however empty; of equal ones the first."""
    seen: set[object] = set()
    for bundle in plan.bundles:
        kind = (bundle.need, tuple(bundle.labels.items()), bundle.tenants[0][0])
        if kind in seen:
            continue
        seen.add(kind)
        labelled = [node for node in plan.shape.nodes if node.has(bundle.labels)]
        if not labelled:
            role = next(iter(bundle.tenants))[0]
            yield (f"{who(bundle)} needs a node labelled {_labels(bundle.labels)} (placement.labels."
                   f"{SECTIONS.get(role, role)}), which no node has; {_labels_there(plan.shape)}.")  # fmt: skip
        elif not any(holds_alone(node, bundle) for node in labelled):
            yield _no_node_holds(bundle, labelled, config)


def _no_node_holds(bundle: Bundle, nodes: Sequence[Node], config: Config) -> str:
    cpus, gpus, memory_gb = bundle.need
    among = f" with {_labels(bundle.labels)}" if bundle.labels else ""
    most = max(node.gpus for node in nodes)
    if gpus > most:
        wide = f" (rollout.tensor_parallel={gpus:g})" if bundle.tenants[0][0] == "rollout" else ""
        return (f"{who(bundle)} needs {_amount(gpus, 'GPU')} on one node{wide}; the largest node{among} has "
                f"{_amount(most, 'GPU')}. Lower rollout.tensor_parallel, or add larger nodes.")  # fmt: skip
    if memory_gb > max(node.memory_gb or math.inf for node in nodes):
        return (f"{who(bundle)} holds about {memory_gb:.1f} GB in memory; the largest node{among} has "
                f"{max(node.memory_gb for node in nodes):.1f} GB. {_memory_remedy(bundle)}")  # fmt: skip
    most = max(node.cpus for node in nodes)
    if cpus > most:
        return (f"{who(bundle)} needs {_amount(cpus, 'CPU')} on one node; the largest node{among} has "
                f"{_amount(most, 'CPU')}. Lower placement.num_cpus (now {config.placement.num_cpus:g}).")  # fmt: skip
    return f"{who(bundle)} needs {describe(bundle)} on one node{among}; no node has all of it. Add larger nodes."


def _memory_remedy(bundle: Bundle) -> str:
    remedies = {
        "policy": "Raise policy.ranks over more nodes, or take a smaller policy.model.",
        "rollout": "Lower rollout.kv_cache_gb, or set rollout.dtype=bfloat16.",
        "retrieval": "Take a smaller index (retrieval.kind=ivfpq), or larger nodes.",
    }
    return remedies.get(bundle.tenants[0][0], "Add larger nodes.")


def _gpu_memory_short(plan: Plan, config: Config) -> Iterator[str]:
    for role in plan.roles:
        has = max(plan.shape.gpu_sizes_gb(role.labels), default=math.inf) * max(1, role.gpus)
        if role.name == "rollout":
            needs, has = role.memory.gpu.get("weights", 0.0), has * config.rollout.gpu_memory_utilization
            remedy = "Raise rollout.tensor_parallel or rollout.gpu_memory_utilization."
        else:
            needs = role.memory.sure_gpu_gb
            is_policy = role.name == "policy"
            remedy = "Raise policy.ranks, or set policy.cpu_offload=true." if is_policy else "Use device=cpu."
        if needs > has:
            yield f"{role.name}: about {needs:.1f} GB in GPU memory, where {has:.1f} GB are to be had. {remedy}"
    if (shared := _sharers(plan)) is not None:
        rank, engine = shared
        gpu_gb = max(plan.shape.gpu_sizes_gb({**rank.labels, **engine.labels}), default=math.inf)
        rests, share = rank.memory.resting_gpu_gb, config.rollout.gpu_memory_utilization
        most = max(0, math.floor(100 * (1 - rests / gpu_gb)) / 100)
        if share > most:
            lower = f"Lower it to {most:g}" if most * gpu_gb > engine.memory.gpu["weights"] else "Raise policy.ranks"
            yield (f"policy and rollout on one GPU: of its {gpu_gb:.1f} GB a rank keeps about {rests:.1f} GB while "
                   f"rollout.gpu_memory_utilization={share:g} takes {share * gpu_gb:.1f} GB. {lower}, or set "
                   "policy.cpu_offload=true.")  # fmt: skip


def _sharers(plan: Plan) -> tuple[Role, Role] | None:
    """The rank and the engine that share a GPU, where the model is known."""
    roles = {role.name: role for role in plan.roles if role.memory.gpu.get("weights")}
    shares = plan.layout == "colocated" and {"policy", "rollout"} <= roles.keys()
    return (roles["policy"], roles["rollout"]) if shares else None


def _gpu_gb(plan: Plan, role: Role) -> float:
    """Memory of the smallest GPU where a role lies; where it lies nowhere, of those with its labels. 0: unknown."""
    nodes = [node for i in range(role.count) if (node := plan.node_of(role.name, i)) is not None]
    return min(ClusterShape(tuple(nodes) or plan.shape.nodes).gpu_sizes_gb(role.labels), default=0.0)


def _unplaced(plan: Plan) -> list[str]:
    """Bundles that find no node although each would, alone: the others are in their way."""
    left = [[node.cpus, node.gpus] for node in plan.shape.nodes]
    lost: list[Bundle] = []
    for bundle, node in zip(plan.bundles, (n for group in plan.places for n in group), strict=True):
        if node is None:
            lost.append(bundle)
        else:
            left[node][0] -= bundle.need[0]
            left[node][1] -= bundle.need[1]
    rest = few([f"{node.name or 'a node'} {cpus:g} CPU, {gpus:g} GPU"
                 for node, (cpus, gpus) in zip(plan.shape.nodes, left, strict=True)], "; ")  # fmt: skip
    limit = f" (at most {plan.shape.max_nodes} nodes at once)" if plan.shape.max_nodes else ""
    return [f"{who(bundle)} needs {describe(bundle)} on one node; left beside the others{limit}: "
            f"{rest or 'no node at all'}. Larger nodes, or fewer actors." for bundle in lost]  # fmt: skip


def _notes(config: Config, plan: Plan, model: ModelShape | None) -> tuple[str, ...]:
    notes = []
    if model is None:
        notes.append(f"policy.model={config.policy.model} is not here: weights are left out of the memory estimates")
    if plan.layout == "colocated" and config.memory_reward.streaming:
        notes.append("colocated: memory scoring waits for generation to end (memory_reward.streaming has no effect)")
    if plan.layout == "cpu":
        notes.append("vLLM on CPU cannot sleep: engine and policy hold their memory during the whole run")
    rollout, retrieval = config.rollout, config.retrieval
    if rollout.min_replicas < rollout.max_replicas and may_leave(config, "rollout"):
        notes.append(f"elastic: {rollout.min_replicas} to {rollout.max_replicas} engines; {ELASTIC}")
    if retrieval.is_elastic:
        notes.append("elastic: {} to {} retrieval replicas; {}".format(*retrieval.bounds, ELASTIC))
    memory_gb = plan.shape.memory_gb
    if memory_gb and plan.host_gb > memory_gb:
        notes.append(f"about {plan.host_gb:.1f} GB of host memory estimated, the nodes have {memory_gb:.1f} GB: lower "
                     "policy.micro_batch_tokens, rollout.kv_cache_gb or placement.object_store_gb")  # fmt: skip
    shared = _sharers(plan)
    if shared is not None:
        rank, engine = (role.memory for role in shared)
        notes.append(f"colocated: of a GPU a rank has about {rank.resting_gpu_gb:.1f} GB while its engine has "
                     f"{engine.gpu_gb:.1f} GB, and {rank.gpu_gb:.1f} GB in an update, beside {SLEEPING_GB:g} GB that a "
                     "sleeping engine keeps")  # fmt: skip
    for role in plan.roles:
        need, gpu_gb = role.memory.gpu_gb, _gpu_gb(plan, role)
        if shared is not None and role.name == "policy":
            need += SLEEPING_GB
        if 0 < gpu_gb * max(1, role.gpus) < need:
            notes.append(f"{role.name}: about {need:.0f} GB of GPU memory estimated, a GPU has {gpu_gb:.0f} GB")
    return tuple(notes)


# -- words --------------------------------------------------------------------------------------------------


def who(bundle: Bundle) -> str:
    """Example: `policy[0] and rollout[0]`."""
    return " and ".join(f"{role}[{index}]" for role, index in bundle.tenants)


def describe(bundle: Bundle, *, with_memory: bool = True) -> str:
    """Example: `1 GPU, 0.5 CPU, about 3.2 GB of memory, ray.io/market-type=spot`."""
    cpus, gpus, memory_gb = bundle.need
    parts = [f"{gpus:g} GPU" if gpus else "", f"{cpus:g} CPU", f"about {memory_gb:.1f} GB of memory" * with_memory]
    return ", ".join(part for part in [*parts, _labels(bundle.labels)] if part)


def _labels(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(labels.items()))


def _labels_there(shape: ClusterShape) -> str:
    there = sorted({f"{key}={value}" for node in shape.nodes for key, value in node.labels.items()})
    return f"labels that nodes have: {few(there)}" if there else "no node has any label"


def few(words: Sequence[str], between: str = ", ", most: int = 8) -> str:
    """The first of many words, and how many more there are."""
    more = f"{between}{len(words) - most} more" if len(words) > most else ""
    return between.join(words[:most]) + more


def _ranges(numbers: Sequence[int]) -> str:
    """Example: [0, 1, 2, 5] → '0-2, 5'."""
    runs = [list(run) for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else str(run[0][1]) for run in runs)


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(row, [*widths, 0], strict=True)) for row in rows]
