"""From one published set of weights to every serving engine that has proven it.

transport   when (auto)                              how
pull        CPU, and elastic or restarted engines    each engine reads `manifest.uri`
nccl        GPUs, a fixed pool                       the trainer broadcasts, then each engine proves
ipc         engine and policy on the same GPUs       the trainer lends CUDA memory, then each engine proves

An engine on a node that has no such folder gets its files through the object store (`Snapshots`).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mempo_ray.actors.calls import DIED, answer, first_line
from mempo_ray.config.schema import Config
from mempo_ray.contracts import WeightManifest
from mempo_ray.errors import EngineFailed, InfrastructureError, TrainingError

T = TypeVar("T")
Transport = Literal["pull", "nccl", "ipc"]

Update = Callable[[WeightManifest], Awaitable[float]]
"""`RolloutActor.update` of one engine, with its reference awaited; returns the proof's gap."""

Push = Callable[[], Awaitable[Mapping[str, str]]]
"""The trainer's side of nccl and ipc: sends the published weights through vLLM's transfer engine to all engines.
Returns the engines that failed it, by name, with the reason; its deadline is its own."""

PushInto = Callable[[Mapping[str, ActorHandle]], Awaitable[Mapping[str, str]]]
"""The same, into the engines given by name."""


class EngineClient:
    """vLLM's `VLLMWeightSyncClient` over RolloutActors: rank 0 takes each step on all of them at once.

    vLLM's own Ray client gives every actor the same place in the NCCL group (it drives one data-parallel engine); here
    each engine is one of its own, so engine i begins at rank 1 + i · `gpus_per_engine`.

    An engine that fails a step is left out of the following ones and named in `failed`. Over IPC the others get their
    weights all the same. An NCCL group is complete or useless: there a failure before the broadcast raises.

    Args:
        engines: by the names under which they are to be named in `failed`.
        timeout_s: for all steps together.
        is_group: over NCCL.
    """

    def __init__(
        self, engines: Mapping[str, ActorHandle], gpus_per_engine: int, timeout_s: float, is_group: bool
    ) -> None:
        self._engines, self._gpus_per_engine, self._timeout_s = dict(engines), gpus_per_engine, timeout_s
        self._is_group = is_group
        self._deadline = time.monotonic() + timeout_s
        self.failed: dict[str, str] = {}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._all("init", *places(init_info, len(self._engines), self._gpus_per_engine))

    def start_weight_update(self) -> None:
        self._all("start")

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._all("update", *[update_info] * len(self._engines))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish")

    def _all(self, step: str, *infos: object) -> None:
        calls = {
            name: engine.transfer.remote(step, info)
            for (name, engine), info in itertools.zip_longest(self._engines.items(), infos)
            if name not in self.failed
        }
        for name, call in calls.items():
            try:
                ray.get(call, timeout=max(0.0, self._deadline - time.monotonic()))
            except GetTimeoutError:
                self.failed[name] = f"weight push, {step}: no answer within weight_sync.timeout_s={self._timeout_s:g} s"
            except (*DIED, InfrastructureError) as error:
                self.failed[name] = f"weight push, {step}: {first_line(error)}"
        if self._is_group and self.failed and step in ("init", "start"):
            raise EngineFailed(f"weight push, {step}: {len(self.failed)} engines failed it; nothing was sent")


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
    """By engine: whose proof had which largest |Δ log-prob|, and who must be replaced and why."""

    gaps: Mapping[str, float]
    failed: Mapping[str, str]


async def sync_engines(
    manifest: WeightManifest, engines: Mapping[str, Update], timeout_s: float, push: Push | None = None
) -> SyncOutcome:
    """Bring all engines to the manifest's version at once, each proven. A failed one does not hold up the rest.

    With `push` the trainer sends first and the engines only prove; where it failed for one, the others may hold part
    of the weights and pull. A restarted or joining engine calls the same `update(manifest)` by itself and pulls.

    Raises:
        TrainingError: no engine is left and at least one holds other weights than the policy's.
    """
    failed: dict[str, str] = {}
    if push is not None:
        failed |= await push()
        manifest = manifest if failed else replace(manifest, uri="")
    names = [name for name in engines if name not in failed]
    results = await asyncio.gather(
        *(_within(engines[name](manifest), timeout_s) for name in names), return_exceptions=True
    )
    gaps: dict[str, float] = {}
    for name, result in zip(names, results, strict=True):
        if isinstance(result, (InfrastructureError, TrainingError)):
            failed[name] = str(result)
        elif isinstance(result, BaseException):
            raise result
        else:
            gaps[name] = result
    if not gaps and any(isinstance(result, TrainingError) for result in results):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        raise TrainingError(f"no engine took over weights {manifest.version}: {reasons}")
    return SyncOutcome(gaps, failed)


async def _within(work: Awaitable[T], timeout_s: float) -> T:
    try:
        return await asyncio.wait_for(work, timeout_s)
    except TimeoutError:
        raise EngineFailed(f"no proven weights within weight_sync.timeout_s={timeout_s:g} s") from None


@ray.remote(num_cpus=0)
def read_files(folder: str) -> Iterator[tuple[str, np.ndarray]]:
    """(name, uint8 [bytes]) of every file of a folder, for `num_returns="streaming"`: its caller owns them."""
    try:
        for path in sorted(Path(folder).iterdir()):
            yield path.name, np.fromfile(path, np.uint8)
    except OSError as error:
        raise EngineFailed(f"published weights: {error}") from None


class Snapshots:
    """Brings published folders to engines whose nodes do not have them, file by file through the object store.

    A folder is read once, by a task on its own node, for all engines that want it at the time; each node fetches a file
    once. Nothing is kept when the last of them has it.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s  # for one file
        self._files: dict[str, asyncio.Task[list[ray.ObjectRef]]] = {}
        self._users: Counter[str] = Counter()

    async def within_reach(self, manifest: WeightManifest, engine: ActorHandle, node: str) -> WeightManifest:
        """The manifest with a `uri` that an engine on `node` can read. Raises EngineFailed, DeadlineExceeded."""
        if manifest.node in ("", node) or not manifest.uri or "://" in manifest.uri:
            return manifest
        if await self._answer(engine.sees.remote(manifest.uri)):
            return manifest
        folder = ""
        async with self._read(manifest) as files:
            for number, file in enumerate(files):
                folder = await self._answer(engine.receive.remote(file, number == 0))
        return replace(manifest, uri=folder, node=node)

    async def _answer(self, reference: ray.ObjectRef) -> Any:
        try:
            return await answer(reference, "published weights", self._timeout_s, EngineFailed)
        except RayError as error:  # its node is gone, or the file could not be kept
            raise EngineFailed(f"published weights: {first_line(error)}") from error

    @asynccontextmanager
    async def _read(self, manifest: WeightManifest) -> AsyncGenerator[list[ray.ObjectRef]]:
        uri = manifest.uri
        self._users[uri] += 1
        try:
            if uri not in self._files:
                self._files[uri] = asyncio.create_task(_references(manifest))
            yield await asyncio.shield(self._files[uri])
        finally:
            self._users[uri] -= 1
            if not self._users[uri]:
                self._files.pop(uri).cancel()
                del self._users[uri]


async def _references(manifest: WeightManifest) -> list[ray.ObjectRef]:
    here = NodeAffinitySchedulingStrategy(manifest.node, soft=False)
    stream = read_files.options(num_returns="streaming", scheduling_strategy=here).remote(manifest.uri)
    return [file async for file in stream]  # pyrefly: ignore[not-iterable]
