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
from mempo_ray.config.schema import Algorithm


class Tokens(NamedTuple):
    """What a policy loss sees: the output tokens of whole rows (turns), [T].

    logp: float, with gradient; of the policy at the sampling temperature.
    old_logp: float, detached. Equal to logp.detach() gives ratio 1 and the plain policy gradient.
    advantages: float.
    rows: int64, ascending: which row a token belongs to.
    """

    logp: Tensor
    old_logp: Tensor
    advantages: Tensor
    rows: Tensor

    @property
    def log_ratio(self) -> Tensor:
        return (self.logp - self.old_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


class Surrogate(NamedTuple):
    """Per token: the loss, and whether a clip was active there (bool; average them over the mask)."""

    loss: Tensor
    is_clipped: Tensor
    is_dual_clipped: Tensor


def ppo_clip(tokens: Tokens, settings: Algorithm) -> Surrogate:
    """`surrogate` with the clips of the configuration."""
    return surrogate(
        tokens.logp,
        tokens.old_logp,
        tokens.advantages,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
    )


def gspo(tokens: Tokens, settings: Algorithm) -> Surrogate:
    """The ratio of a whole turn, s = exp(mean log ratio), clipped and given to each of its tokens (Zheng et al. 2025,
    GSPO-token, eq. 14). Clips are per sequence, so small: the paper has 3e-4 and 4e-4."""
    num_rows = int(tokens.rows.max()) + 1
    zeros = tokens.logp.new_zeros(num_rows)
    sums = zeros.index_add(0, tokens.rows, tokens.log_ratio.detach())
    lengths = zeros.index_add(0, tokens.rows, torch.ones_like(tokens.logp))
    sequence_ratio = (sums / lengths.clamp(min=1)).exp()[tokens.rows]
    ratio = sequence_ratio * (tokens.logp - tokens.logp.detach()).exp()  # s in value, the token's own gradient
    return _clipped(ratio, tokens.advantages, settings)


def cispo(tokens: Tokens, settings: Algorithm) -> Surrogate:
    """The clipped ratio as a weight without gradient on −A · log π: none is lost to the clip (MiniMax 2025, eq. 4)."""
    ratio = tokens.log_ratio.detach().exp()
    weight = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return Surrogate(
        -weight * tokens.advantages * tokens.logp, weight != ratio, torch.zeros_like(ratio, dtype=torch.bool)
    )


def sapo(tokens: Tokens, settings: Algorithm) -> Surrogate:
    """A soft gate in the clip's place: −A · 4/τ · σ(τ (r − 1)), with a temperature for each sign of A (Gao et al. 2025,
    eq. 5–6). At r = 1 its gradient is the plain policy gradient."""
    ratio = tokens.log_ratio.exp()
    tau = torch.where(tokens.advantages > 0, settings.sapo.tau_positive, settings.sapo.tau_negative).to(ratio)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    nowhere = torch.zeros_like(ratio, dtype=torch.bool)
    return Surrogate(-tokens.advantages * gate, nowhere, nowhere)


def gpg(tokens: Tokens, settings: Algorithm) -> Surrogate:
    """The policy gradient itself, −A · log π, without ratio or clip (Chu et al. 2025, eq. 5)."""
    nowhere = torch.zeros_like(tokens.logp, dtype=torch.bool)
    return Surrogate(-tokens.advantages * tokens.logp, nowhere, nowhere)


def clip_cov(tokens: Tokens, settings: Algorithm) -> Surrogate:
    """`ppo_clip` without the tokens that collapse the entropy: of those whose covariance of log π and A lies between
    two bounds, the share `clip_cov.share` of all tokens gives no gradient (Cui et al. 2025, eq. 12–13).

    The paper draws them at random; here those of the largest covariance go, so that a run repeats itself. Mean and
    share are over a micro-batch: the one loss that depends on how rows are packed.
    """
    found = ppo_clip(tokens, settings)
    logp, advantages = tokens.logp.detach(), tokens.advantages
    covariance = (logp - logp.mean()) * (advantages - advantages.mean())
    is_candidate = (covariance > settings.clip_cov.low) & (covariance < settings.clip_cov.high) & ~found.is_clipped
    num = min(max(int(settings.clip_cov.share * len(logp)), 1), int(is_candidate.sum()))
    chosen = covariance.masked_fill(~is_candidate, -torch.inf).topk(num).indices
    is_silenced = torch.zeros_like(is_candidate).index_fill(0, chosen, True)
    return Surrogate(
        torch.where(is_silenced, found.loss.detach(), found.loss), found.is_clipped | is_silenced, found.is_dual_clipped
    )


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


def _clipped(ratio: Tensor, advantages: Tensor, settings: Algorithm) -> Surrogate:
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return Surrogate(torch.maximum(plain, clipped), clipped > plain, torch.zeros_like(ratio, dtype=torch.bool))


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
