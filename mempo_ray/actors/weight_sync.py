"""From one published set of weights to every serving engine that has proven it.

transport   when (auto)                              how
pull        CPU, and elastic or restarted engines    each engine reads `manifest.uri`
nccl        GPUs, a fixed pool                       the trainer broadcasts, then each engine proves
ipc         engine and policy on the same GPUs       the trainer lends CUDA memory, then each engine proves
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from mempo_ray.config.schema import Config
from mempo_ray.contracts import WeightManifest
from mempo_ray.errors import EngineFailed, InfrastructureError, TrainingError
from mempo_ray.ports import SyncReport

T = TypeVar("T")
Transport = Literal["pull", "nccl", "ipc"]

Update = Callable[[WeightManifest], Awaitable[float]]
"""`RolloutActor.update` of one engine, with its reference awaited; returns the proof's gap."""

Push = Callable[[WeightManifest], Awaitable[None]]
"""The trainer's side of nccl and ipc: sends the weights through vLLM's transfer engine to all engines at once."""


def choose_transport(config: Config) -> Transport:
    """What `weight_sync.transport: auto` means for this run; an explicit choice is taken as it is.

    IPC needs both sides on the same GPUs. A NCCL group is fixed, so a pool that may grow or shrink pulls.
    """
    if config.weight_sync.transport != "auto":
        return config.weight_sync.transport
    if config.placement.layout == "cpu" or config.policy.device == "cpu":
        return "pull"
    if config.placement.layout == "colocated":
        return "ipc"
    fixed_pool = config.rollout.min_replicas == config.rollout.max_replicas
    return "nccl" if fixed_pool else "pull"


@dataclass(frozen=True)
class SyncOutcome:
    """Who holds the version now, and who must be restarted and why."""

    report: SyncReport
    failed: Mapping[str, str]  # engine name → reason


async def sync_engines(
    manifest: WeightManifest, engines: Mapping[str, Update], timeout_s: float, push: Push | None = None
) -> SyncOutcome:
    """Bring all engines to the manifest's version at once, each proven. A failed one does not hold up the rest.

    With `push` the trainer sends first and the engines only prove. A restarted or joining engine calls the same
    `update(manifest)` by itself and pulls.

    Raises:
        TrainingError: no engine is left and at least one holds other weights than the policy's.
        EngineFailed: no engine is left, for other reasons.
    """
    begin = time.monotonic()
    if push is not None:
        await _within(push(manifest), timeout_s)
        manifest = replace(manifest, uri="")
    names = list(engines)
    results = await asyncio.gather(
        *(_within(engines[name](manifest), timeout_s) for name in names), return_exceptions=True
    )
    gaps: list[float] = []
    failed: dict[str, Exception] = {}
    for name, result in zip(names, results, strict=True):
        if isinstance(result, (InfrastructureError, TrainingError)):
            failed[name] = result
        elif isinstance(result, BaseException):
            raise result
        else:
            gaps.append(result)
    if names and not gaps:
        reasons = "; ".join(f"{name}: {error}" for name, error in failed.items())
        unverified = any(isinstance(error, TrainingError) for error in failed.values())
        raise (TrainingError if unverified else EngineFailed)(
            f"no engine took over weights {manifest.version}: {reasons}"
        )
    report = SyncReport(
        manifest.version, seconds=time.monotonic() - begin, num_engines=len(gaps), max_gap=max(gaps, default=0.0)
    )
    return SyncOutcome(report, {name: str(error) for name, error in failed.items()})


async def _within(work: Awaitable[T], timeout_s: float) -> T:
    try:
        return await asyncio.wait_for(work, timeout_s)
    except TimeoutError:
        raise EngineFailed(f"no proven weights within weight_sync.timeout_s={timeout_s:g} s") from None
