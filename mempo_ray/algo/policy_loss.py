"""The policy loss of algorithm.md §5, one token at a time.

    loss = Σ_k w_k · ( c_k · surrogate_k + β · kl_k − entropy_coef · entropy_k )       k: output tokens of a mini-batch

`token_weights` puts the whole aggregation, mask and *global* denominators included, into w_k, so the sum over any
split into micro-batches and ranks is the same number and the same gradient. Tensors are [T] (packed) or [S, T].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mempo_ray.algo.correction import MAX_LOG_RATIO


class Surrogate(NamedTuple):
    """Per token: the loss, and whether a clip was active there (bool; average them over the mask)."""

    loss: Tensor
    is_clipped: Tensor
    is_dual_clipped: Tensor


def surrogate(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float
) -> Surrogate:
    """PPO's clipped surrogate with the dual clip (Schulman et al. 2017, eq. 7; Ye et al. 2020, eq. 5).

    With r = exp(logp − old_logp):  max(−r·A, −clip(r, 1−clip_low, 1+clip_high)·A), and for A < 0 at most −dual_clip·A.

    Args:
        logp: float [T], with gradient; of the policy at the sampling temperature.
        old_logp: float [T], detached. Equal to logp.detach() gives r = 1 and the plain policy gradient.
        advantages: float [T].
    """
    ratio = (logp - old_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    upper = -advantages * dual_clip
    bounded = torch.maximum(plain, clipped)
    is_dual_clipped = (advantages < 0) & (bounded > upper)
    return Surrogate(torch.where(is_dual_clipped, upper, bounded), clipped > plain, is_dual_clipped)


def token_weights(
    output_mask: Tensor,
    trajectory_tokens: Tensor | float,
    *,
    aggregation: str,
    num_trajectories: int,
    num_tokens: int,
    norm_length: int = 0,
) -> Tensor:
    """w_k of the loss sum; 0 where the mask is 0.

        trajectory_mean       1 / (N · |V(i)|)            the paper: mean over trajectories of the mean over V(i)
        token_mean            1 / Σ_i |V(i)|
        trajectory_sum        1 / N
        trajectory_sum_norm   1 / (N · norm_length)       Dr. GRPO (Liu et al. 2025), without `normalize_by_std`

    Args:
        output_mask: [T] or [S, T]; 1 where the policy sampled the token.
        trajectory_tokens: |V(i)| of the trajectory that each token belongs to, over *all* its rows, wherever they
            are; broadcastable to the mask ([S, 1] for padded rows, [T] for packed ones).
        num_trajectories: N of the mini-batch over all ranks.
        num_tokens: Σ_i |V(i)| of the mini-batch over all ranks.

    Example: trajectories with 3 and 1 output tokens, trajectory_mean: weights 1/6, 1/6, 1/6 and 1/2.
    """
    mask = output_mask.to(torch.get_default_dtype()) if not output_mask.is_floating_point() else output_mask
    if aggregation == "trajectory_mean":
        own = torch.as_tensor(trajectory_tokens, dtype=mask.dtype, device=mask.device).clamp(min=1)
        return mask / (num_trajectories * own)
    denominator = {
        "token_mean": num_tokens,
        "trajectory_sum": num_trajectories,
        "trajectory_sum_norm": num_trajectories * norm_length,
    }[aggregation]
    return mask / max(denominator, 1)


def entropy(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits) over the last axis, in nats; float32, shape logits.shape[:-1]."""
    logp = torch.log_softmax(logits.float(), dim=-1)
    return -(logp.exp() * logp).sum(-1)
