"""Attention over the tokens of a `forest.Pass`: each sees its own path from the root and nothing else.

Two kernels behind one call, exact to float32 rounding. On CPU, one scaled-dot-product attention for each block of the
pass: keys are views or short copies, and what a probe does not see is not computed. On CUDA, FlexAttention with the one
line that depth-first order allows; a dense mask over the pass is exact too, but computes the whole square.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from mempo_ray.training.forest import Block, Pass, Range


class TreeAttention(Protocol):
    """query [1, H, T, D], key and value [1, H_kv, T, D] → [1, H, T, D]. H is a multiple of H_kv."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor: ...


def tree_attention(one: Pass, device: torch.device) -> TreeAttention:
    """The kernel that serves `device`. No dropout in either: the log-probs must be those of the sampler."""
    return FlexTree(one, device) if device.type == "cuda" else BlockwiseTree(one)


class BlockwiseTree:
    """A block at a time, with PyTorch's own kernel."""

    def __init__(self, one: Pass) -> None:
        self._blocks = one.blocks

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        attend = functools.partial(
            F.scaled_dot_product_attention, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return torch.cat([_attend(block, attend, query, key, value) for block in self._blocks], 2)


def _attend(block: Block, attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    own = (block.start, block.stop)
    key, value = _take(key, (*block.prefix, own)), _take(value, (*block.prefix, own))
    if block.is_square:
        square = attend(_take(query, (*block.prefix, own)), key, value, is_causal=True)
        return square[:, :, block.num_prefix :]
    query = _take(query, (own,))
    shape = (query.shape[2], key.shape[2])
    mask = torch.full(shape, float("-inf"), dtype=query.dtype, device=query.device).triu_(block.num_prefix + 1)
    return attend(query, key, value, attn_mask=mask)


def _take(tensor: Tensor, ranges: tuple[Range, ...]) -> Tensor:
    parts = [tensor[:, :, start:stop] for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


class FlexTree:
    """FlexAttention: one kernel for the whole pass, which skips the blocks of 128 × 128 that nobody sees."""

    def __init__(self, one: Pass, device: torch.device) -> None:
        self._mask = block_mask(one.ends_T, device)
        self._kernel = _compiled_flex() if device.type == "cuda" else flex_attention  # eager: the reference of tests

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        gqa = query.shape[1] != key.shape[1]
        return self._kernel(query, key, value, block_mask=self._mask, scale=scale, enable_gqa=gqa)


def block_mask(ends_T: np.ndarray, device: torch.device, size: int = 128) -> BlockMask:
    """The rule i sees j ⇔ j ≤ i < ends_T[j], by blocks of `size`: those with nothing to see, with all, and the rest.

    What `create_block_mask` finds by trying all T² pairs (10 GB for 100,000 tokens) follows from the ends: of two
    different blocks, some query sees some key where the last end of the keys lies behind the first query, and every
    query sees every key where their first end lies behind the last query.
    """
    ends = torch.from_numpy(ends_T).to(device)

    def sees(_batch: Tensor, _head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i < ends[j])

    starts_B = np.arange(0, len(ends_T), size)
    first_B, last_B = np.minimum.reduceat(ends_T, starts_B), np.maximum.reduceat(ends_T, starts_B)
    before = np.tri(len(starts_B), k=-1, dtype=bool)  # [query block, key block]
    some = before & (last_B > starts_B[:, None]) | np.eye(len(starts_B), dtype=bool)
    full = before & (first_B >= starts_B[:, None] + size)
    return BlockMask.from_kv_blocks(
        *_numbers(some & ~full, device), *_numbers(full, device), size, sees, (len(ends_T), len(ends_T))
    )


def _numbers(blocks: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """How many key blocks each query block has, and which: int32 [1, 1, B] and [1, 1, B, B], those first."""
    num, order = blocks.sum(1), np.argsort(~blocks, axis=1, kind="stable")
    return (
        torch.from_numpy(num.astype(np.int32)).to(device)[None, None],
        torch.from_numpy(order.astype(np.int32)).to(device)[None, None],
    )


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=True)  # passes differ in length: one program for all
