"""Soft penalty for long responses (DAPO, Yu et al. 2025, eq. 13)."""

from __future__ import annotations


def overlong_penalty(
    num_tokens: int, *, max_response_tokens: int, buffer_tokens: int, penalty_factor: float = 1.0
) -> float:
    """0 up to max − buffer, then falling linearly to −penalty_factor at max, and on beyond it.

    Example: max 100, buffer 20, factor 0.5: 80 tokens → 0, 95 → −0.375, 100 → −0.5.
    """
    excess = num_tokens - (max_response_tokens - buffer_tokens)
    return min(-excess / buffer_tokens * penalty_factor, 0.0)
