"""Publishing weights: an ordinary Hugging Face folder that plain vLLM and transformers load, and its manifest.

    full tensors, one at a time ─▶ <uri>.partial/*.safetensors + the model folder's other files ─ rename ─▶ <uri>

Consumes the sharded policy, produces a `WeightManifest` on rank 0. The folder appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mempo_ray.contracts import TensorInfo, WeightManifest, WeightProof
from mempo_ray.training.forest import plan_forest
from mempo_ray.training.logprobs import row_logprobs
from mempo_ray.training.model import full_tensors
from mempo_ray.training.rows import Row
from mempo_ray.training.sharding import Gang

SHARD_BYTES = 4 * 2**30
"""Rank 0 holds at most one file's tensors."""
NUM_PROOF_IDS = 32
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model")


def proof_ids(vocab_size: int) -> tuple[int, ...]:
    """A fixed sequence spread over the vocabulary; no two neighbours alike.

    Example: proof_ids(434)[:3] == (13, 120, 227).
    """
    return tuple((13 + 7919 * i) % vocab_size for i in range(NUM_PROOF_IDS))


def prove(model: nn.Module, vocab_size: int, autocast: str, gang: Gang) -> WeightProof:
    """What this policy says about `proof_ids`; an engine that loaded it must say the same. Collective."""
    ids = proof_ids(vocab_size)
    row = Row(np.array(ids, np.int64), np.arange(1, len(ids)))
    (logprobs,) = row_logprobs(model, plan_forest([row], len(ids)), autocast, gang)
    return WeightProof(ids, tuple(logprobs.tolist()))


def export(
    model: nn.Module, source: Path, uri: str, *, dtype: torch.dtype, version: int, proof: WeightProof, gang: Gang
) -> WeightManifest | None:
    """Write the weights as `dtype` to folder `uri`; the manifest on rank 0, None elsewhere. Collective.

    A folder that a dead predecessor left at `uri` is replaced.
    """
    target = Path(uri)
    partial = target.with_name(target.name + ".partial")
    writer = _Writer(partial, _name(dtype)) if gang.rank == 0 else None
    for name, tensor in full_tensors(model, dtype):
        if writer is not None:
            writer.add(name, tensor)
    manifest = None
    if writer is not None:
        tensors, num_bytes = writer.close(source)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        manifest = WeightManifest(version, uri, proof, tensors, num_bytes)
    gang.barrier()  # no rank goes on before the folder is there
    return manifest


class _Writer:
    """Tensors into safetensors files of at most SHARD_BYTES, with an index where there are several."""

    def __init__(self, folder: Path, dtype: str) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder, self.dtype = folder, dtype
        self.pending: dict[str, Tensor] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.files: list[list[str]] = []
        self.num_bytes = self.pending_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        tensor = tensor.contiguous()
        if self.pending and self.pending_bytes + tensor.nbytes > SHARD_BYTES:
            self._flush()
        self.pending[name] = tensor
        self.pending_bytes += tensor.nbytes
        digest = hashlib.sha256(tensor.view(torch.uint8).numpy().data).hexdigest()
        self.tensors[name] = TensorInfo(tuple(tensor.shape), self.dtype, digest)

    def _flush(self) -> None:
        save_file(self.pending, self.folder / f"part-{len(self.files)}.safetensors", {"format": "pt"})
        self.files.append(list(self.pending))
        self.num_bytes += self.pending_bytes
        self.pending, self.pending_bytes = {}, 0

    def close(self, source: Path) -> tuple[Mapping[str, TensorInfo], int]:
        self._flush()
        total = len(self.files)
        names = [f"model-{i + 1:05}-of-{total:05}.safetensors" for i in range(total)]
        if total == 1:
            names = ["model.safetensors"]
        for i, name in enumerate(names):
            (self.folder / f"part-{i}.safetensors").rename(self.folder / name)
        for path in (p for pattern in _COPIED for p in source.glob(pattern) if not p.name.endswith(".index.json")):
            shutil.copy(path, self.folder / path.name)
        if total > 1:
            weight_map = {tensor: name for name, group in zip(names, self.files, strict=True) for tensor in group}
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index))
        config = json.loads((source / "config.json").read_text())
        config.pop("torch_dtype", None)
        (self.folder / "config.json").write_text(json.dumps({**config, "dtype": self.dtype}, indent=2))
        return self.tensors, self.num_bytes


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
