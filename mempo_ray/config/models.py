"""Model folders by name, and their size from `config.json` and safetensors headers: no torch, no transformers."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mempo_ray.errors import ConfigError

BUILTIN = {"tiny": Path(__file__).parents[1] / "assets" / "tiny_policy"}
"""`builtin:NAME`: folders that are shipped with the package."""

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")


def models_dir() -> Path:
    """Where `mempo-ray fetch` puts models: $MEMPO_MODELS, or a folder in the user's cache."""
    return Path(os.environ.get("MEMPO_MODELS") or Path.home() / ".cache" / "mempo_ray" / "models")


def model_folder(name: str) -> Path:
    """The folder of a model: `builtin:tiny`, `fetched:smollm2`, or a path."""
    if name.startswith("builtin:"):
        known = name.removeprefix("builtin:")
        return BUILTIN.get(known, Path(name))
    if name.startswith("fetched:"):
        return models_dir() / name.removeprefix("fetched:")
    return Path(name).expanduser()


def check_model_folder(key: str, name: str) -> Path:
    """The folder, if it holds config.json, weights and a tokenizer. Raises ConfigError naming key and remedy."""
    folder = model_folder(name)
    remedy = f"give a local Hugging Face folder in {key} (`hf download NAME --local-dir FOLDER` makes one)"
    if name.startswith("fetched:"):
        remedy = f"run `mempo-ray fetch {name.removeprefix('fetched:')}` first, or {remedy}"
    if not folder.is_dir():
        raise ConfigError(f"{key}: {name!r}: no model folder at {folder}; {remedy}.")
    for files, what in (
        (("config.json",), "config.json"),
        (WEIGHT_FILES, "weights (model.safetensors)"),
        (("tokenizer.json",), "tokenizer (tokenizer.json)"),
        (("tokenizer_config.json",), "tokenizer_config.json (chat template, end-of-turn token)"),
    ):
        if not any((folder / file).is_file() for file in files):
            raise ConfigError(f"{key}: the model folder {folder} has no {what}; {remedy}.")
    return folder


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a decoder that its memory follows from."""

    num_params: int
    layers: int
    hidden: int
    intermediate: int
    vocab: int


KNOWN = {
    "Qwen2.5-7B": ModelShape(7_615_616_512, 28, 3584, 18944, 152064),
}
"""Shapes by the start of a folder's name, so that a run can be planned where its model is not."""


def read_model_shape(name: str) -> ModelShape | None:
    """The shape of a model folder; from `KNOWN` where the folder is not here; None if neither."""
    folder = model_folder(name)
    file = folder / "config.json"
    if not file.is_file():
        return next((shape for start, shape in KNOWN.items() if folder.name.startswith(start)), None)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        return ModelShape(
            num_params=_count_params(folder) or _estimate_params(config),
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            intermediate=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
        )
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"policy.model: {file} is not a decoder's config.json ({error!r}).") from None


def _count_params(folder: Path) -> int:
    """Parameters stored in the safetensors shards (0 if there are none), read from their headers alone."""
    total = 0
    for shard in folder.glob("*.safetensors"):
        with shard.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: Mapping = json.loads(file.read(length))
        for tensor_name, tensor in header.items():
            if tensor_name != "__metadata__":
                size = 1
                for extent in tensor["shape"]:
                    size *= extent
                total += size
    return total


def _estimate_params(config: Mapping) -> int:
    """Llama- and Qwen-like decoders: attention, gated MLP, embeddings (norms and biases left out, < 0.1 %)."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or hidden // heads)
    kv = int(config.get("num_key_value_heads") or heads) * head_dim
    layer = 2 * hidden * heads * head_dim + 2 * hidden * kv + 3 * hidden * int(config["intermediate_size"])
    embeddings = int(config["vocab_size"]) * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return int(config["num_hidden_layers"]) * layer + embeddings
