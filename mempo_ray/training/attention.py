"""Attention over the tokens of a `forest.Pass`: each sees its own path from the root and nothing else.

Two kernels behind one call, exact to float32 rounding. On CPU, one scaled-dot-product attention for each block of the
pass: keys are views or short copies, and what a probe does not see is not computed. On CUDA, FlexAttention with the one
line that depth-first order allows; a dense mask over the pass is exact too, but computes the whole square.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

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
        ends = torch.from_numpy(one.ends_T).to(device)

        def sees(_batch: Tensor, _head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (j <= i) & (i < ends[j])

        self._mask = create_block_mask(sees, None, None, one.num_tokens, one.num_tokens, device=device)
        self._kernel = _compiled_flex() if device.type == "cuda" else flex_attention  # eager: the reference of tests

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        gqa = query.shape[1] != key.shape[1]
        return self._kernel(query, key, value, block_mask=self._mask, scale=scale, enable_gqa=gqa)


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=True)  # passes differ in length: one program for all
