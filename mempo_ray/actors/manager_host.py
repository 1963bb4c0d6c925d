"""One reward manager, with its scorers where they belong: threads, killable processes, or Ray actors.

    response ──place_of──▶ thread    the manager in a thread of this process; one past its deadline is abandoned
                           sandbox   the same, no more at once than the sandbox runs: none waits there on its own time
                           process   a manager in each process of a KillablePool, which kills it at the deadline
                           ray       the same, each process a Ray actor anywhere in the cluster (`manager: remote`)

All are executors that `run_in_executor` takes. Responses that wait for a manager with `score_batch` are scored
together; if such a call fails, each of them is scored once more alone, so that only the culprit has no score. Programs
are not: one call has one `timeout_s`, in which the sandbox runs no more than a few.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from mempo_ray.actors.scorer_process import RayScorerProcess
from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Score, Unscored
from mempo_ray.errors import CallFailed, ConfigError
from mempo_ray.rewards.contract import Response, as_score
from mempo_ray.rewards.hosting import Place, host, place_of, ready, score_batch_hosted, score_hosted
from mempo_ray.rewards.isolation import START_S, KillablePool, ScorerProcess, Setup
from mempo_ray.rewards.registry import MANAGERS, load_manager

NUM_THREADS = 8  # scores that run at once in threads: shipped scorers take microseconds, others wait for a network
MAX_STUCK = 256  # threads that may hang in a scorer for ever before new ones find no thread


def scores_batches(settings: Reward) -> bool:
    return hasattr(MANAGERS.get(settings.manager), "score_batch")


def batches_in(settings: Reward, place: Place) -> bool:
    """Whether responses that wait for this place are scored together."""
    return scores_batches(settings) and place != "sandbox"


def calls_in(settings: Reward, place: Place) -> int:
    """How many calls this place runs at once."""
    if place == "sandbox":
        return settings.sandbox.concurrency
    if place == "thread":
        return 1 if scores_batches(settings) else NUM_THREADS
    return settings.processes


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
        except CallFailed:
            raise
        except Exception as error:  # a manager of a user's may raise, although it should not
            raise CallFailed(f"{type(error).__name__}: {error}", "scorer_error") from error


def scorer_processes(
    settings: Reward,
    managers: Mapping[str, Reward],
    plugins: Sequence[str],
    new_process: Callable[[], ScorerProcess] | None = None,
) -> KillablePool:
    """`reward.processes` processes, each with a manager for every part ("" = the whole reward)."""
    setup = Setup(host, (managers, tuple(plugins)), int(settings.memory_gb * 1e9))
    return KillablePool(settings.processes, settings.timeout_s, setup, new_process)


class ManagerHost:
    """Scores responses in the places that `hosting.place_of` names. Lives in one event loop.

    Args:
        part: of a hybrid reward, that this is the manager of, and
        pool: the processes that it shares with the other parts.
    """

    def __init__(
        self, settings: Reward, plugins: Sequence[str] = (), *, part: str = "", pool: KillablePool | None = None
    ) -> None:
        """Raises ConfigError: unknown manager or scorer, or a custom function that cannot be loaded."""
        self._settings = settings
        self._plugins = tuple(plugins)
        self._part, self._pool = part, pool
        self._routes: dict[Place, _Route] = {}
        self._waiting: dict[Place, deque[tuple[Response, asyncio.Future]]] = {}
        self._serving: set[asyncio.Task] = set()
        self._place_of = functools.cache(functools.partial(place_of, settings))
        route = self._route(self._place_of(""))
        if isinstance(route.executor, KillablePool):
            try:  # a mistake in the user's file ends the start of the run, not each of its scores
                route.executor.submit(ready).result(2 * START_S)
            except CallFailed as error:
                raise ConfigError(f"reward: {error}") from None

    async def score(self, response: Response) -> Score:
        place = self._place_of(response.data_source)
        route = self._route(place)
        if route.score_batch is not None:
            return await self._score_with_others(place, response)
        async with route.places:
            return await _score_alone(route, response)

    async def score_all(self, responses: Sequence[Response]) -> list[Score]:
        """In order."""
        if scores_batches(self._settings):
            return await self._score_in_batches(responses)
        return list(await asyncio.gather(*map(self.score, responses)))

    @property
    def pids(self) -> list[int]:
        """Of the scorer processes that live now."""
        pools = [route.executor for route in self._routes.values() if isinstance(route.executor, KillablePool)]
        return [pid for pool in pools for pid in pool.pids]

    async def close(self) -> None:
        """Waits for no scorer: processes are killed, threads end with this process."""
        for route in self._routes.values():
            route.executor.shutdown(wait=isinstance(route.executor, KillablePool), cancel_futures=True)

    # -- together -------------------------------------------------------------------------------------

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

    async def _score_in_batches(self, responses: Sequence[Response]) -> list[Score]:
        """By place, in calls of at most `batch_size`."""
        scores: dict[int, Score] = {}
        by_place: dict[Place, list[int]] = {}
        for i, response in enumerate(responses):
            by_place.setdefault(self._place_of(response.data_source), []).append(i)

        async def ask(route: _Route, part: Sequence[int]) -> None:
            async with route.places:
                answers = await _score_together(route, [responses[i] for i in part])
            scores.update(zip(part, answers, strict=True))

        async def ask_alone(i: int) -> None:
            scores[i] = await self.score(responses[i])

        size = self._settings.batch_size
        asks = [ask_alone(i) for i in by_place.pop("sandbox", ())]
        asks += [
            ask(self._route(place), part[start : start + size])
            for place, part in by_place.items()
            for start in range(0, len(part), size)
        ]
        await asyncio.gather(*asks)
        return [scores[i] for i in range(len(responses))]

    # -- places ---------------------------------------------------------------------------------------

    def _route(self, place: Place) -> _Route:
        """Made when the first response needs it."""
        if place not in self._routes:
            self._routes[place] = self._threads(place) if place in ("thread", "sandbox") else self._processes(place)
        return self._routes[place]

    def _threads(self, place: Place) -> _Route:
        manager = load_manager(self._settings)
        at_once = calls_in(self._settings, place)
        executor = ThreadPoolExecutor(at_once + MAX_STUCK, thread_name_prefix="scorer")
        score_batch = getattr(manager, "score_batch", None) if batches_in(self._settings, place) else None
        return _Route(executor, manager.score, score_batch, asyncio.Semaphore(at_once), self._settings.timeout_s)

    def _processes(self, place: Place) -> _Route:
        settings = self._settings
        remote = RayScorerProcess if place == "ray" else None
        executor = self._pool or scorer_processes(settings, {self._part: settings}, self._plugins, remote)
        batches = scores_batches(settings)
        places = asyncio.Semaphore(settings.processes if batches else 2**31)  # the pool has a queue of its own
        score_batch = functools.partial(score_batch_hosted, self._part) if batches else None
        return _Route(executor, functools.partial(score_hosted, self._part), score_batch, places)


async def _score_alone(route: _Route, response: Response) -> Score:
    try:
        return as_score(await route.call(route.score, response), num_turns=len(response.turns))
    except CallFailed as error:
        return Unscored(str(error), error.kind)


async def _score_together(route: _Route, responses: Sequence[Response]) -> list[Score]:
    assert route.score_batch is not None, "only managers with `score_batch` come here"
    try:
        scores = await route.call(route.score_batch, responses)
        if isinstance(scores, Sequence) and len(scores) == len(responses):
            pairs = zip(scores, responses, strict=True)
            return [as_score(score, num_turns=len(response.turns)) for score, response in pairs]
        error = CallFailed(f"score_batch gave {scores!r:.80} for {len(responses)} responses", "scorer_error")
    except CallFailed as failed:
        error = failed
    if len(responses) == 1 or error.kind == "infrastructure":
        return [Unscored(str(error), error.kind)] * len(responses)
    return list(await asyncio.gather(*(_score_alone(route, response) for response in responses)))
