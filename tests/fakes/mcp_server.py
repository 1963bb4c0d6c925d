"""An MCP server over stdin and stdout, as a program: `python mcp_server.py`. It adds, refuses, waits, hangs, dies."""

from __future__ import annotations

import asyncio
import os
import time

from mcp import MCPError
from mcp.server import MCPServer
from mcp.types import INVALID_PARAMS, ToolAnnotations

server = MCPServer("test")


@server.tool(annotations=ToolAnnotations(idempotent_hint=True, read_only_hint=True))
def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return str(a + b + int(os.environ.get("MEMPO_TEST_OFFSET", "0")))


@server.tool()
def refuse(why: str) -> str:
    """Fails, and says so: as a result, or in the protocol."""
    if why == "protocol":
        raise MCPError(INVALID_PARAMS, "no such reason")
    raise ValueError(why)


@server.tool()
async def wait(seconds: float) -> str:
    """Answers late, and others meanwhile."""
    await asyncio.sleep(seconds)
    return "at last"


@server.tool()
async def hang() -> str:
    """The server answers nobody any more."""
    time.sleep(600)
    return ""


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


if __name__ == "__main__":
    server.run("stdio")
