"""AgentLoopWorker: many episodes at once on one small CPU actor (algorithm.md §1; the logic is in `agent/`).

    stage     consumes          produces                     waits for           on failure
    run       EpisodeRequests   payload, summary, payload…   episodes            sampled again, then yielded broken
    generate  GenerateRequest   Generation                   a serving engine    asked again elsewhere
    call      ToolCall          passages                     agent/tools         by the tool again (search: elsewhere)

The state of an episode is small and lives here, apart from the engines: an engine may die under it, and only the turn
is asked again (its prompt is filled in anew elsewhere).
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TypeVar

import ray
from ray.actor import ActorHandle

from mempo_ray.actors.calls import answer
from mempo_ray.actors.metrics_sink import ActorGauges
from mempo_ray.actors.search import SearchClient
from mempo_ray.agent.episode import run_episode
from mempo_ray.agent.group import run_with_resamples
from mempo_ray.agent.memory import ProbeTexts, joined_probe
from mempo_ray.agent.prompt import Renderer
from mempo_ray.agent.tokenizer import FileTokenizer
from mempo_ray.agent.tools import Services, Toolbox
from mempo_ray.batching.routing import choose_engine
from mempo_ray.config.schema import Agent, Retrieval, Rollout, Sandbox
from mempo_ray.contracts import EpisodeRequest, Trajectory, TrajectoryBatch, TrajectorySummary
from mempo_ray.errors import DeadlineExceeded, EngineFailed
from mempo_ray.ports import Generate, GenerateRequest, Generation
from mempo_ray.rewards.sandbox import code_service

SUSPECT_S = 2.0
"""How long an engine that failed a turn is passed over, unless the fleet announces its engines before."""
LIVE = Retrieval()
SHUT_IN = Sandbox()

GRACE_S = 5.0
"""How much later than an engine's own deadline the caller gives up: the engine's message says more."""

QUEUE_SHARE = 0.5
"""Turns that queue in an engine, over those that it runs: they keep it busy while an answer and the next turn travel.
The rest waits here, where an engine that joins, or is free first, can have it."""

MAX_GROUPS = 4096
"""Groups whose last engine is remembered; the longest unused is forgotten first."""

T = TypeVar("T")


@dataclass
class Seat:
    """Where the last turn of an episode was served: that engine's cache may hold its prompt."""

    engine: ActorHandle | None = None
    is_lost: bool = False  # that engine failed the turn


class EnginePool:
    """`ports.Generate` over the engines that serve, as the fleet announced them last.

    A request goes where `choose_engine` says, among the engines that have room. If that engine fails it, the engine is
    suspect for a while and the request is asked elsewhere. With nowhere to go it waits in line, within its deadline: an
    engine that has room again gets the first whose group it knows, else the first of all.

    Counts, reset by whoever reads them: `num_failures`, turns that an engine failed; `num_reprefills`, turns whose
    episode had to leave its engine (it failed, drained or died), so that another fills the prompt's cache again;
    `num_repeats`, turns of a group that had an engine, and of them `num_affine` that went to the same one; `wait_s`,
    seconds that turns took, summed.
    """

    def __init__(
        self, clock: Callable[[], float] = monotonic, grace_s: float = GRACE_S, most_in_flight: float = math.inf
    ) -> None:
        self._clock, self._grace_s, self._most_in_flight = clock, grace_s, most_in_flight
        self._engines: dict[str, ActorHandle] = {}
        self._suspect_until: dict[str, float] = {}
        self._tokens_in_flight: Counter[str] = Counter()
        self._num_in_flight: Counter[str] = Counter()
        self._affinity: dict[str, str] = {}
        self._line: dict[asyncio.Future[None], str] = {}  # who waits, in order → its group
        self.wait_s = 0.0
        self.num_failures = self.num_reprefills = self.num_repeats = self.num_affine = 0

    def announce(self, engines: Mapping[str, ActorHandle]) -> None:
        """These engines serve, and no others. Clears all suspicion; a group stays with an engine that stays."""
        stays = {name for name, engine in engines.items() if self._engines.get(name) == engine}
        self._affinity = {group: name for group, name in self._affinity.items() if name in stays}
        self._engines = dict(engines)
        self._suspect_until.clear()
        for place in self._line:
            _wake(place)
        self._line.clear()

    @property
    def num_waiting(self) -> int:
        """Requests that no engine has."""
        return len(self._line)

    def for_episode(self) -> Generate:
        """The same for the turns of one episode, whose changes of engine are counted."""
        return functools.partial(self.__call__, seat=Seat())

    async def __call__(self, request: GenerateRequest, seat: Seat | None = None) -> Generation:
        """One turn."""
        num_tokens = len(request.prompt_ids) + request.max_tokens

        def generate(engine: ActorHandle, left_s: float) -> Awaitable[Generation]:
            return engine.generate.remote(replace(request, deadline_s=left_s))

        what, began = f"turn of {request.group!r}", self._clock()
        try:
            return await self.ask(what, generate, request.group, num_tokens, request.deadline_s, seat)
        finally:
            self.wait_s += self._clock() - began

    async def ask(
        self,
        what: str,
        call: Callable[[ActorHandle, float], Awaitable[T]],
        group: str,
        num_tokens: int,
        deadline_s: float,
        seat: Seat | None = None,
    ) -> T:
        """The answer of some engine to `call(engine, seconds left)`, a Ray reference.

        Args:
            group: engines keep a group together; num_tokens: what the request adds to its engine's load.
            seat: of the episode that asks.

        Raises:
            EngineFailed: no engine served it before its deadline; names the last failure.
            DeadlineExceeded: an engine had it and did not finish in time.
        """
        deadline = self._clock() + deadline_s
        failure = "none has been announced"
        while (name := await self._choose(group, deadline)) is not None:
            left_s = deadline - self._clock()
            self._tokens_in_flight[name] += num_tokens
            self._num_in_flight[name] += 1
            seat = self._seated(seat, name)
            reference = call(self._engines[name], left_s)
            try:
                return await answer(reference, f"{name}: {what}", left_s + self._grace_s, EngineFailed)
            except EngineFailed as error:
                failure, seat.is_lost = str(error), True
                self.num_failures += 1
                self._suspect_until[name] = self._clock() + SUSPECT_S
            except (DeadlineExceeded, asyncio.CancelledError):
                ray.cancel(reference)  # nobody waits any more: the engine aborts it and frees its cache
                raise
            finally:
                self._tokens_in_flight[name] -= num_tokens
                self._num_in_flight[name] -= 1
                self._call_next(name)
        raise EngineFailed(f"no engine served a {what} in {deadline_s:g} s; last: {failure}")

    async def _choose(self, group: str, deadline: float) -> str | None:
        """A serving engine, waited for until the deadline; None: it has passed."""
        is_called = not self._line  # nobody passes those who wait
        while (now := self._clock()) < deadline:
            loads = {name: self._tokens_in_flight[name] for name in self._engines if self._has_room(name, now)}
            if is_called and (name := choose_engine(loads, group, self._affinity)) is not None:
                self._keep_together(group, name)
                return name
            again = [until for until in self._suspect_until.values() if until > now]
            await self._wait_in_line(group, min([deadline, *again]) - now)
            is_called = True
        self._call_next()
        return None

    def _has_room(self, name: str, now: float) -> bool:
        return self._suspect_until.get(name, 0) <= now and self._num_in_flight[name] < self._most_in_flight

    async def _wait_in_line(self, group: str, timeout_s: float) -> None:
        """Until called, or the time is up."""
        place = asyncio.get_running_loop().create_future()
        self._line[place] = group
        try:
            async with asyncio.timeout(timeout_s):
                await place
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            if place.done():
                self._call_next()  # it does not come: the next one may
            raise
        finally:
            self._line.pop(place, None)

    def _call_next(self, name: str = "") -> None:
        """Somebody from the line: the first whose group engine `name`, which has room, knows; else the first."""
        if self._line:
            known = (place for place, group in self._line.items() if self._affinity.get(group) == name)
            place = next(known, None) or next(iter(self._line))
            del self._line[place]
            _wake(place)

    def _keep_together(self, group: str, name: str) -> None:
        last = self._affinity.pop(group, None)
        self.num_repeats += last is not None
        self.num_affine += last == name
        self._affinity[group] = name
        if len(self._affinity) > MAX_GROUPS:
            del self._affinity[next(iter(self._affinity))]

    def _seated(self, seat: Seat | None, name: str) -> Seat:
        """The episode sits at engine `name` now."""
        seat = seat or Seat()
        was, seat.engine = seat.engine, self._engines[name]
        self.num_reprefills += seat.is_lost or (was is not None and was not in self._engines.values())
        seat.is_lost = False
        return seat


def _wake(place: asyncio.Future[None]) -> None:
    if not place.done():
        place.set_result(None)


class AgentLoopWorker:
    """Runs episodes side by side, `agent.episodes_per_worker` at most.

    Args:
        model_dir: Hugging Face folder; its tokenizer and chat template are read, no weights.
        probe_texts: a task's probes as texts (`algo` decides them; siblings do not import each other).
        plugins: modules of the user's, imported before anything is looked up by name.
        record: file of recorded searches, unless `retrieval.mode` is live.
        sandbox: where the `python` tool runs its programs.
    """

    def __init__(
        self,
        index: int,
        agent: Agent,
        rollout: Rollout,
        model_dir: str,
        probe_texts: ProbeTexts = joined_probe,
        plugins: Sequence[str] = (),
        retrieval: Retrieval = LIVE,
        record: Path | None = None,
        sandbox: Sandbox = SHUT_IN,
    ) -> None:
        for plugin in plugins:
            importlib.import_module(plugin)
        self._index = index
        self._agent = agent
        self._rollout = rollout
        self._probe_texts = probe_texts
        self._model_dir = model_dir
        self._engines = EnginePool(most_in_flight=(1 + QUEUE_SHARE) * rollout.max_num_seqs / agent.workers)
        self._search = SearchClient(retrieval, agent.limits.search_s, record)
        self._tools = Toolbox(agent, Services(self._search, code_service(sandbox), sandbox.concurrency))
        self._renderer = self._new_renderer()
        self._free = asyncio.Semaphore(agent.episodes_per_worker)
        self._num_running = 0
        self._counts: Counter[str] = Counter()
        self._gauges = ActorGauges("agent_loop")
        self._gauges.keep(self._live)

    def __repr__(self) -> str:
        return f"AgentLoopWorker({self._index})"

    async def set_engines(self, engines: Mapping[str, ActorHandle]) -> None:
        """The engines that serve now, by name. Call it after every change, and after every weight sync."""
        self._engines.announce(engines)

    async def set_retrieval(self, replicas: Mapping[str, ActorHandle]) -> None:
        """The replicas that serve now, by name; running episodes ask the new ones too."""
        self._search.announce(replicas)

    async def run(self, requests: Sequence[EpisodeRequest]) -> AsyncIterator[TrajectoryBatch | TrajectorySummary]:
        """For each episode, as it ends: its payload (0 rows if it has no turn), then its summary.

        Call it with `num_returns="streaming"`: the caller then owns both objects, and they survive this worker.
        An unknown failure of one episode is a bug: it ends the stream, and the other episodes with it.

        Raises:
            ToolFailed: an MCP server of `agent.tools_file` cannot be reached.
        """
        if await self._tools.open():
            self._renderer = self._new_renderer()  # which may list the servers' tools
        episodes = [asyncio.create_task(self._episode(request)) for request in requests]
        try:
            for ended in asyncio.as_completed(episodes):
                trajectory = await ended
                payload = TrajectoryBatch.from_trajectories([trajectory])
                yield payload
                yield replace(trajectory.summary(), num_bytes=payload.num_bytes)
        finally:
            for episode in episodes:
                episode.cancel()
            await asyncio.gather(*episodes, return_exceptions=True)

    async def stats(self) -> dict[str, float]:
        """Counts since the last call, and the present number of episodes."""
        self._gauges.taken(self._live())
        counts = {name: float(self._counts[name]) for name in ("episodes", "episodes_resampled", "episodes_excluded")}
        counts |= {
            "turns_asked_again": float(self._engines.num_failures),
            "num_reprefills": float(self._engines.num_reprefills),
            "turns_of_known_groups": float(self._engines.num_repeats),
            "turns_kept_together": float(self._engines.num_affine),
            **self._search.take_counts(),
            "turn_wait_s": self._engines.wait_s,
            "tool_wait_s": sum(self._tools.wait_s.values()),
            "tool_tries_failed": float(self._tools.failures.total()),
            "tool_reconnects": float(self._tools.reconnects.total()),
            "episodes_in_flight": float(self._num_running),
        }
        self._counts.clear()
        self._engines.num_failures = self._engines.num_reprefills = 0
        self._engines.num_repeats = self._engines.num_affine = 0
        self._engines.wait_s = 0.0
        self._tools.failures.clear()
        self._tools.reconnects.clear()
        self._tools.wait_s.clear()
        return counts

    def _live(self) -> dict[str, float]:
        values = {
            "episodes_in_flight": self._num_running,
            "turns_waiting": self._engines.num_waiting,
            "episodes": self._counts["episodes"],
            "turns_asked_again": self._engines.num_failures,
            "num_reprefills": self._engines.num_reprefills,
            "tool_tries_failed": self._tools.failures.total(),
        }
        return {f"agent/{name}": value for name, value in values.items()}

    async def turns_waiting(self) -> int:
        """Turns that no engine has, because none serves."""
        return self._engines.num_waiting

    async def close(self) -> None:
        """Episodes end with the stream that carries them."""
        await self._tools.close()
        await self._search.close()

    async def _episode(self, request: EpisodeRequest) -> Trajectory:
        async with self._free:
            self._num_running += 1
            try:
                trajectory = await run_with_resamples(request, self._attempt, self._agent.max_resamples)
            finally:
                self._num_running -= 1
        self._counts["episodes"] += 1
        self._counts["episodes_resampled"] += trajectory.attempt > request.attempt
        self._counts["episodes_excluded"] += trajectory.end_reason.is_infrastructure
        return trajectory

    def _new_renderer(self) -> Renderer:
        tokenizer = FileTokenizer.from_folder(self._model_dir)
        return Renderer.from_folder(self._model_dir, tokenizer, self._agent, self._tools.prompt_schemas)

    async def _attempt(self, request: EpisodeRequest) -> Trajectory:
        return await run_episode(
            request,
            generate=self._engines.for_episode(),
            tools=self._tools,
            renderer=self._renderer,
            agent=self._agent,
            rollout=self._rollout,
            probe_texts=self._probe_texts,
        )


PAYLOADS_IN_STORE = {"env_vars": {"RAY_max_direct_call_object_size": "8192"}}
"""Runtime environment in which what a worker yields lies in the object store from 8 KB on. By Ray's default all below
100 KB goes to the caller: a quarter of a step's payload bytes passed through the driver (benchmarks/data_plane.py)."""

RemoteAgentLoopWorker = ray.remote(runtime_env=PAYLOADS_IN_STORE)(AgentLoopWorker)
