"""Commands of the FSDP gang. `BatchExecutor` sends one command at a time to all ranks, in one order.

    BatchExecutor ──▶ PolicyWorker.run(sequence, command, *payloads) ──▶ CommandReply        (each rank)

`sequence` starts at 0 and each rank refuses any other than its next: a forward is a collective, and ranks that
see different commands hang. Payloads are top-level arguments (Ray dereferences those on arrival); inside a
command their `PayloadRef.handle` is None and `payload_index` says which argument is meant. Each rank gets its
own share of the items, maybe none; it still takes part in every forward (dummy passes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from mempo_ray.contracts.batch import Batch, Column
from mempo_ray.contracts.scoring import LogProbRequest
from mempo_ray.contracts.training import TrainItem


@dataclass(frozen=True)
class ScoreCommand:
    """Log-probs for this rank's requests. Reply value: one `LogProbResult` or error text per request."""

    requests: tuple[LogProbRequest, ...]
    payload_index: tuple[int, ...]  # per request: index into the payload arguments, -1 = none
    model: str = "live"  # of all requests: live | reference


@dataclass(frozen=True)
class TrainCommand:
    """One TrainPlan, this rank's items (payload argument i belongs to items[i]). Reply value: metrics."""

    step: int
    items: tuple[TrainItem, ...]
    mini_batch: tuple[int, ...]  # per item
    num_mini_batches: int
    num_trajectories: tuple[int, ...]  # per mini-batch, over all ranks: N of §5


@dataclass(frozen=True)
class SftCommand:
    """One supervised optimiser step on payload argument 0 (`SftBatch`, maybe 0 rows). Reply value: metrics."""

    lr: float
    num_target_tokens: int  # over all ranks: the denominator of the loss


@dataclass(frozen=True)
class PublishCommand:
    """Export the weights to folder `uri` (rank 0 writes). Reply value of rank 0: a `WeightManifest`."""

    uri: str


@dataclass(frozen=True)
class PushCommand:
    """Send the weights straight into the engines' GPUs; all ranks gather, rank 0 sends.

    Reply value of rank 0: name → reason of the engines that failed; a dead engine is no reason to end the ranks.
    The names of `engines` change when an engine is replaced. Handles are opaque, as in `PayloadRef`.
    """

    transport: str  # "nccl" | "ipc"
    engines: Mapping[str, object]  # name of this life of the engine → handle
    gpus_per_engine: int
    timeout_s: float  # of all answers of the engines together


@dataclass(frozen=True)
class FreezeReferenceCommand:
    """Keep the present weights as π_ref (start of RL, after the cold start). Resets optimiser and schedule."""


@dataclass(frozen=True)
class SaveCommand:
    """Write a complete checkpoint (torch DCP + extra.json, marker last)."""

    uri: str
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadCommand:
    """Restore a checkpoint written by any number of ranks. Reply value: its `extra`."""

    uri: str


Command = (
    ScoreCommand
    | TrainCommand
    | SftCommand
    | PublishCommand
    | PushCommand
    | FreezeReferenceCommand
    | SaveCommand
    | LoadCommand
)


@dataclass(frozen=True)
class CommandReply:
    """What one rank answers. `version` is the policy's weight version after the command."""

    sequence: int
    version: int
    value: object = None
    num_tokens: int = 0  # that a ScoreCommand ran on this rank, in so many forwards; its dummy passes not included
    num_passes: int = 0


class SftBatch(Batch):
    """Supervised rows: loss on `output_ids` only."""

    SCHEMA: ClassVar[Mapping[str, Column]] = {
        "prompt_ids": Column("ragged", np.dtype(np.int32), "context"),
        "output_ids": Column("ragged", np.dtype(np.int32), "targets"),
    }
