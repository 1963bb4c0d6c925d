"""Placement as a value: configuration + cluster shape → bundles, or what is short, in words. Pure.

    Config ──┐
             ├──▶ make_plan ──▶ Plan ──▶ table() (a person)   reserve() (Ray, placement/reserve.py)
    Shape ───┘                   └─────▶ shortages, notes

One bundle holds one actor; in the colocated layout a rank and an engine share a bundle and its GPU. The whole run
asks for at most `placement.num_cpus` logical CPUs, shared out as fractions: actors that wait most of the time need
no core each, and two runs fit on two CPUs. The driver itself asks for none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from mempo_ray.config.models import ModelShape, read_model_shape
from mempo_ray.config.schema import Config
from mempo_ray.errors import ConfigError, PlacementError

GB = 1e9

CPU_WEIGHTS = {
    "policy": 4,
    "rollout": 4,
    "retrieval": 2,
    "agent_loop": 1,
    "reward": 1,
    "reward_model": 4,
    "batch_executor": 1,
}
"""How the run's CPUs are shared out: an actor of a role with weight 4 gets twice that of one with weight 2."""

TRAINING_ROLES = ("policy", "batch_executor")
"""Roles that a run without training leaves out."""

PROCESS_GB = {
    "policy": 0.6,
    "rollout": 1.4,
    "retrieval": 0.4,
    "agent_loop": 0.2,
    "reward": 0.2,
    "reward_model": 0.6,
    "batch_executor": 0.2,
}
"""Resident memory of an idle actor with its imports (GB): torch in a rank, vLLM and its engine process in a rollout."""


@dataclass(frozen=True)
class Node:
    """One machine of the cluster, as Ray's logical resources see it."""

    cpus: float
    gpus: float = 0
    memory_gb: float = 0.0
    gpu_memory_gb: float = 0.0
    name: str = ""


@dataclass(frozen=True)
class ClusterShape:
    """The nodes that are up, or the most that the cluster can take (`placement.cluster_shape`)."""

    nodes: tuple[Node, ...]
    source: str = "this cluster"

    @property
    def cpus(self) -> float:
        return sum(n.cpus for n in self.nodes)

    @property
    def gpus(self) -> float:
        return sum(n.gpus for n in self.nodes)

    @property
    def memory_gb(self) -> float:
        return sum(n.memory_gb for n in self.nodes)

    @property
    def gpu_memory_gb(self) -> float:
        """Memory of the smallest GPU; 0 where unknown."""
        return min((n.gpu_memory_gb for n in self.nodes if n.gpus), default=0.0)


@dataclass(frozen=True)
class Role:
    """`count` equal actors: logical CPUs and GPUs of each, and what is estimated to lie in memory (GB each)."""

    name: str
    count: int
    cpus: float
    gpus: float = 0
    host_gb: Mapping[str, float] = field(default_factory=dict)
    gpu_gb: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Bundle:
    """Resources reserved together on one node, and the actors (role, index) that live on them."""

    resources: Mapping[str, float]
    tenants: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Plan:
    """What a run asks of a cluster. `shortages` is empty when the shape holds it."""

    layout: str
    shape: ClusterShape
    roles: tuple[Role, ...]
    bundles: tuple[Bundle, ...]
    object_store_gb: float
    shortages: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def cpus(self) -> float:
        return round(sum(b.resources.get("CPU", 0) for b in self.bundles), 4)

    @property
    def gpus(self) -> float:
        return round(sum(b.resources.get("GPU", 0) for b in self.bundles), 4)

    @property
    def host_gb(self) -> float:
        return sum(r.count * sum(r.host_gb.values()) for r in self.roles) + self.object_store_gb

    def role(self, name: str) -> Role:
        return next(r for r in self.roles if r.name == name)

    def bundle_of(self, role: str, index: int) -> int:
        """Index of the bundle that holds an actor. Raises KeyError for an actor that is not in the plan."""
        for position, bundle in enumerate(self.bundles):
            if (role, index) in bundle.tenants:
                return position
        raise KeyError(f"the plan has no {role}[{index}]")

    def require(self) -> Plan:
        """The plan itself, or PlacementError with every shortage."""
        if self.shortages:
            raise PlacementError("\n".join(self.shortages))
        return self

    def table(self) -> str:
        """The plan for a person: one line a role, then totals, notes and shortages."""
        rows = [("role", "actors", "CPU each", "GPU each", "RAM GB each", "GPU GB each", "of which")]
        for r in self.roles:
            parts = [f"{what} {gb:.2f}" for what, gb in (*r.host_gb.items(), *r.gpu_gb.items()) if gb >= 0.005]
            gpu_gb = f"{sum(r.gpu_gb.values()):.1f}" if r.gpu_gb else "-"
            rows.append((r.name, str(r.count), f"{r.cpus:g}", f"{r.gpus:g}", f"{sum(r.host_gb.values()):.2f}", gpu_gb,
                         ", ".join(parts)))  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(6)]
        lines = [f"Plan: layout {self.layout} on {self.shape.source}", ""]
        lines += ["  " + "  ".join(c.ljust(w) for c, w in zip(row, [*widths, 0], strict=True)) for row in rows]
        lines += [
            "",
            f"  asks for {self.cpus:g} CPUs and {self.gpus:g} GPUs; the cluster has {self.shape.cpus:g} and "
            f"{self.shape.gpus:g}",
            f"  about {self.host_gb:.1f} GB of host memory, {self.object_store_gb:g} GB of it object store (estimates)",
        ]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  SHORT: {shortage}" for shortage in self.shortages]
        return "\n".join(lines)


def make_plan(
    config: Config, shape: ClusterShape, model: ModelShape | None = None, *, with_policy: bool = True
) -> Plan:
    """Bundles for every actor of a run, with what the shape lacks.

    Args:
        model: the policy's shape for the memory estimates; None leaves weights out and says so.
        with_policy: False for a run that only generates (`mempo-ray eval`, `ask`).
    """
    layout = config.placement.layout
    counts = {name: n for name, n in _counts(config).items() if n and (with_policy or name not in TRAINING_ROLES)}
    cpus = _share_cpus(counts, config.placement.num_cpus)
    gpus = _gpus_each(config)
    roles = tuple(
        Role(name, count, cpus[name], gpus[name], *_memory(name, config, model, shape.gpu_memory_gb))
        for name, count in counts.items()
    )
    bundles = _bundles(roles, layout)
    plan = Plan(layout, shape, roles, bundles, config.placement.object_store_gb)
    shortages = (*_contradictions(config), *_missing(plan, config))
    return replace(plan, shortages=shortages, notes=_notes(config, plan, model))


def read_cluster_shape(file: str | Path) -> ClusterShape:
    """A shape from YAML: `nodes: [{count: 1, cpus: 96, gpus: 8, memory_gb: 1000, gpu_memory_gb: 80}]`."""
    try:
        raw = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        nodes = [
            Node(**{k: v for k, v in entry.items() if k != "count"})
            for entry in raw["nodes"]
            for _ in range(int(entry.get("count", 1)))
        ]
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"placement.cluster_shape: {file}: {error}; it takes "
            "`nodes: [{count: 1, cpus: 96, gpus: 8, memory_gb: 1000, gpu_memory_gb: 80}]`."
        ) from None
    return ClusterShape(tuple(nodes), str(file))


# -- what each role asks for --------------------------------------------------------------------------------


def _counts(config: Config) -> dict[str, int]:
    return {
        "policy": config.policy.ranks,
        "rollout": config.rollout.replicas,
        "retrieval": config.retrieval.replicas if config.retrieval.needs_index else 0,
        "reward": config.reward.workers,
        "reward_model": len(config.reward.models),
        "agent_loop": config.agent.workers,
        "batch_executor": 1,
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


def _bundles(roles: Sequence[Role], layout: str) -> tuple[Bundle, ...]:
    tenants = [(role, index) for role in roles for index in range(role.count)]
    groups: dict[tuple[str, int], list[tuple[Role, int]]] = {}
    for role, index in tenants:
        # colocated: engine i joins rank i; engines beyond the ranks keep a bundle of their own (and are refused)
        ranks = roles[0].count
        join = layout == "colocated" and role.name == "rollout" and index < ranks
        groups.setdefault(("policy", index) if join else (role.name, index), []).append((role, index))
    return tuple(
        Bundle(_resources([role for role, _ in group]), tuple((role.name, index) for role, index in group))
        for group in groups.values()
    )


def _resources(roles: Sequence[Role]) -> dict[str, float]:
    cpus, gpus = sum(r.cpus for r in roles), sum(r.gpus for r in roles)
    # a rank alone in the colocated layout still needs a whole GPU
    return {"CPU": round(cpus, 4)} | ({"GPU": float(math.ceil(gpus))} if gpus else {})


# -- memory -------------------------------------------------------------------------------------------------


def _memory(
    name: str, config: Config, model: ModelShape | None, gpu_memory_gb: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Estimates (host GB, GPU GB) of one actor. On GPUs the tensors move to the second."""
    host: dict[str, float] = {"process": PROCESS_GB[name]}
    gpu: dict[str, float] = {}
    on_gpu = config.placement.layout != "cpu"
    if name == "policy" and model is not None:
        parts = _policy_tensors_gb(config, model)
        offloaded = {"optimiser", "reference"} if config.policy.cpu_offload else set()
        for part, gb in parts.items():
            (gpu if on_gpu and part not in offloaded else host)[part] = gb
    if name == "rollout":
        rollout, weights = config.rollout, 0.0
        if model is not None:
            weights = (4 if rollout.dtype == "float32" else 2) * model.num_params / GB
            (gpu if on_gpu else host)["weights"] = weights
        if on_gpu:
            reserved = rollout.gpu_memory_utilization * gpu_memory_gb * rollout.tensor_parallel
            gpu["KV cache"] = max(0.0, reserved - weights)
        else:
            host["KV cache"] = rollout.kv_cache_gb * 2**30 / GB
    if name == "reward_model":
        for section in config.reward.models.values():  # the largest: all actors of a role are alike
            shape = read_model_shape(section.folder)
            weights = (4 if section.dtype == "float32" else 2) * shape.num_params / GB if shape is not None else 0.0
            where = gpu if section.device == "cuda" else host
            where["weights"] = max(where.get("weights", 0.0), weights)
    if name == "retrieval" and config.retrieval.embeddings:
        file = Path(config.retrieval.embeddings)
        # a .npy of 16-bit floats becomes a 32-bit index
        host["index"] = 2 * file.stat().st_size / GB if file.is_file() else 0.0
    return host, {k: v for k, v in gpu.items() if v}


def _policy_tensors_gb(config: Config, model: ModelShape) -> dict[str, float]:
    """One rank's shard: float32 master weights, gradients and AdamW moments, a compute copy and the reference."""
    policy, shard = config.policy, model.num_params / config.policy.ranks
    width = 2 if policy.dtype == "bfloat16" else 4
    kept = model.hidden if policy.activation_checkpointing else 8 * model.hidden + 3 * model.intermediate
    activations = policy.micro_batch_tokens * model.layers * kept * width
    logits = policy.micro_batch_tokens // 2 * model.vocab * 4 * 2  # half of the positions are outputs; with gradient
    return {
        "weights": 4 * shard / GB + (2 * shard / GB if policy.dtype == "bfloat16" else 0),
        "gradients": 4 * shard / GB,
        "optimiser": 8 * shard / GB,
        "reference": width * shard / GB if config.needs_reference else 0.0,
        "activations": (activations + logits) / GB,
    }


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
    if layout == "colocated" and config.rollout.tensor_parallel > 1:
        found.append("placement.layout=colocated shares one GPU between a rank and an engine: set "
                     "rollout.tensor_parallel=1, or layout=disaggregated.")  # fmt: skip
    if layout == "colocated" and config.rollout.replicas > config.policy.ranks:
        found.append(f"placement.layout=colocated: rollout.replicas={config.rollout.replicas} is more than "
                     f"policy.ranks={config.policy.ranks}; each engine shares a rank's GPU.")  # fmt: skip
    return found


def _missing(plan: Plan, config: Config) -> list[str]:
    """Sentences for what the shape lacks; first in all, then bundle by bundle (a bundle lies on one node)."""
    short = []
    if plan.gpus > plan.shape.gpus:
        wants = _wants(plan, "gpus", "GPU")
        short.append(f"{wants}; the cluster has {plan.shape.gpus:g} GPUs. Lower policy.ranks or rollout.replicas, "
                     "or set placement.layout=cpu and policy.device=cpu.")  # fmt: skip
    if plan.cpus > plan.shape.cpus:
        wants = _wants(plan, "cpus", "CPU")
        short.append(f"{wants}; the cluster has {plan.shape.cpus:g} CPUs. Lower placement.num_cpus "
                     f"(now {config.placement.num_cpus:g}).")  # fmt: skip
    limit = config.placement.num_gpus
    if limit and plan.gpus > limit:
        short.append(f"{_wants(plan, 'gpus', 'GPU')}; placement.num_gpus allows {limit}. Raise it, or lower "
                     "policy.ranks or rollout.replicas.")  # fmt: skip
    return short or _unplaced(plan)


def _wants(plan: Plan, attribute: str, unit: str) -> str:
    parts = []
    for role in plan.roles:
        each = getattr(role, attribute)
        if each:
            times = f" ({role.count} × {each:g})" if role.count > 1 else ""
            total = each * role.count
            parts.append(f"{role.name} needs {total:g} {unit}{'' if total == 1 else 's'}{times}")
    return ", ".join(parts)


def _unplaced(plan: Plan) -> list[str]:
    """First fit, largest first: which bundles find no node although the sums are enough."""
    free = [{"CPU": n.cpus, "GPU": n.gpus} for n in plan.shape.nodes]
    short = []
    for bundle in sorted(plan.bundles, key=lambda b: (-b.resources.get("GPU", 0), -b.resources.get("CPU", 0))):
        need = bundle.resources
        node = next((f for f in free if all(f[k] + 1e-9 >= v for k, v in need.items())), None)
        if node is None:
            who = " and ".join(f"{role}[{index}]" for role, index in bundle.tenants)
            what = " and ".join(f"{amount:g} {unit}" for unit, amount in need.items())
            left = "; ".join(f"{f['CPU']:g} CPU, {f['GPU']:g} GPU" for f in free) or "no node at all"
            short.append(f"{who} needs {what} on one node; left on the nodes: {left}. Larger nodes, or fewer actors.")
        else:
            for unit, amount in need.items():
                node[unit] -= amount
    return short


def _notes(config: Config, plan: Plan, model: ModelShape | None) -> tuple[str, ...]:
    notes = []
    if model is None:
        notes.append(f"policy.model={config.policy.model} is not here: weights are left out of the memory estimates")
    if plan.layout == "colocated" and config.memory_reward.streaming:
        notes.append("colocated: memory scoring waits for generation to end (memory_reward.streaming has no effect)")
    if plan.layout == "cpu":
        notes.append("vLLM on CPU cannot sleep: engine and policy hold their memory during the whole run")
    memory_gb, gpu_gb = plan.shape.memory_gb, plan.shape.gpu_memory_gb
    if memory_gb and plan.host_gb > memory_gb:
        notes.append(f"about {plan.host_gb:.1f} GB of host memory estimated, the nodes have {memory_gb:.1f} GB: lower "
                     "policy.micro_batch_tokens, rollout.kv_cache_gb or placement.object_store_gb")  # fmt: skip
    for role in plan.roles:
        need = sum(role.gpu_gb.values())
        if gpu_gb and need > gpu_gb * max(1, role.gpus):
            notes.append(f"{role.name}: about {need:.0f} GB of GPU memory estimated, a GPU has {gpu_gb:.0f} GB")
    return tuple(notes)
