"""RewardManagerWorker: a synchronous reward manager behind an async actor (M6).

consumes   one trajectory's payload (a top-level argument: Ray fetches it), or one of many
produces   Scored | Unscored
waits      `reward.timeout_s` for each call of a scorer, counted from its start
on failure a scorer that raises, lies, hangs or ends its process gives Unscored, never a zero, and blocks no other

    response ──place_of──▶ thread    the manager in a thread of this actor; one past its deadline is abandoned
                           process   a manager in each process of a KillablePool, which kills it at the deadline
                           ray       the same, each process a Ray actor anywhere in the cluster (`manager: remote`)

All three are executors that `run_in_executor` takes. Responses that wait for a manager with `score_batch` are scored
together; if such a call fails, each of them is scored once more alone, so that only the culprit has no score.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray

from mempo_ray.actors.calls import CLOSE_S
from mempo_ray.actors.scorer_process import RayScorerProcess
from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Score, TrajectoryBatch, Unscored
from mempo_ray.errors import CallFailed, ConfigError
from mempo_ray.rewards.contract import Response, all_to_score, to_score
from mempo_ray.rewards.hosting import Place, host, import_plugins, place_of, ready, score_batch_hosted, score_hosted
from mempo_ray.rewards.isolation import START_S, KillablePool, Setup
from mempo_ray.rewards.registry import MANAGERS, load_manager

NUM_THREADS = 8  # scores that run at once in threads: shipped scorers take microseconds, others wait for a network
MAX_STUCK = 256  # threads that may hang in a scorer for ever before new ones find no thread
QUEUED_PER_PROCESS = 4  # calls sent ahead, so that no process waits for the driver


def calls_at_once(settings: Reward) -> int:
    """How many trajectories one worker is sent before it has answered any."""
    batched = settings.batch_size if _scores_batches(settings) else 0
    return max(NUM_THREADS, QUEUED_PER_PROCESS * settings.processes, 2 * batched)


def longest_call_s(settings: Reward) -> float:
    """After which a worker that has not answered is no longer waited for: every call before it may have hung, and its
    process may have had to be started again each time."""
    return (settings.timeout_s + START_S) * calls_at_once(settings) / settings.processes + CLOSE_S


def _scores_batches(settings: Reward) -> bool:
    return hasattr(MANAGERS.get(settings.manager), "score_batch")


@dataclass(frozen=True)
class _Route:
    """An executor and what it calls. `timeout_s`: for calls that it cannot end itself."""

    executor: Executor
    score: Callable[[Response], Score]
    score_batch: Callable[[Sequence[Response]], list[Score]] | None
    places: asyncio.Semaphore
    timeout_s: float | None = None

    async def call(self, function: Callable[..., Any], argument: object) -> Any:
        """Raises CallFailed: no result, with the kind of the Unscored."""
        loop = asyncio.get_running_loop()
        try:
            return await asyncio.wait_for(loop.run_in_executor(self.executor, function, argument), self.timeout_s)
        except TimeoutError:
            raise CallFailed(f"no score within reward.timeout_s={self.timeout_s:g} s", "timeout") from None


class RewardManagerWorker:
    """Scores trajectories in the places that `hosting.place_of` names. Lives in one event loop."""

    def __init__(self, settings: Reward, plugins: Sequence[str] = ()) -> None:
        """Raises ConfigError: unknown manager or scorer, or a custom function that cannot be loaded."""
        import_plugins(plugins)
        self._settings = settings
        self._plugins = tuple(plugins)
        self._routes: dict[Place, _Route] = {}
        self._waiting: dict[Place, deque[tuple[Response, asyncio.Future]]] = {}
        self._serving: set[asyncio.Task] = set()
        MANAGERS.check(settings.manager)
        self._place_of = functools.cache(functools.partial(place_of, settings))
        route = self._route(self._place_of(""))
        if isinstance(route.executor, KillablePool):
            try:  # a mistake in the user's file ends the start of the run, not each of its scores
                route.executor.submit(ready).result(2 * START_S)
            except CallFailed as error:
                raise ConfigError(f"reward: {error}") from None

    def __repr__(self) -> str:
        return f"RewardManagerWorker({self._settings.manager})"

    async def ping(self) -> None:
        """Returns once the actor has started."""

    async def score(self, batch: TrajectoryBatch) -> Score:
        """The outcome of the one trajectory in `batch`. kind of an Unscored: timeout | scorer_error | data | …"""
        return await self._score(to_score(batch, transcript=True))

    async def score_batch(self, batch: TrajectoryBatch) -> list[Score]:
        """The outcomes of all trajectories in `batch`, in order."""
        found = all_to_score(batch, transcript=True)
        if not _scores_batches(self._settings):
            return list(await asyncio.gather(*(self._score(each) for each in found)))
        return await self._score_in_batches(found)

    async def close(self) -> None:
        """Waits for no scorer: processes are killed, threads end with the actor's own process."""
        for route in self._routes.values():
            route.executor.shutdown(wait=isinstance(route.executor, KillablePool), cancel_futures=True)

    # -- responses ------------------------------------------------------------------------------------

    async def _score(self, response: Response | Score) -> Score:
        if not isinstance(response, Response):
            return response
        place = self._place_of(response.data_source)
        route = self._route(place)
        if route.score_batch is not None:
            return await self._score_with_others(place, response)
        async with route.places:
            return await _score_alone(route, response)

    async def _score_with_others(self, place: Place, response: Response) -> Score:
        """Queue it. As many tasks as responses ask for a place; who gets one takes all that waits."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(place, deque()).append((response, future))
        task = asyncio.create_task(self._serve(place))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        return await future

    async def _serve(self, place: Place) -> None:
        route, waiting = self._routes[place], self._waiting[place]
        async with route.places:
            size = min(len(waiting), self._settings.batch_size)
            batch = [waiting.popleft() for _ in range(size)]
            if not batch:
                return
            scores = await _score_together(route, [response for response, _ in batch])
        for (_, future), score in zip(batch, scores, strict=True):
            if not future.done():  # else its caller went away
                future.set_result(score)

    async def _score_in_batches(self, found: Sequence[Response | Score]) -> list[Score]:
        """Those that need a score, by place, in calls of at most `batch_size`."""
        scores = {i: each for i, each in enumerate(found) if not isinstance(each, Response)}
        by_place: dict[Place, list[tuple[int, Response]]] = {}
        for i, each in enumerate(found):
            if isinstance(each, Response):
                by_place.setdefault(self._place_of(each.data_source), []).append((i, each))

        async def ask(route: _Route, part: Sequence[tuple[int, Response]]) -> None:
            async with route.places:
                answers = await _score_together(route, [response for _, response in part])
            scores.update(zip((i for i, _ in part), answers, strict=True))

        size = self._settings.batch_size
        asks = [
            ask(self._route(place), part[start : start + size])
            for place, part in by_place.items()
            for start in range(0, len(part), size)
        ]
        await asyncio.gather(*asks)
        return [scores[i] for i in range(len(found))]

    # -- places ---------------------------------------------------------------------------------------

    def _route(self, place: Place) -> _Route:
        """Made when the first response needs it."""
        if place not in self._routes:
            self._routes[place] = self._threads() if place == "thread" else self._processes(place)
        return self._routes[place]

    def _threads(self) -> _Route:
        manager = load_manager(self._settings)
        executor = ThreadPoolExecutor(NUM_THREADS + MAX_STUCK, thread_name_prefix="scorer")
        score_batch = getattr(manager, "score_batch", None)
        places = asyncio.Semaphore(1 if score_batch is not None else NUM_THREADS)
        return _Route(executor, manager.score, score_batch, places, self._settings.timeout_s)

    def _processes(self, place: Place) -> _Route:
        settings = self._settings
        setup = Setup(host, (settings, self._plugins), int(settings.memory_gb * 1e9))
        start = {"new_process": RayScorerProcess} if place == "ray" else {}
        executor = KillablePool(settings.processes, settings.timeout_s, setup, **start)
        batches = _scores_batches(settings)
        places = asyncio.Semaphore(settings.processes if batches else 2**31)  # the pool has a queue of its own
        return _Route(executor, score_hosted, score_batch_hosted if batches else None, places)


async def _score_alone(route: _Route, response: Response) -> Score:
    try:
        return await route.call(route.score, response)
    except CallFailed as error:
        return Unscored(str(error), error.kind)


async def _score_together(route: _Route, responses: Sequence[Response]) -> list[Score]:
    assert route.score_batch is not None, "only managers with `score_batch` come here"
    try:
        return await route.call(route.score_batch, responses)
    except CallFailed as error:
        if len(responses) == 1 or error.kind == "infrastructure":
            return [Unscored(str(error), error.kind)] * len(responses)
    return list(await asyncio.gather(*(_score_alone(route, response) for response in responses)))


RewardManagerActor = ray.remote(max_concurrency=1024)(RewardManagerWorker)  # pyrefly: ignore[unexpected-keyword]
