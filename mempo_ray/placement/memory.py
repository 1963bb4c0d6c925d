"""What lies in the memory of each actor, term by term (GB = 1e9 bytes): an estimate to plan by. Pure.

Terms in `ESTIMATED` depend on what a micro-batch holds; all others are sure from the start of the run to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mempo_ray.config.models import ModelShape, read_model_shape
from mempo_ray.config.schema import Config

GB = 1e9

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

ESTIMATED = ("activations", "logits", "working copies", "export", "allocator")
"""Terms that come and go with a micro-batch; they are noted, and only the others can be found short."""

SLEEPING_GB = 1.5
"""What a sleeping vLLM engine keeps of its GPU: context, graphs, workspaces outside its pool. Not measured here."""


@dataclass(frozen=True)
class Estimate:
    """Terms of one actor in host memory and in GPU memory (GB)."""

    host: Mapping[str, float] = field(default_factory=dict)
    gpu: Mapping[str, float] = field(default_factory=dict)

    @property
    def sure_host_gb(self) -> float:
        return _sure(self.host)

    @property
    def sure_gpu_gb(self) -> float:
        return _sure(self.gpu)

    @property
    def gpu_gb(self) -> float:
        return sum(self.gpu.values())

    @property
    def resting_gpu_gb(self) -> float:
        """Of a rank between two updates: its gradients are gone."""
        return self.sure_gpu_gb - self.gpu.get("gradients", 0.0)


def estimate(role: str, config: Config, model: ModelShape | None, gpu_memory_gb: float) -> Estimate:
    """The memory of one actor of a role.

    Args:
        model: the policy's shape; None leaves out what depends on it.
        gpu_memory_gb: of one GPU; 0 where unknown.
    """
    host, gpu = _TERMS.get(role, lambda *_: ({}, {}))(config, model, gpu_memory_gb)
    positive = [{name: gb for name, gb in terms.items() if gb > 0} for terms in (host, gpu)]
    return Estimate({"process": PROCESS_GB[role], **positive[0]}, positive[1])


def _sure(terms: Mapping[str, float]) -> float:
    return sum(gb for name, gb in terms.items() if name not in ESTIMATED)


Terms = dict[str, float]


def _policy(config: Config, model: ModelShape | None, _: float) -> tuple[Terms, Terms]:
    if model is None:
        return {}, {}
    terms = rank_terms(config, model)
    if config.placement.layout == "cpu":
        return terms, {}
    offloaded = ("weights", "gradients", "optimiser", "reference") if config.policy.cpu_offload else ()
    host = {name: gb for name, gb in terms.items() if name in (*offloaded, "export")}
    return host, {name: gb for name, gb in terms.items() if name not in host and name != "allocator"}


def _rollout(config: Config, model: ModelShape | None, gpu_memory_gb: float) -> tuple[Terms, Terms]:
    """vLLM takes its share of a GPU at once: what the weights leave of it is KV cache. Asleep, while a rank on the same
    GPU updates, it keeps its weights in host memory."""
    rollout = config.rollout
    weights = 0.0 if model is None else _width(rollout.dtype) * model.num_params / GB
    if config.placement.layout == "cpu":
        return {"weights": weights, "KV cache": rollout.kv_cache_gb * 2**30 / GB}, {}
    reserved = rollout.gpu_memory_utilization * gpu_memory_gb * rollout.tensor_parallel
    asleep = {"sleeping weights": weights} if config.placement.layout == "colocated" else {}
    return asleep, {"weights": weights, "KV cache": reserved - weights}


def _reward_model(config: Config, *_: object) -> tuple[Terms, Terms]:
    """The largest of them, since all actors of a role are alike."""
    host, gpu = {"weights": 0.0}, {"weights": 0.0}
    for section in config.reward.models.values():
        shape = read_model_shape(section.folder)
        terms = gpu if section.device == "cuda" else host
        if shape is not None:
            terms["weights"] = max(terms["weights"], _width(section.dtype) * shape.num_params / GB)
    return host, gpu


def _retrieval(config: Config, *_: object) -> tuple[Terms, Terms]:
    """A built index as large as its files; of prepared 16-bit embeddings, as 32-bit numbers."""
    retrieval = config.retrieval
    files = [file for file in Path(retrieval.index).glob("*") if file.is_file()] if retrieval.index else []
    index = sum(file.stat().st_size for file in files) / GB
    if not retrieval.index and retrieval.embeddings and Path(retrieval.embeddings).is_file():
        index = 2 * Path(retrieval.embeddings).stat().st_size / GB
    return ({}, {"index": index}) if retrieval.device == "cuda" else ({"index": index}, {})


_TERMS: Mapping[str, Callable[[Config, ModelShape | None, float], tuple[Terms, Terms]]] = {
    "policy": _policy,
    "rollout": _rollout,
    "reward_model": _reward_model,
    "retrieval": _retrieval,
}


def rank_terms(config: Config, model: ModelShape) -> Terms:
    """One FSDP rank.

    Its shard: float32 master weights, their gradients and AdamW's two moments, 16 bytes a parameter, and the reference.
    Working copies: root (embeddings, head) and a layer as gathered, with gradients; under autocast all weights, cast.
    Activations: what the backward pass keeps of each token. Logits [K, vocab], K half of the tokens, of which five
    float32 forms live at once: as they come, in float32, over the temperature, log-softmax, gradient.
    Export: one file's tensors, in host memory. Allocator (CPU): a C library keeps about as much again as the parts that
    come and go, in blocks of sizes that do not recur.

    Example: SmolLM2-135M, one rank on CPU, autocast, micro-batches of 1,024 tokens: 7.0 GB with the process, where 8.2
    were measured at the peak; with 2,048 tokens 9.6 GB, where 9.4 were.
    """
    policy, shard = config.policy, model.num_params / config.policy.ranks
    width, tokens = _width(policy.dtype), policy.micro_batch_tokens
    is_cast = policy.autocast == "bfloat16"
    root = model.vocab * model.hidden
    layer = max(0, model.num_params - root) / model.layers
    per_layer = SAVED_HIDDEN * model.hidden + SAVED_INNER * model.intermediate
    if policy.activation_checkpointing:
        per_layer = model.hidden
    passing = {
        "working copies": (2 * width * (root + 2 * layer) + 2 * model.num_params * is_cast) / GB,
        "activations": tokens * model.layers * per_layer * (2 if is_cast else width) / GB,
        "logits": LOGITS_FORMS * tokens / 2 * model.vocab * 4 / GB,
    }
    return {
        "weights": 4 * shard / GB,
        "gradients": 4 * shard / GB,
        "optimiser": 8 * shard / GB,
        "reference": width * shard / GB if config.needs_reference else 0.0,
        **passing,
        "export": min(width * model.num_params, EXPORT_FILE_BYTES) / GB,
        "allocator": sum(passing.values()),
    }


EXPORT_FILE_BYTES = 4 * 2**30
"""Of training/export.py."""
SAVED_HIDDEN, SAVED_INNER, LOGITS_FORMS = 12, 4, 5
"""What a layer keeps of a token for the backward pass, in hidden and inner widths; float32 forms of the logits."""


def _width(dtype: str) -> int:
    return 4 if dtype == "float32" else 2
