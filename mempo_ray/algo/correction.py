"""Weight for the gap between the engine that sampled and the policy that trains (truncated importance sampling)."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to ± this before exp: e^20 is far outside any clip range, e^90 overflows float32."""


def correction_weight(old_logp: Tensor, sampler_logp: Tensor, *, cap: float) -> Tensor:
    """min(exp(log π_old − log π_sampler), cap) per token, detached; exactly 1 where the two are equal (§5).

    It multiplies the surrogate only, neither the KL nor the entropy term.
    """
    return (old_logp - sampler_logp).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=cap)
