"""The tools of a worker, and what one episode does with them.

Toolbox.load ──▶ open ──▶ session(request) ──▶ call … call ──▶ rewards
  names, files     MCP     an episode           deadline, retries by kind

on a call                                  what becomes of it
the policy's mistake                       an answer that says so
the tool raises, or no answer in time      tried again, if the tool allows it; then ToolFailed
the episode's time is up                   DeadlineExceeded
"""

from __future__ import annotations

import asyncio
import importlib
import random
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

from mempo_ray.agent.protocol import Block
from mempo_ray.agent.tools.base import BaseTool, Services, ToolResult, problem_of
from mempo_ray.agent.tools.calculator import CalculatorTool
from mempo_ray.agent.tools.catalogue import McpServerEntry, ToolEntry, read_catalogue
from mempo_ray.agent.tools.parsers import TOOL_PARSERS, ToolCall
from mempo_ray.agent.tools.python import PythonTool
from mempo_ray.agent.tools.search import SearchTool
from mempo_ray.config.schema import Agent
from mempo_ray.contracts import SPAN_NAMES, EpisodeRequest
from mempo_ray.errors import ConfigError, DeadlineExceeded, InfrastructureError, MempoError, ToolFailed
from mempo_ray.registry import Registry

if TYPE_CHECKING:
    from mempo_ray.agent.tools.mcp import McpServer

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 10.0
RELEASE_S = 10.0  # for a tool to give back what belonged to an episode

TOOLS: Registry[type[BaseTool]] = Registry("agent.tools")
"""By name, which is also the tag that calls it under `agent.tool_parser: tags`."""
TOOLS.register("search")(SearchTool)
TOOLS.register("calculator")(CalculatorTool)
TOOLS.register("python")(PythonTool)

RESERVED = {*SPAN_NAMES, "tool_call", "tool_response"} - {"search"}
"""Tags that mean something else."""


@dataclass(frozen=True)
class _Held:
    """A tool with the limits of its calls."""

    tool: BaseTool
    timeout_s: float
    retries: int
    places: asyncio.Semaphore | None  # None: calls do not wait for each other


class Toolbox:
    """All tools of a worker. Call `open` before the first episode (it connects MCP servers), `close` at the end."""

    def __init__(
        self,
        agent: Agent,
        services: Services,
        *,
        clock: Callable[[], float] = monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """The tools of `agent.tools` and `agent.tools_file`.

        Raises:
            ConfigError: unknown name, wrong file, a name that is taken, or a tool that cannot be made.
        """
        self._agent, self._clock, self._sleep = agent, clock, sleep
        self._parser = TOOL_PARSERS.get(agent.tool_parser)()
        self._held: dict[str, _Held] = {}
        self._servers: list[McpServer] = []
        self._opening = asyncio.Lock()
        self.failures: Counter[str] = Counter()
        """Tries of a call that failed, and releases, by tool."""
        self.reconnects: Counter[str] = Counter()
        """How often an MCP server that had died or hung was connected again, by server."""
        self.wait_s: defaultdict[str, float] = defaultdict(float)
        """Seconds that episodes waited for answers, retries included, by tool."""
        catalogue = read_catalogue(agent.tools_file)
        listed = {entry.name for entry in catalogue.tools}
        for entry in (*(ToolEntry(name=name) for name in agent.tools if name not in listed), *catalogue.tools):
            self._hold(_class_of(entry)(services, agent.top_k, entry.config), entry)
        self._waiting: list[McpServerEntry] = list(catalogue.mcp_servers)

    async def open(self) -> bool:
        """Connect to the MCP servers and list their tools; whether there was anything left to do.

        Raises:
            ToolFailed: a server cannot be reached.
            ConfigError: it has no such tool, or one whose name is taken.
        """
        async with self._opening:
            is_new = bool(self._waiting)
            while self._waiting:
                from mempo_ray.agent.tools.mcp import McpServer  # a heavy import that most runs do not need

                entry = self._waiting[0]
                server = McpServer(entry, self.reconnects)
                self._servers.append(server)
                for tool in await server.tools():
                    self._hold(tool, entry)
                self._waiting.pop(0)
            return is_new

    async def close(self) -> None:
        for server in self._servers:
            await server.close()

    @property
    def names(self) -> tuple[str, ...]:
        """Of all tools; those of MCP servers are known once it is open."""
        return tuple(self._held)

    def timeout_s(self, name: str) -> float:
        """Seconds that one call of this tool may take."""
        return self._held[name].timeout_s

    @property
    def has_servers(self) -> bool:
        return bool(self._waiting or self._servers)

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags that hold calls."""
        return self._parser.tags(self.names)

    @property
    def prompt_schemas(self) -> list[dict[str, Any]]:
        """The tools as the first prompt lists them; empty under a parser whose form the system prompt explains."""
        return [held.tool.schema for held in self._held.values()] if self._parser.shows_schemas else []

    def call_of(self, block: Block | None) -> ToolCall | None:
        """The call that an action asks for; None: it is an answer, or no call that can be understood."""
        if block is None or block.name not in self.tags:
            return None
        return self._parser.call(block, {name: held.tool for name, held in self._held.items()})

    @asynccontextmanager
    async def session(self, request: EpisodeRequest) -> AsyncGenerator[ToolSession, None]:
        """The tools for one episode; whatever it took of them is released."""
        session = ToolSession(request, self._held, self.failures, self.wait_s, self._clock, self._sleep)
        try:
            yield session
        finally:
            await session.release()

    def _hold(self, tool: BaseTool, entry: ToolEntry | McpServerEntry) -> None:
        limits = self._agent.limits
        if tool.name in self._held or tool.name in RESERVED:
            raise ConfigError(
                f"agent.tools: the name {tool.name!r} is taken; of an MCP server, choose others by `tools` in "
                "agent.tools_file"
            )
        retries = limits.search_retries if entry.retries is None else entry.retries
        self._held[tool.name] = _Held(
            tool,
            entry.timeout_s or limits.search_s,
            retries if tool.is_idempotent else 0,
            None if tool.calls_at_once is None else asyncio.Semaphore(tool.calls_at_once),
        )


def _class_of(entry: ToolEntry) -> type[BaseTool]:
    if entry.name:
        return TOOLS.get(entry.name)
    module, _, attribute = entry.path.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"agent.tools_file: class {entry.path!r} (module:Class) cannot be imported: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, BaseTool)):
        raise ConfigError(f"agent.tools_file: {entry.path!r} is not a subclass of mempo_ray.agent.tools.BaseTool")
    return found


class ToolSession:
    """What one episode holds of the tools."""

    def __init__(
        self,
        request: EpisodeRequest,
        tools: Mapping[str, _Held],
        failures: Counter[str],
        wait_s: defaultdict[str, float],
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._request, self._tools, self._failures, self._wait_s = request, tools, failures, wait_s
        self._clock, self._sleep = clock, sleep
        self._instances: dict[str, Any] = {}

    async def call(self, call: ToolCall, deadline: float, seed: int) -> ToolResult:
        """Answer a call. `deadline` is a reading of the clock; `seed` draws the jitter of retries.

        The n-th retry waits a random time up to min(0.1 · 2ⁿ, 10) s: full jitter, so that episodes which a dead index
        failed together do not return together.

        Raises:
            ToolFailed: every try failed; the message has the last reason.
            DeadlineExceeded: the deadline is sooner than the next try could be.
        """
        held = self._tools[call.name]
        if problem := problem_of(call.arguments, held.tool.parameters):
            return ToolResult.error(problem)
        began = self._clock()
        try:
            return await self._tried(held, call, deadline, seed)
        finally:
            self._wait_s[call.name] += self._clock() - began

    async def _tried(self, held: _Held, call: ToolCall, deadline: float, seed: int) -> ToolResult:
        draw = random.Random(seed)
        failure: InfrastructureError | None = None
        for attempt in range(held.retries + 1):
            if attempt:
                await self._sleep(min(wait_s(attempt, draw), max(deadline - self._clock(), 0)))
            async with self._place(held, call, deadline):
                remaining_s = deadline - self._clock()
                if remaining_s <= 0:
                    raise DeadlineExceeded(f"{call}: the episode's time is up; last failure: {failure}")
                try:
                    async with asyncio.timeout(min(held.timeout_s, remaining_s)):
                        if call.name not in self._instances:
                            self._instances[call.name] = await held.tool.create(self._request)
                        return await held.tool.execute(self._instances[call.name], call.arguments)
                except InfrastructureError as error:
                    failure = error
                except TimeoutError:
                    failure = DeadlineExceeded(f"no answer within {min(held.timeout_s, remaining_s):g} s")
                except MempoError:  # a configuration that no other call would find right
                    raise
                except Exception as error:  # noqa: BLE001 - a tool may be a user's: it fails its episode, not the run
                    failure = ToolFailed(f"{type(error).__name__}: {error}")
            self._failures[call.name] += 1
        raise ToolFailed(f"{call} failed {held.retries + 1} times: {failure}")

    @asynccontextmanager
    async def _place(self, held: _Held, call: ToolCall, deadline: float) -> AsyncGenerator[None, None]:
        """One of the tool's calls at once. Raises DeadlineExceeded: none came free in the episode's time."""
        if held.places is None:
            yield
            return
        try:
            async with asyncio.timeout(max(deadline - self._clock(), 0)):
                await held.places.acquire()
        except TimeoutError:
            raise DeadlineExceeded(f"{call}: the episode's time is up, and other calls of the tool still run") from None
        try:
            yield
        finally:
            held.places.release()

    async def rewards(self) -> dict[str, float]:
        """What the tools that were called say of the episode, by name.

        Raises:
            InfrastructureError: a tool fails at that; it must not look like one that has nothing to say.
        """
        found: dict[str, float] = {}
        for name, instance in self._instances.items():
            held = self._tools[name]
            try:
                async with asyncio.timeout(held.timeout_s):
                    reward = await held.tool.calc_reward(instance)
                    if reward is not None:
                        found[name] = float(reward)
            except TimeoutError:
                raise ToolFailed(f"{name}: no reward within {held.timeout_s:g} s") from None
            except MempoError:
                raise
            except Exception as error:
                raise ToolFailed(f"{name}: no reward: {type(error).__name__}: {error}") from error
        return found

    async def release(self) -> None:
        """A failure is counted; the episode is what it is."""
        for name, instance in self._instances.items():
            try:
                async with asyncio.timeout(RELEASE_S):
                    await self._tools[name].tool.release(instance)
            except Exception:  # noqa: BLE001 - it is counted, and the other tools are released, too
                self._failures[name] += 1
        self._instances.clear()


def wait_s(attempt: int, draw: random.Random) -> float:
    """Seconds before retry `attempt` (1, 2, …)."""
    return draw.uniform(0, min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S))
