"""Pieces of the algorithm that a configuration names; a plugin may add its own. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mempo_ray.registry import Registry

ADV_ESTIMATORS: Registry[Callable[..., Any]] = Registry("algorithm.adv_estimator")
"""(scores_G float64 [G], algorithm settings) → float64 [G], for one group of survivors."""

POLICY_LOSSES: Registry[Callable[..., Any]] = Registry("algorithm.policy_loss")
"""Signature of `algo.policy_loss.surrogate`."""

POLICY_LOSSES.register_path("ppo_clip", "mempo_ray.algo.policy_loss:surrogate")
