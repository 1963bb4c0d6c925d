"""From one published set of weights to every serving engine that has proven it.

transport   when (auto)                              how
pull        CPU, and elastic or restarted engines    each engine reads `manifest.uri`
nccl        GPUs, a fixed pool                       the trainer broadcasts, then each engine proves
ipc         engine and policy on the same GPUs       the trainer lends CUDA memory, then each engine proves
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError

from mempo_ray.config.schema import Config
from mempo_ray.contracts import WeightManifest
from mempo_ray.errors import DeadlineExceeded, EngineFailed, InfrastructureError, TrainingError
from mempo_ray.ports import SyncReport

T = TypeVar("T")
Transport = Literal["pull", "nccl", "ipc"]

Update = Callable[[WeightManifest], Awaitable[float]]
"""`RolloutActor.update` of one engine, with its reference awaited; returns the proof's gap."""

Push = Callable[[], Awaitable[None]]
"""The trainer's side of nccl and ipc: sends the published weights through vLLM's transfer engine to all engines."""


class EngineClient:
    """vLLM's `VLLMWeightSyncClient` over RolloutActors: rank 0 takes each step on all of them at once.

    vLLM's own Ray client gives every actor the same place in the NCCL group (it drives one data-parallel engine); here
    each engine is one of its own, so engine i begins at rank 1 + i · `gpus_per_engine`.
    """

    def __init__(self, engines: Sequence[ActorHandle], gpus_per_engine: int, timeout_s: float) -> None:
        self._engines, self._gpus_per_engine, self._timeout_s = engines, gpus_per_engine, timeout_s

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._all("init", *places(init_info, len(self._engines), self._gpus_per_engine))

    def start_weight_update(self) -> None:
        self._all("start")

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._all("update", *[update_info] * len(self._engines))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish")

    def _all(self, step: str, *infos: object) -> None:
        calls = [engine.transfer.remote(step, info) for engine, info in itertools.zip_longest(self._engines, infos)]
        try:
            ray.get(calls, timeout=self._timeout_s)
        except GetTimeoutError:
            raise DeadlineExceeded(f"weight push, {step}: an engine did not answer in {self._timeout_s:g} s") from None
        except RayActorError as error:
            raise EngineFailed(f"weight push, {step}: {str(error).splitlines()[0]}") from error


def places(init_info: Mapping[str, object], num_engines: int, gpus_per_engine: int) -> list[Mapping[str, object]]:
    """The init info of each engine; over NCCL each has its own `rank_offset`, over IPC there is none.

    Example:
        >>> [info["rank_offset"] for info in places({"rank_offset": 1}, num_engines=3, gpus_per_engine=2)]
        [1, 3, 5]
    """
    first = init_info.get("rank_offset")
    if not isinstance(first, int):
        return [init_info] * num_engines
    return [{**init_info, "rank_offset": first + i * gpus_per_engine} for i in range(num_engines)]


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
        await _within(push(), timeout_s)
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
