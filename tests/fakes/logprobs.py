"""A `ports.LogProbs` over a dictionary, which can refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from mempo_ray.contracts import LogProbRequest, LogProbResult
from mempo_ray.errors import Overloaded
from tests.fakes.rollouts import VERSION

Key = tuple[str, int]

PROBABILITIES = {("q", 0): (0.5, 0.3, 0.8, 0.2), ("q", 1): (0.1, 0.2)}
"""The worked example of algorithm.md §4: P_mem and P_full of each turn in turn, so R^M = [.2, .6] and [−.1]."""


class FakeLogProbs:
    """Answers a memory request with `probabilities`, a KL request with log-probs of −1 (live) or −2 (reference).

    The first `refusals` calls raise Overloaded. `journal` keeps what was asked; `was_asked` is set by the first call.
    """

    def __init__(self, probabilities: Mapping[Key, Sequence[float]] = PROBABILITIES, refusals: int = 0) -> None:
        self._probabilities, self._refusals = probabilities, refusals
        self._num_missing, self._complete = 0, asyncio.Event()
        self.journal: list[str] = []
        self.was_asked = asyncio.Event()

    async def __call__(self, request: LogProbRequest) -> LogProbResult:
        self.journal.append(request.id)
        self.was_asked.set()
        if self._refusals:
            self._refusals -= 1
            raise Overloaded("the queue is full")
        if self._num_missing:
            self._num_missing -= 1
            if not self._num_missing:
                self._complete.set()
            await self._complete.wait()
        return LogProbResult(request.id, VERSION, tuple(self._logprobs(request)))

    async def begin(self, num_requests: int) -> None:
        self.journal.append(f"begin {num_requests}")
        self._num_missing, self._complete = num_requests, asyncio.Event()

    def _logprobs(self, request: LogProbRequest) -> list[np.ndarray]:
        kind, task_id, sibling, _ = request.id.split("/")
        if kind == "memory":
            values = np.log(self._probabilities[task_id, int(sibling)])
        else:
            values = np.full(len(request.marked), -1.0 if kind == "kl-live" else -2.0)
        lengths = [stop - start for start, stop in (request.segments[i].targets for i in request.marked)]
        return [np.full(n, value, np.float32) for n, value in zip(lengths, values, strict=True)]
