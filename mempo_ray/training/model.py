"""A Hugging Face folder as a sharded causal language model with forest attention.

    folder ─ empty model (meta) ─ fully_shard ─ each rank copies its shard of each tensor from safetensors

So no rank ever holds more than one whole tensor. Rows are packed into one sequence without padding; what each token
sees is the caller's `tree` (training/attention.py), passed through transformers as a keyword argument.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from mempo_ray.config.schema import Policy
from mempo_ray.errors import ConfigError
from mempo_ray.training.attention import TreeAttention
from mempo_ray.training.sharding import Gang, offloads, shard

ATTENTION = "mempo_forest"
_WITHOUT_EFFECT = {"dropout", "position_ids", "use_cache", "output_router_logits"}
"""What models tell their attention and this one need not know: query and key have their positions already."""
REMEDY = "take a model like Llama or Qwen"
_ARCHITECTURE_KEYS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
)


def forest_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: TreeAttention | None = None,
    scaling: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """transformers' form of a `TreeAttention`. query [1, H, T, D]; key, value [1, H_kv, T, D]; result [1, T, H, D].

    No dropout, whatever the model's configuration says: the log-probs must be those of the sampler.

    Raises:
        ConfigError: the model attends in a way that a tree's kernels do not (a window, soft-capped scores, sinks).
    """
    options["attention_mask"] = attention_mask
    asked = [name for name, value in options.items() if name not in _WITHOUT_EFFECT and value is not None]
    if asked or tree is None:
        raise ConfigError(
            f"policy.model: {type(module).__name__} attends with {', '.join(asked) or 'no tree'}, which is not served "
            f"here; {REMEDY}"
        )
    return tree(query, key, value, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, forest_attention)


def architecture(config: PretrainedConfig) -> dict[str, object]:
    """Sizes that two models must share for one to load the other's checkpoint."""
    return {key: getattr(config, key, None) for key in _ARCHITECTURE_KEYS}


def load_model(folder: Path, policy: Policy, gang: Gang, *, dtype: torch.dtype, trainable: bool) -> PreTrainedModel:
    """The sharded model with the folder's weights, stored as `dtype`.

    Raises:
        ConfigError: no such folder, a tensor is missing or has another shape, or a layer's tokens see others than a
            tree's kernels show them: sliding windows, soft-capped scores, linear attention, ALiBi, …
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"policy.model: {folder} has no config.json; name a local Hugging Face folder")
    config = AutoConfig.from_pretrained(folder)
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if others:
        raise ConfigError(
            f"policy.model: {folder} has layers of {', '.join(sorted(others))}, which are not served here; {REMEDY}"
        )
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    model.tie_weights()  # making the parameters empty has parted them
    model.requires_grad_(trainable)
    model.train(trainable)
    if trainable and policy.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None:
        raise ConfigError(f"policy.model: {folder} is a {config.model_type}, which is not served here; {REMEDY}")
    shard(model, layers, policy, gang)
    _assign_weights(model, folder, "cpu" if offloads(policy, gang) else gang.device.type)
    _check_attention(model, folder, gang.device)
    return model


def _check_attention(model: PreTrainedModel, folder: Path, device: torch.device) -> None:
    """One token through the model: every layer has to ask the tree, with nothing else in mind. Collective."""
    num_asked = 0

    def count(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        nonlocal num_asked
        num_asked += 1
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1)  # a token alone sees itself

    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    with torch.no_grad():
        model(input_ids=token, position_ids=token, use_cache=False, tree=count)
    if num_asked != model.config.num_hidden_layers:
        raise ConfigError(
            f"policy.model: {folder}: {num_asked} of {model.config.num_hidden_layers} layers of a "
            f"{model.config.model_type} take their attention from outside; {REMEDY}"
        )


def _assign_weights(model: nn.Module, folder: Path, device: str) -> None:
    """Each parameter becomes its shard of the folder's tensor, on `device`. Tied parameters stay one object."""
    with ExitStack() as stack:
        read = _tensor_reader(folder, stack)
        for name, meta in list(model.named_parameters()):
            mesh, placements = cast(DTensor, meta).device_mesh, cast(DTensor, meta).placements
            full = read(name, tuple(meta.shape)).to(dtype=meta.dtype, device=mesh.device_type)
            local = distribute_tensor(full, mesh, placements, src_data_rank=None)  # no communication: all have read it
            loaded = nn.Parameter(local.to(device), meta.requires_grad)
            for owner, attribute in _places(model, meta):
                setattr(owner, attribute, loaded)


def _places(model: nn.Module, parameter: nn.Parameter) -> list[tuple[nn.Module, str]]:
    modules = model.modules()
    return [(m, n) for m in modules for n, p in list(m.named_parameters(recurse=False)) if p is parameter]


def _tensor_reader(folder: Path, stack: ExitStack) -> Callable[[str, tuple[int, ...]], Tensor]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        file_of = json.loads(index.read_text())["weight_map"]
    elif (folder / "model.safetensors").is_file():
        with safe_open(folder / "model.safetensors", "pt") as file:
            file_of = dict.fromkeys(file.keys(), "model.safetensors")
    else:
        raise ConfigError(f"policy.model: {folder} has no model.safetensors; save the model with safe serialization")
    opened = {name: stack.enter_context(safe_open(folder / name, "pt")) for name in set(file_of.values())}

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in file_of:
            raise ConfigError(f"policy.model: {folder} has no tensor {name!r}, which its config.json asks for")
        tensor = opened[file_of[name]].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ConfigError(f"policy.model: {name} in {folder} is {tuple(tensor.shape)}, config.json says {shape}")
        return tensor

    return read


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """source → target, both sharded alike; casts to the target's dtype. No communication."""
    with torch.no_grad():
        for (_, a), (_, b) in zip(source.named_parameters(), target.named_parameters(), strict=True):
            _local(b).copy_(_local(a))


def full_tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor on CPU) one at a time; tied ones once. Collective: every rank iterates."""
    for name, parameter in model.named_parameters():
        whole = parameter.detach()
        yield name, (whole.full_tensor() if isinstance(whole, DTensor) else whole).to("cpu", dtype)


def checksum(tensors: Mapping[str, Tensor], gang: Gang) -> str:
    """A hash of sharded tensors that does not depend on the number of ranks. Collective.

    Per tensor: Σ over rows of (row number + 1) · Σ bits of the row, modulo 2^64: shards add up, so a terabyte of
    state costs one all-reduce of a number per tensor instead of a gather.
    """
    sums = torch.zeros(len(tensors), dtype=torch.int64)
    for index, tensor in enumerate(tensors.values()):
        local = _local(tensor.detach())
        if local.numel() == 0 or (gang.rank > 0 and not isinstance(tensor, DTensor)):
            continue  # a plain tensor is replicated: rank 0 speaks for all
        first_row = -(-tensor.shape[0] // gang.world) * gang.rank if tensor.ndim else 0
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        bits = local.cpu().contiguous().view(integers[local.element_size()])
        per_row = bits.reshape(local.shape[0] if local.ndim else 1, -1).sum(1, dtype=torch.int64)
        sums[index] = (per_row * torch.arange(first_row + 1, first_row + 1 + len(per_row))).sum()
    return hashlib.sha256(gang.sum(sums).numpy().tobytes()).hexdigest()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
