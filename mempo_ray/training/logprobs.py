"""Log-probs of marked tokens: a forest's passes → one forward each.

    ForestPlan ─▶ MicroBatch ─ model(logits_to_keep = predictors) ─▶ logits [U, vocab] ─▶ log-probs [K]

Ranks take part in every forward of every other: the number of passes is the largest of any rank, and a rank with
fewer passes runs a dummy row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from mempo_ray.training.attention import TreeAttention, tree_attention
from mempo_ray.training.forest import ForestPlan, Pass, plan_forest
from mempo_ray.training.rows import DUMMY
from mempo_ray.training.sharding import Gang


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """A `forest.Pass` as tensors. `rows` are indices in the planned list; empty = a dummy pass."""

    rows: tuple[int, ...]
    ids: Tensor  # int64 [1, T]
    position_ids: Tensor  # int64 [1, T]: depths
    attention: TreeAttention
    predictors: Tensor  # int64 [U]: where in T logits are wanted
    temperature: Tensor  # float32 [U]
    slots: Tensor  # int64 [K]: which of the logits predicts each target
    targets: Tensor  # int64 [K]: ids
    num_targets: list[int]  # of each row


def micro_batches(plan: ForestPlan, gang: Gang) -> Iterator[MicroBatch]:
    """The plan's passes, then dummies until every rank has done the same number. Collective."""
    for index in range(int(gang.max(len(plan.passes)))):
        yield _micro_batch(plan.passes[index] if index < len(plan.passes) else _dummy(), gang.device)


def _dummy() -> Pass:
    (dummy,) = plan_forest([DUMMY], 1).passes
    return replace(dummy, rows=())


def _micro_batch(one: Pass, device: torch.device) -> MicroBatch:
    def put(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return MicroBatch(
        rows=one.rows,
        ids=put(one.ids_T)[None],
        position_ids=put(one.depths_T)[None],
        attention=tree_attention(one, device),
        predictors=put(one.predictors_U),
        temperature=put(one.temperature_U),
        slots=put(one.slots_K),
        targets=put(one.targets_K),
        num_targets=list(one.num_targets),
    )


def target_logits(model: nn.Module, batch: MicroBatch, autocast: str) -> Tensor:
    """Logits / temperature, [U, vocab], at least float32. The root module is called, as FSDP's hooks require."""
    cast = torch.autocast(batch.ids.device.type, torch.bfloat16) if autocast == "bfloat16" else contextlib.nullcontext()
    with cast:
        logits = model(
            input_ids=batch.ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.predictors,
            tree=batch.attention,
        ).logits[0]
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / batch.temperature[:, None]


def gather_logprobs(logits: Tensor, batch: MicroBatch) -> Tensor:
    """log softmax(logits) of the batch's targets: [U, vocab] → [K]."""
    return torch.log_softmax(logits, -1)[batch.slots, batch.targets]


@torch.no_grad()
def row_logprobs(model: nn.Module, plan: ForestPlan, autocast: str, gang: Gang) -> list[Tensor]:
    """Log-probs [K] of the targets of each planned row, on the CPU, in the caller's order. Collective."""
    result = [torch.empty(0)] * plan.num_rows
    for batch in micro_batches(plan, gang):
        logprobs = gather_logprobs(target_logits(model, batch, autocast), batch).cpu()
        for row, own in zip(batch.rows, logprobs.split(batch.num_targets), strict=False):  # a dummy's are nobody's
            result[row] = own
    return result
