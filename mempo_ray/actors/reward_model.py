"""A reward model on its own placement (`style: model`): single requests in, micro-batches through one forward.

consumes   (question, the policy's turns) of one trajectory
produces   Scored | Unscored; with `process` also a score for each turn
waits      `reward_model.timeout_s`, of these at most `max_wait_s` for company (batch_queue.py)
on failure Unscored: timeout, data (not readable by its template), infrastructure (the model broke)
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Sequence

import ray

from mempo_ray.actors.batch_queue import BatchQueue
from mempo_ray.actors.names import own_name
from mempo_ray.batching.runner import Ran
from mempo_ray.batching.scheduler import Limits
from mempo_ray.config.schema import RewardModel as RewardModelSection
from mempo_ray.contracts import Score, Scored, Unscored
from mempo_ray.errors import DataError, DeadlineExceeded, InfrastructureError
from mempo_ray.training.reward_model import Conversation, RewardModel

MAX_QUEUED_TOKENS = 10_000_000

AGGREGATES = {"last": lambda steps: steps[-1], "min": min, "mean": statistics.fmean, "none": lambda steps: 0.0}


class RewardModelRunner:
    """A `batching.Runner` over the model. One micro-batch at a time, in a thread."""

    pads = True

    def __init__(self, model: RewardModel) -> None:
        self._model = model

    def cost(self, request: Conversation) -> int:
        return len(request.ids)

    async def run(self, requests: Sequence[Conversation]) -> Ran[tuple[float, ...]]:
        """A forward that fails (out of memory, a broken device) leaves its own micro-batch without scores, no other."""
        try:
            scores = await asyncio.to_thread(self._model.score, requests)
        except (RuntimeError, IndexError) as error:  # torch's own
            failure = InfrastructureError(f"the reward model's forward failed: {type(error).__name__}: {error}")
            return Ran([failure] * len(requests), 0, 0)
        computed = len(requests) * max(len(request.ids) for request in requests)
        return Ran(scores, computed, computed - sum(len(request.ids) for request in requests))


class RewardModelWorker:
    """Lives in one event loop."""

    def __init__(self, name: str, settings: RewardModelSection) -> None:
        """Raises ConfigError: there is no reward model in the folder."""
        self._name = name
        self._settings = settings
        self._model = RewardModel.from_folder(settings)
        limits = Limits(settings.micro_batch_tokens, 1, settings.max_wait_s, MAX_QUEUED_TOKENS, pads=True)
        self._queue = BatchQueue(RewardModelRunner(self._model), limits, f"scores of {name}")
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        return f"RewardModelWorker({own_name()}, {self._name})"

    async def ping(self) -> None:
        """Returns once the actor has started."""

    async def score(self, question: str, turns: Sequence[str]) -> Score:
        """The score of one trajectory. `process_scores` (one a turn) where the section says `process`.

        extra: truncated, its first tokens were too many.
        """
        settings = self._settings
        try:
            conversation = self._model.encode(question, turns)
            steps = await self._queue.ask(conversation, id=f"{next(self._numbers)}", timeout_s=settings.timeout_s)
        except DataError as error:
            return Unscored(str(error), "data")
        except DeadlineExceeded as error:
            return Unscored(str(error), "timeout")
        except InfrastructureError as error:
            return Unscored(str(error), "infrastructure")
        extra = {"truncated": conversation.truncated}
        return Scored(AGGREGATES[settings.aggregate](steps), extra, steps if settings.process else None)

    async def take_stats(self) -> dict[str, float]:
        """`BatchQueue.take_stats`."""
        return self._queue.take_stats()

    async def close(self) -> None:
        await self._queue.close()


RewardModelActor = ray.remote(max_concurrency=4096)(RewardModelWorker)  # pyrefly: ignore[unexpected-keyword]
