"""Pieces of the algorithm that a configuration names; a plugin may add its own. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mempo_ray.registry import Registry

ADV_ESTIMATORS: Registry[Callable[..., Any]] = Registry("algorithm.adv_estimator")
"""(scores_G float64 [G ≥ 2], not all equal; algorithm settings) → float64 [G]: one group of survivors."""

POLICY_LOSSES: Registry[Callable[..., Any]] = Registry("algorithm.policy_loss")
"""Signature of `algo.policy_loss.surrogate`."""

ADV_ESTIMATORS.register_path("grpo", "mempo_ray.algo.advantage:grpo")
ADV_ESTIMATORS.register_path("rloo", "mempo_ray.algo.advantage:rloo")
POLICY_LOSSES.register_path("ppo_clip", "mempo_ray.algo.policy_loss:surrogate")
