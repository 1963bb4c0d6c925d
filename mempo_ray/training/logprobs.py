"""Log-probs of marked tokens: rows → packed micro-batches → one forward each.

    rows ─ pack ─▶ MicroBatch ─ model(logits_to_keep = one before each target) ─▶ logits [K, vocab] ─▶ log-probs [K]

Ranks take part in every forward of every other: the number of passes is the largest of any rank, and a rank with
fewer micro-batches runs a dummy row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from mempo_ray.training.rows import DUMMY, Row, pack
from mempo_ray.training.sharding import Gang


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Rows behind one another, no padding. `rows` are their indices in the caller's list; empty = a dummy pass."""

    rows: tuple[int, ...]
    row_lengths: tuple[int, ...]
    ids: Tensor  # int64 [1, T]
    position_ids: Tensor  # int64 [1, T], from 0 in each row
    predictors: Tensor  # int64 [K]: where in T the logits of each target stand (one before it)
    targets: Tensor  # int64 [K]: ids
    temperature: Tensor  # float32 [K]

    @property
    def num_targets(self) -> int:
        return len(self.targets) if self.rows else 0


def micro_batches(rows: Sequence[Row], budget: int, gang: Gang) -> Iterator[MicroBatch]:
    """Packed in the order given, then dummies until every rank has done the same number. Collective."""
    groups = pack([len(row.ids_T) for row in rows], budget)
    for index in range(int(gang.max(len(groups)))):
        group = groups[index] if index < len(groups) else []
        yield _micro_batch(tuple(group), [rows[i] for i in group] or [DUMMY], gang.device)


def _micro_batch(indices: tuple[int, ...], rows: Sequence[Row], device: torch.device) -> MicroBatch:
    lengths = [len(row.ids_T) for row in rows]
    offsets = np.cumsum([0, *lengths[:-1]])
    numbers = {
        "ids": np.concatenate([row.ids_T for row in rows])[None],
        "position_ids": np.concatenate([np.arange(n) for n in lengths])[None],
        "predictors": np.concatenate([row.targets_K + offset - 1 for row, offset in zip(rows, offsets, strict=True)]),
        "targets": np.concatenate([row.ids_T[row.targets_K] for row in rows]),
        "temperature": np.concatenate([np.full(len(row.targets_K), row.temperature, np.float32) for row in rows]),
    }
    return MicroBatch(indices, tuple(lengths), **{n: torch.from_numpy(a).to(device) for n, a in numbers.items()})


def target_logits(model: nn.Module, batch: MicroBatch, autocast: str) -> Tensor:
    """Logits / temperature, [K, vocab], at least float32. The root module is called, as FSDP's hooks require."""
    cast = torch.autocast(batch.ids.device.type, torch.bfloat16) if autocast == "bfloat16" else contextlib.nullcontext()
    with cast:
        logits = model(
            input_ids=batch.ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.predictors,
            row_lengths=batch.row_lengths,
        ).logits[0]
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / batch.temperature[:, None]


def gather_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """log softmax(logits)[targets]: [K, vocab], [K] → [K]."""
    return torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]


@torch.no_grad()
def row_logprobs(model: nn.Module, rows: Sequence[Row], budget: int, autocast: str, gang: Gang) -> list[Tensor]:
    """Log-probs [K] of each row's targets, on the CPU, in order. Collective; a rank may have no rows."""
    result: list[Tensor] = []
    for batch in micro_batches(rows, budget, gang):
        logprobs = gather_logprobs(target_logits(model, batch, autocast), batch.targets).cpu()
        if batch.rows:
            result += logprobs.split([len(rows[i].targets_K) for i in batch.rows])
    return result
