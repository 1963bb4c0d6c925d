"""What the driver tells the policy to train on, and what comes back.

Advantages travel by value (two numbers per turn); token ids stay in the payloads.
The rank expands them: A[k] = outcome of turn t + (memory of turn t if k lies in its <mem> span), algorithm.md §4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mempo_ray.contracts.trajectory import PayloadRef, TrajectorySummary


@dataclass(frozen=True)
class TrainItem:
    """One surviving trajectory: its payload (one row per turn) and its advantages."""

    payload: PayloadRef
    summary: TrajectorySummary
    outcome_advantage_S: tuple[float, ...]  # equal in all turns, unless the estimator knows turns
    memory_advantage_S: tuple[float, ...]  # already × weight and combined; 0 where there is no sample


@dataclass(frozen=True)
class TrainPlan:
    """One step. `mini_batches` are optimiser steps: tuples of indices into `items`, whole groups each (§5).

    `order` of the items is (task, sibling): rows are reduced in that order when `run.deterministic`.
    """

    step: int
    policy_version: int  # that sampled (synchronous) and that the plan must be trained on
    items: tuple[TrainItem, ...]
    mini_batches: tuple[tuple[int, ...], ...]

    @property
    def num_rows(self) -> int:
        return sum(item.summary.num_turns for item in self.items)


@dataclass(frozen=True)
class StepReport:
    """Result of a TrainPlan. `version` is the policy's version after it."""

    step: int
    version: int
    metrics: Mapping[str, float] = field(default_factory=dict)
