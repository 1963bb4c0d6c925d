"""Managers that differ from the naive one in where their scorers run."""

from __future__ import annotations

from mempo_ray.rewards.managers.naive import NaiveManager


class PrimeManager(NaiveManager):
    """Every scorer in a process of the worker's own pool, with `reward.timeout_s` and `reward.memory_gb`."""

    isolation = "process"


class RemoteManager(NaiveManager):
    """Every scorer in a Ray process of its own, anywhere in the cluster."""

    isolation = "ray"
