"""A gang of ranks in process: obeys at once, remembers what it was told, misbehaves on request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from mempo_ray.batching.packing import RankShare
from mempo_ray.batching.runner import Ran
from mempo_ray.contracts import (
    CommandReply,
    LogProbRequest,
    LogProbResult,
    PublishCommand,
    SftCommand,
    TrainCommand,
    WeightManifest,
    WeightProof,
)
from mempo_ray.errors import DataError, MempoError, WorkerFailed


class FakeRunner:
    """`cost` is the request's plain tokens. Requests named in `bad` fail; `gate` holds every micro-batch until set.

    `pads`: counts as if every micro-batch were padded to its longest. `token_s`: seconds a token (for fake time).
    """

    def __init__(
        self, *, bad: Sequence[str] = (), drop_results: int = 0, pads: bool = False, token_s: float = 0.0
    ) -> None:
        self.pads = pads
        self.token_s = token_s
        self.bad = set(bad)
        self.drop_results = drop_results
        self.gate = asyncio.Event()
        self.gate.set()
        self.started = asyncio.Event()
        self.micro_batches: list[tuple[str, ...]] = []
        self.version = 0

    def cost(self, request: LogProbRequest) -> int:
        return request.num_plain_tokens

    async def run(self, requests: Sequence[LogProbRequest]) -> Ran[LogProbResult]:
        self.micro_batches.append(tuple(r.id for r in requests))
        self.started.set()
        await self.gate.wait()
        await asyncio.sleep(self.token_s * sum(self.cost(r) for r in requests))
        results: list[LogProbResult | MempoError] = [
            DataError(f"{r.id} is bad") if r.id in self.bad else LogProbResult(r.id, self.version, (np.zeros(1),))
            for r in requests
        ]
        costs = [self.cost(r) for r in requests]
        num_tokens = len(costs) * max(costs) if self.pads else sum(costs)
        return Ran(results[self.drop_results :], num_tokens, num_tokens - sum(costs))


class FakeGang(FakeRunner):
    """`journal` lists what ran, in order; an update raises the version. `dies_at`: the command that loses a rank."""

    def __init__(self, num_ranks: int = 1, *, dies_at: type | None = None, **kwargs) -> None:
        super().__init__(**kwargs)
        self.num_ranks = num_ranks
        self.dies_at = dies_at
        self.journal: list[str] = []
        self.shares: list[list[RankShare]] = []

    async def run(self, requests: Sequence[LogProbRequest]) -> Ran[LogProbResult]:
        self.journal.append(f"score@{self.version}")
        if self.dies_at is LogProbRequest:
            raise WorkerFailed("rank 1 died")
        return await super().run(requests)

    async def execute(self, shares: Sequence[RankShare]) -> list[CommandReply]:
        command = shares[0].command
        self.journal.append(f"{type(command).__name__}@{self.version}")
        self.shares.append(list(shares))
        self.started.set()
        await self.gate.wait()
        if self.dies_at is not None and isinstance(command, self.dies_at):
            raise WorkerFailed("rank 1 died")
        if isinstance(command, TrainCommand | SftCommand):
            self.version += 1
        values: list[object] = [{"rank": float(i)} for i in range(self.num_ranks)]
        if isinstance(command, PublishCommand):
            values[0] = WeightManifest(self.version, command.uri, WeightProof((), ()))
        return [CommandReply(len(self.journal), self.version, value) for value in values]
