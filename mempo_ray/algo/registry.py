"""Pieces of the algorithm that a configuration names; a plugin may add its own. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mempo_ray.registry import Registry

ADV_ESTIMATORS: Registry[Callable[..., Any]] = Registry("algorithm.adv_estimator")
"""`algo.estimators.Estimator`; a function of one group's scores becomes one by `algo.estimators.per_group`."""

POLICY_LOSSES: Registry[Callable[..., Any]] = Registry("algorithm.policy_loss")
"""(`algo.policy_loss.Tokens`, algorithm settings) → `algo.policy_loss.Surrogate`."""

MEMORY_REWARDS: Registry[Any] = Registry("memory_reward.name")
"""`algo.memory_reward.MemoryRewardMethod`."""

MEMORY_REWARDS.register_path("mempo", "mempo_ray.algo.memory_reward:MEMPO")
for _name, _function in {
    "grpo": "grpo",
    "dr_grpo": "dr_grpo",
    "rloo": "rloo",
    "opo": "opo",
    "gdpo": "gdpo",
    "reinforce++": "reinforce_plus_plus",
    "gae": "gae_by_turn",
}.items():
    ADV_ESTIMATORS.register_path(_name, f"mempo_ray.algo.estimators:{_function}")
for _name in ("ppo_clip", "gspo", "cispo", "sapo", "gpg", "clip_cov"):
    POLICY_LOSSES.register_path(_name, f"mempo_ray.algo.policy_loss:{_name}")
