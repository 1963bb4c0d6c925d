"""Tools of a real MCP server, over stdio and over HTTP: found, called, refused, and dead."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path

import psutil
import pytest
import uvicorn
import yaml

from mempo_ray.agent.tools import Services, Toolbox, ToolCall, mcp
from mempo_ray.config.schema import Agent
from mempo_ray.contracts import EpisodeRequest, Task
from mempo_ray.errors import ConfigError, ToolFailed
from tests.fakes.mcp_server import server
from tests.fakes.search import FakeSearch

REQUEST = EpisodeRequest(Task("q1", "?", (("x",),), "test"), 0, 0)
COMMAND = [sys.executable, str(Path(__file__).parents[2] / "fakes" / "mcp_server.py")]
ADD = ToolCall("add", {"a": 2, "b": 3})


@pytest.fixture
def make(tmp_path):
    def make(**entry) -> Toolbox:
        file = tmp_path / "tools.yaml"
        file.write_text(yaml.safe_dump({"mcp_servers": [{"name": "calc", **entry}]}))
        return Toolbox(Agent(tools_file=str(file)), Services(FakeSearch()))

    return make


async def call(tools: Toolbox, what: ToolCall, timeout_s: float = 60) -> str:
    async with tools.session(REQUEST) as session:
        result = await session.call(what, asyncio.get_running_loop().time() + timeout_s, 0)
    return "\n".join(passage.text for passage in result.passages)


async def test_a_server_over_stdio_is_asked_and_ends_with_the_toolbox(make):
    before = set(psutil.Process().children(recursive=True))
    tools = make(command=COMMAND, env={"MEMPO_TEST_OFFSET": "100"})
    assert tools.names == ("search",)
    assert await tools.open()
    assert not await tools.open()
    assert tools.names == ("search", "add", "refuse", "wait", "hang", "die")
    assert await call(tools, ADD) == "105"
    assert await call(tools, ToolCall("add", {"a": 2, "b": "x"})) == "error: argument 'b' must be a JSON integer"
    assert (await call(tools, ToolCall("refuse", {"why": "not today"}))).startswith("error:")
    assert await call(tools, ToolCall("refuse", {"why": "protocol"})) == "error: no such reason"
    await tools.close()
    _, alive = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, timeout=10)
    assert alive == []


async def test_a_server_that_dies_is_a_failure_and_is_started_again_for_the_next_call(make):
    tools = make(command=COMMAND, retries=2)
    await tools.open()
    with pytest.raises(ToolFailed, match=r"failed 1 times: MCP server 'calc'"):
        await call(tools, ToolCall("die", {}))
    assert await call(tools, ADD) == "5"
    await tools.close()


async def test_a_server_that_hangs_is_left_and_started_again_for_the_next_call(make, monkeypatch):
    monkeypatch.setattr(mcp, "ALIVE_S", 0.2)
    before = set(psutil.Process().children(recursive=True))
    tools = make(command=COMMAND, retries=1, timeout_s=20)
    await tools.open()
    (hanging,) = set(psutil.Process().children()) - before
    with pytest.raises(ToolFailed, match="no answer within"):
        await call(tools, ToolCall("hang", {}), timeout_s=0.3)
    assert await call(tools, ADD) == "5"
    assert not hanging.is_running()
    assert tools.reconnects == {"calc": 1}
    await tools.close()


async def test_a_call_that_lasts_too_long_costs_the_others_nothing(make):
    tools = make(command=COMMAND, timeout_s=20)
    await tools.open()
    beside = asyncio.create_task(call(tools, ToolCall("wait", {"seconds": 1})))
    with pytest.raises(ToolFailed, match="no answer within"):
        await call(tools, ToolCall("wait", {"seconds": 600}), timeout_s=0.3)
    assert await call(tools, ADD) == "5"
    assert await beside == "at last"
    assert tools.reconnects == {}
    await tools.close()


async def test_a_caller_that_leaves_while_a_server_starts_leaves_no_process_behind(make):
    """The next one begins anew."""
    before = set(psutil.Process().children(recursive=True))
    tools = make(command=COMMAND)
    opening = asyncio.create_task(tools.open())
    while not set(psutil.Process().children()) - before:
        await asyncio.sleep(0.01)
    opening.cancel()
    await asyncio.wait([opening])
    assert await tools.open()
    assert len(set(psutil.Process().children()) - before) == 1
    await tools.close()


async def test_only_the_tools_that_the_file_names_are_taken(make):
    tools = make(command=COMMAND, tools=["add"])
    await tools.open()
    assert tools.tags == ("search", "add")
    await tools.close()


async def test_a_tool_that_the_server_does_not_have_is_an_error(make):
    tools = make(command=COMMAND, tools=["subtract"])
    with pytest.raises(ConfigError, match=r"'calc' has no tool 'subtract'; it has add, refuse, wait, hang, die"):
        await tools.open()
    await tools.close()


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"command": ["/nowhere/server"]}, "cannot be reached"),
        ({"command": [sys.executable, "-c", "import time; time.sleep(600)"], "startup_s": 0.3}, r"startup_s=0\.3"),
        ({"url": "http://127.0.0.1:9/mcp", "startup_s": 20}, "cannot be reached"),
    ],
)
async def test_a_server_that_is_not_there_is_a_failure_by_its_deadline(make, entry, words):
    tools = make(**entry)
    with pytest.raises(ToolFailed, match=words):
        await tools.open()
    await tools.close()


async def test_a_server_over_http_is_asked(make):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(server.streamable_http_app(), log_level="error")
        http = uvicorn.Server(config)
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        try:
            tools = make(url=f"http://127.0.0.1:{listener.getsockname()[1]}/mcp", tools=["add"])
            await tools.open()
            assert await call(tools, ADD) == "5"
            await tools.close()
        finally:
            http.should_exit = True
            await asyncio.wait([serving], timeout=20)
    assert "MEMPO_TEST_OFFSET" not in os.environ
