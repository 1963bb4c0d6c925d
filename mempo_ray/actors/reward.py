"""RewardManagerWorker: a synchronous reward manager behind an async actor (M6).

consumes   one trajectory's payload (a top-level argument: Ray fetches it)
produces   Scored | Unscored
waits      `reward.timeout_s` for the scorer, counted from its start
on failure a scorer that raises, lies or hangs gives Unscored, never a zero; one hanging scorer blocks no other
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import ray

from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Score, TrajectoryBatch, Unscored
from mempo_ray.rewards.contract import Response, to_score
from mempo_ray.rewards.registry import load_manager

NUM_THREADS = 8  # scores that run at once: shipped scorers take microseconds, a user's may wait for a network
MAX_STUCK = 256  # threads that may hang in a scorer for ever before new ones find no thread


class RewardManagerWorker:
    """`score` runs the manager in a thread. A thread that is past its deadline is abandoned, and its place given on."""

    def __init__(self, settings: Reward, plugins: Sequence[str] = ()) -> None:
        for plugin in plugins:
            importlib.import_module(plugin)
        self._timeout_s = settings.timeout_s
        self._manager = load_manager(settings)
        self._threads = ThreadPoolExecutor(NUM_THREADS + MAX_STUCK, thread_name_prefix="scorer")
        self._places = asyncio.Semaphore(NUM_THREADS)

    def __repr__(self) -> str:
        return f"RewardManagerWorker({type(self._manager).__name__})"

    async def ping(self) -> None:
        """Returns once the actor has started."""

    async def score(self, batch: TrajectoryBatch) -> Score:
        """The outcome of the one trajectory in `batch`. kind of an Unscored: timeout | scorer_error | data | …"""
        response = to_score(batch)
        if not isinstance(response, Response):
            return response
        async with self._places:
            loop = asyncio.get_running_loop()
            scoring = loop.run_in_executor(self._threads, self._manager.score, response)
            try:
                return await asyncio.wait_for(scoring, self._timeout_s)
            except TimeoutError:
                return Unscored(f"no score within reward.timeout_s={self._timeout_s:g} s", "timeout")

    async def close(self) -> None:
        """Waits for no scorer: the actor's process ends with its threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


RewardManagerActor = ray.remote(max_concurrency=1024)(RewardManagerWorker)  # pyrefly: ignore[unexpected-keyword]
