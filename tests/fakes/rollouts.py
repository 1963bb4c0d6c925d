"""A `ports.Rollouts` whose episodes have already ended."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from mempo_ray.contracts import (
    EndReason,
    EpisodeRequest,
    Finished,
    PayloadRef,
    Probe,
    TrajectorySummary,
    WeightManifest,
)
from mempo_ray.ports import EngineStatus, SyncReport

VERSION = 3
"""Of the weights that sampled what `finished` gives."""


def finished(
    task_id: str,
    sibling: int,
    *,
    turns: int = 1,
    end_reason: EndReason = EndReason.ANSWERED,
    version: int = VERSION,
    output_tokens: int = 5,
) -> Finished:
    summary = TrajectorySummary(
        task_id=task_id,
        sibling=sibling,
        attempt=0,
        end_reason=end_reason,
        detail="the engine died" if end_reason.is_infrastructure else "",
        format_valid=True,
        prompt_tokens_S=(4,) * turns,
        output_tokens_S=(output_tokens,) * turns,
        tool_tokens_S=(3,) * (turns - 1) + (0,) * min(turns, 1),
        memory_tokens_S=(2,) * turns,
        weight_versions_S=(version,) * turns,
        probes=(Probe((7, 8, 9), 1, 2),),
    )
    return Finished(summary, PayloadRef(f"{task_id}/{sibling}", None) if turns else None)


class FakeRollouts:
    """Yields what it is given, in that order; `between(i)` runs before trajectory i. Its engines obey at once."""

    def __init__(
        self,
        ended: Sequence[Finished],
        between: Callable[[int], Awaitable[None]] | None = None,
        num_engines: int = 1,
    ) -> None:
        self._ended, self._between = ended, between
        self._engines = {name: EngineStatus(name, "stale", -1) for name in map("rollout-{}".format, range(num_engines))}

    async def run(self, requests: Sequence[EpisodeRequest]) -> AsyncIterator[Finished]:
        for index, one in enumerate(self._ended):
            if self._between is not None:
                await self._between(index)
            yield one

    async def sync(self, manifest: WeightManifest) -> SyncReport:
        for engine in self.engines():
            if engine.state != "draining":
                self._engines[engine.name] = EngineStatus(engine.name, "serving", manifest.version)
        num_serving = sum(engine.state == "serving" for engine in self.engines())
        return SyncReport(manifest.version, seconds=0.0, num_engines=num_serving, max_gap=0.0)

    def engines(self) -> list[EngineStatus]:
        return list(self._engines.values())

    async def drain(self, engine: str) -> None:
        self._engines[engine] = EngineStatus(engine, "draining", self._engines[engine].weight_version)
