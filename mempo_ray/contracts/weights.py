"""A published set of weights: immutable, named by its version, proven by a fixed sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TensorInfo:
    """Shape, dtype name (as torch prints it, without 'torch.') and content hash of one tensor."""

    shape: tuple[int, ...]
    dtype: str
    sha256: str


@dataclass(frozen=True)
class WeightProof:
    """Log-probs (temperature 1, float32) that the publishing policy gives to `ids[1:]`."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class WeightManifest:
    """What a joining or restarted engine pulls. `uri` is a folder of safetensors shards in Hugging Face names.

    `node` is the id of the Ray node that has the folder; '' where every node has it (a URI, a model folder).
    """

    version: int
    uri: str
    proof: WeightProof
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict)
    num_bytes: int = 0
    node: str = ""
