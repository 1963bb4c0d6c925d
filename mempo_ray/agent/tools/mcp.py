"""Tools of an MCP server (modelcontextprotocol.io), over stdio or HTTP, by the `mcp` client.

A connection belongs to the task that opens it, so each server has one: it connects, says that it is ready, and waits to
be closed. When the server dies, calls fail as infrastructure and the next call connects again. When it leaves a call
without an answer, it is asked for its tools: if it does not tell them either, it hangs, and is left in the same way.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

from mcp import Client, MCPError, StdioServerParameters
from mcp.types import INVALID_PARAMS, CallToolResult, TextContent, Tool

from mempo_ray.agent.tools.base import BaseTool, ToolResult
from mempo_ray.agent.tools.catalogue import McpServerEntry
from mempo_ray.errors import ConfigError, ToolFailed

CLOSE_S = 10.0  # then the connection's task is cancelled
ALIVE_S = 5.0  # for a sign of life from a server that has not answered a call
FIRST_REST_S, MOST_DOUBLINGS = 0.1, 8  # before connecting again: doubled, up to 26 s, until a call is answered


class McpServer:
    """One server and its connection.

    Args:
        reconnects: counts, by name of the server, how often it was connected again.
    """

    def __init__(self, entry: McpServerEntry, reconnects: Counter[str]) -> None:
        self._entry, self._reconnects = entry, reconnects
        self._lock = asyncio.Lock()
        self._client: Client | None = None
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._doubt: asyncio.Task[None] | None = None  # whether the server still answers
        self._is_known = False  # it has been connected before
        self._num_rests = 0  # since a call was answered

    async def tools(self) -> list[McpTool]:
        """Those that the entry names, else all.

        Raises:
            ToolFailed: no connection, or no answer.
            ConfigError: the server does not have a tool that the entry names.
        """
        client = await self._connected()
        try:
            async with asyncio.timeout(self._entry.startup_s):
                listed = {tool.name: tool for tool in await _listed(client)}
        except TimeoutError:
            raise ToolFailed(
                f"MCP server {self._entry.name!r} did not tell its tools within startup_s={self._entry.startup_s:g}"
            ) from None
        if unknown := [name for name in self._entry.tools if name not in listed]:
            raise ConfigError(
                f"agent.tools_file: MCP server {self._entry.name!r} has no tool {unknown[0]!r}; it has "
                f"{', '.join(listed)}"
            )
        return [McpTool(self, listed[name]) for name in self._entry.tools or listed]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> CallToolResult:
        """One call. Raises ToolFailed: the server could not be reached, or died, or answered outside the protocol."""
        client = await self._connected()
        try:
            answer = await client.call_tool(name, dict(arguments))
        except asyncio.CancelledError:  # its time is up, or its episode's
            if self._doubt is None and client is self._client:
                self._doubt = asyncio.create_task(self._leave_if_silent(client))
            raise
        except (MCPError, OSError, RuntimeError) as error:
            if isinstance(error, MCPError) and error.code == INVALID_PARAMS:  # the policy's mistake, told to it
                return CallToolResult(content=[TextContent(type="text", text=error.message)], is_error=True)
            await self._leave(client)
            raise ToolFailed(f"MCP server {self._entry.name!r}: {type(error).__name__}: {error}") from error
        self._num_rests = 0
        return answer

    async def close(self) -> None:
        """Ends the connection, and with it a server that was started for it."""
        if self._doubt is not None:
            self._doubt.cancel()
        await self._end()

    async def _leave_if_silent(self, client: Client) -> None:
        try:
            async with asyncio.timeout(ALIVE_S):
                await client.list_tools(cache_mode="bypass")
        except (TimeoutError, MCPError, OSError, RuntimeError):
            await self._leave(client)
        finally:
            self._doubt = None

    async def _leave(self, client: Client) -> None:
        """`_end`, unless others have connected again already."""
        if client is self._client:
            await self._end()

    async def _end(self) -> None:
        task, client = self._task, self._client
        self._task = self._client = None
        self._closing.set()
        if task is None:
            return
        if client is None:  # it is still connecting
            task.cancel()
        _, pending = await asyncio.wait([task], timeout=CLOSE_S)
        for late in pending:
            late.cancel()

    async def _connected(self) -> Client:
        async with self._lock:
            if self._doubt is not None:
                await asyncio.wait([self._doubt])
            if self._client is None:
                await self._connect()
            assert self._client is not None
            return self._client

    async def _connect(self) -> None:
        if self._is_known:
            self._reconnects[self._entry.name] += 1
            await asyncio.sleep(FIRST_REST_S * 2 ** min(self._num_rests, MOST_DOUBLINGS))
            self._num_rests += 1
        self._is_known = True
        ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._task = asyncio.create_task(self._hold(ready, self._closing), name=f"mcp {self._entry.name}")
        try:
            async with asyncio.timeout(self._entry.startup_s):
                self._client = await ready
        except TimeoutError:
            raise ToolFailed(
                f"MCP server {self._entry.name!r} did not answer within startup_s={self._entry.startup_s:g}"
            ) from None
        finally:
            if self._client is None:  # nor is it awaited by anybody else
                await self._end()

    async def _hold(self, ready: asyncio.Future[Client], closing: asyncio.Event) -> None:
        """The life of one connection."""
        entry = self._entry
        where = entry.url or StdioServerParameters(
            command=entry.command[0], args=list(entry.command[1:]), env=entry.env
        )
        try:
            async with Client(where) as client:
                ready.set_result(client)
                await closing.wait()
        except Exception as error:  # noqa: BLE001 - whatever ended the connection, its users are told
            if not ready.done():
                ready.set_exception(
                    ToolFailed(f"MCP server {entry.name!r} cannot be reached: {type(error).__name__}: {error}")
                )


async def _listed(client: Client) -> list[Tool]:
    found: list[Tool] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return found


class McpTool(BaseTool):
    """One tool of a server. A call is made again only where the server says that this does no harm."""

    def __init__(self, server: McpServer, tool: Tool) -> None:
        self._server = server
        self.name, self.description = tool.name, tool.description or ""
        self.parameters = tool.input_schema
        hints = tool.annotations
        self.is_idempotent = bool(hints and (hints.read_only_hint or hints.idempotent_hint))

    async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
        answer = await self._server.call(self.name, arguments)
        text = "\n".join(part.text if isinstance(part, TextContent) else f"[{part.type}]" for part in answer.content)
        return ToolResult.error(text) if answer.is_error else ToolResult.of_text(text)
