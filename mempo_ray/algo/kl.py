"""KL(π ‖ π_ref) per token from sampled tokens (Schulman, "Approximating KL divergence", 2020)."""

from __future__ import annotations

from torch import Tensor

from mempo_ray.algo.correction import MAX_LOG_RATIO

MAX_K3 = 10.0
"""k3 grows like exp(−log ratio); one token must not decide a step."""


def kl_estimate(logp: Tensor, ref_logp: Tensor, *, estimator: str) -> Tensor:
    """Estimate per token, same shape as `logp`, with gradient through `logp`.

    With d = logp − ref_logp:

        k1   d                        unbiased, may be negative
        abs  |d|
        k2   d² / 2                   its gradient is an unbiased gradient of the KL
        k3   exp(−d) + d − 1          unbiased, ≥ 0; clamped to ± 10
    """
    diff = logp - ref_logp
    if estimator == "k1":
        return diff
    if estimator == "abs":
        return diff.abs()
    if estimator == "k2":
        return diff.square() / 2
    if estimator == "k3":
        diff = diff.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return ((-diff).exp() + diff - 1).clamp(-MAX_K3, MAX_K3)
    raise ValueError(f"unknown KL estimator {estimator!r}")
