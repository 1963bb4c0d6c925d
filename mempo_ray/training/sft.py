"""Cold start: the order, the size and the learning rate of supervised steps. Pure; imports no torch.

    SftBatch (all rows) ─ sft_batches ─▶ SftBatch per step ─▶ SftCommand(lr = sft_lr(step), …) to the gang

The step itself is `step.supervised_step`: loss = −Σ log π(output token) / num_target_tokens, over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from mempo_ray.contracts import SftBatch
from mempo_ray.training.rows import pack


def sft_batches(rows: SftBatch, batch_tokens: int, epochs: int, seed: int) -> Iterator[SftBatch]:
    """Each epoch's rows in a seeded order, cut into steps of at most `batch_tokens` (prompt + output)."""
    lengths_S = rows.ragged["prompt_ids"].lengths + rows.ragged["output_ids"].lengths
    for epoch in range(epochs):
        order = np.random.default_rng((seed, epoch)).permutation(len(rows))
        for group in pack(lengths_S[order].tolist(), batch_tokens):
            yield rows.take(order[group])


def num_sft_steps(rows: SftBatch, batch_tokens: int, epochs: int, seed: int) -> int:
    """How many batches `sft_batches` yields: the `total` of `sft_lr`."""
    lengths_S = rows.ragged["prompt_ids"].lengths + rows.ragged["output_ids"].lengths
    orders = (np.random.default_rng((seed, epoch)).permutation(len(rows)) for epoch in range(epochs))
    return sum(len(pack(lengths_S[order].tolist(), batch_tokens)) for order in orders)


def num_target_tokens(batch: SftBatch) -> int:
    """The denominator of a step's loss."""
    return len(batch.ragged["output_ids"].values)


def sft_lr(step: int, total: int, peak: float, warmup_share: float) -> float:
    """Learning rate of step 0 … total−1: linear rise over `warmup_share` of the steps, then a cosine to 0."""
    warmup = math.ceil(total * warmup_share)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1)))
