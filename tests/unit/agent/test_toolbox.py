"""Calls of tools: what is tried again, what the policy is told, what is given back; and the file that lists tools."""

import asyncio
import random

import pytest

from mempo_ray.agent.tools import (
    TOOL_PARSERS,
    TOOLS,
    BaseTool,
    Services,
    Toolbox,
    ToolCall,
    ToolResult,
    text_parameter,
)
from mempo_ray.agent.tools.base import LONGEST_LINE, problem_of
from mempo_ray.agent.tools.catalogue import read_catalogue
from mempo_ray.agent.tools.toolbox import LONGEST_WAIT_S, wait_s
from mempo_ray.config.schema import Agent, AgentLimits
from mempo_ray.contracts import EpisodeRequest, Passage, Task
from mempo_ray.errors import ConfigError, DeadlineExceeded, ToolFailed
from tests.fakes.search import FakeSearch
from tests.fakes.tools import CountingTool

REQUEST = EpisodeRequest(Task("q1", "?", (("x",),), "test"), 0, 0)
PASSAGES = [Passage(str(n), "", "x") for n in range(5)]
SEARCH = ToolCall("search", {"query": "q"})


class Clock:
    def __init__(self):
        self.now, self.waits = 0.0, []

    def __call__(self):
        return self.now

    async def sleep(self, seconds):
        self.waits.append(seconds)
        self.now += seconds


@pytest.fixture(autouse=True)
def _no_steps():
    CountingTool.steps.clear()


def toolbox(search=None, clock=None, tools_file="", tools=("search",), services=None, **limits):
    clock = clock or Clock()
    agent = Agent(limits=AgentLimits(**limits), top_k=3, tools=tools, tools_file=str(tools_file))
    return Toolbox(agent, services or Services(search or FakeSearch()), clock=clock, sleep=clock.sleep)


def counting(tmp_path, **config):
    file = tmp_path / "tools.yaml"
    file.write_text(f"tools:\n- class: tests.fakes.tools:CountingTool\n  retries: 2\n  config: {config}\n")
    return file


async def call(box, what, deadline=100.0, seed=0):
    async with box.session(REQUEST) as session:
        return await session.call(what, deadline, seed)


def text(result):
    return "\n".join(passage.text for passage in result.passages)


async def test_at_most_top_k_passages():
    assert (await call(toolbox(FakeSearch(default=PASSAGES)), SEARCH)).passages == PASSAGES[:3]


async def test_waits_grow_have_jitter_and_are_the_same_for_the_same_seed():
    waits = []
    for _ in range(2):
        clock = Clock()
        await call(toolbox(FakeSearch(num_failures=5, default=PASSAGES), clock), SEARCH, 1000, seed=5)
        waits.append(clock.waits)
    assert waits[0] == waits[1]
    assert len(waits[0]) == 5
    assert all(0 <= wait <= min(0.1 * 2**n, LONGEST_WAIT_S) for n, wait in enumerate(waits[0], 1))
    assert wait_s(60, random.Random(0)) <= LONGEST_WAIT_S


async def test_what_episodes_wait_for_a_tool_is_counted_retries_and_failures_included():
    clock = Clock()
    box = toolbox(FakeSearch(num_failures=2, default=PASSAGES), clock)
    await call(box, SEARCH, 1000)
    assert box.wait_s == {"search": pytest.approx(sum(clock.waits))}
    with pytest.raises(DeadlineExceeded):
        await call(toolbox(FakeSearch(num_failures=99), clock, search_retries=50), SEARCH, clock.now + 0.01)
    assert clock.now > box.wait_s["search"] > 0


async def test_the_episode_s_deadline_ends_the_retries():
    clock = Clock()
    with pytest.raises(DeadlineExceeded, match="the index is away"):
        await call(toolbox(FakeSearch(num_failures=99), clock, search_retries=50), SEARCH, 0.01)
    assert clock.now == pytest.approx(0.01)


async def test_a_search_that_never_answers_fails_at_its_own_deadline():
    async def silent(queries, top_k):
        await asyncio.Event().wait()

    box = toolbox(silent, search_s=0.01, search_retries=0)
    with pytest.raises(ToolFailed, match=r"failed 1 times: no answer within 0\.01 s"):
        await call(box, SEARCH)
    assert box.failures == {"search": 1}


class Sandbox:
    """Each program runs until the test lets it end."""

    def __init__(self):
        self.running, self.most, self.started, self.ends = 0, 0, asyncio.Queue(), asyncio.Queue()

    async def __call__(self, source):
        self.running += 1
        self.most = max(self.most, self.running)
        self.started.put_nowait(source)
        await self.ends.get()
        self.running -= 1
        return "[timeout]"


PYTHON = ToolCall("python", {"code": "while True: pass"})


async def test_programs_that_wait_for_the_sandbox_are_not_late(monkeypatch):
    loop, later = asyncio.get_running_loop(), 0.0
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + later)
    sandbox = Sandbox()
    box = toolbox(tools=("python",), services=Services(FakeSearch(), sandbox, 2), search_s=100, search_retries=0)
    calls = [asyncio.create_task(call(box, PYTHON, deadline=1000)) for _ in range(6)]
    for _ in range(3):
        for _ in range(2):
            await sandbox.started.get()
        later += 60  # each runs for 60 s, the last two wait for 120 s
        for _ in range(2):
            sandbox.ends.put_nowait("end")
    assert [text(result) for result in await asyncio.gather(*calls)] == ["[timeout]"] * 6
    assert (sandbox.most, box.failures) == (2, {})


async def test_a_program_waits_for_the_sandbox_no_longer_than_its_episode_lasts():
    sandbox = Sandbox()
    box = toolbox(tools=("python",), services=Services(FakeSearch(), sandbox, 1))
    first = asyncio.create_task(call(box, PYTHON))
    await sandbox.started.get()
    with pytest.raises(DeadlineExceeded, match="other calls of the tool still run"):
        await call(box, PYTHON, deadline=0.01)
    sandbox.ends.put_nowait("end")
    assert text(await first) == "[timeout]"


async def test_a_mistake_in_the_arguments_is_told_to_the_policy_and_reaches_no_tool():
    search = FakeSearch()
    result = await call(toolbox(search), ToolCall("search", {"querry": "q"}))
    assert text(result) == "error: missing argument 'query'; unknown argument 'querry'"
    assert search.queries == []


async def test_an_instance_lives_as_long_as_its_episode(tmp_path):
    box = toolbox(tools_file=counting(tmp_path))
    async with box.session(REQUEST) as session:
        assert await session.rewards() == {}
        answers = [text(await session.call(ToolCall("count", {"by": by}), 100, 0)) for by in ("2", "3")]
        assert await session.rewards() == {"count": 0.5}
    assert answers == ["2", "5"]
    assert CountingTool.steps == ["create q1", "release 5"]


async def test_an_instance_is_released_after_a_failure_too(tmp_path):
    box = toolbox(tools_file=counting(tmp_path, release_fails=True))

    async def episode():
        async with box.session(REQUEST) as session:
            await session.call(ToolCall("count", {"by": "1"}), 100, 0)
            raise KeyError("a bug elsewhere")

    with pytest.raises(KeyError):
        await episode()
    assert CountingTool.steps == ["create q1", "release 1"]
    assert box.failures == {"count": 1}


@pytest.mark.parametrize(("is_idempotent", "num_tries"), [(True, 3), (False, 1)])
async def test_only_a_call_that_may_be_made_twice_is_tried_again(tmp_path, is_idempotent, num_tries):
    box = toolbox(tools_file=counting(tmp_path, num_failures=9, is_idempotent=is_idempotent))
    with pytest.raises(ToolFailed, match=f"failed {num_tries} times: away"):
        await call(box, ToolCall("count", {"by": "1"}))
    assert box.failures == {"count": num_tries}


class CarelessTool(BaseTool):
    """As no tool should be."""

    name = "careless"
    parameters = text_parameter("what", "")

    async def execute(self, instance, arguments):
        return ToolResult.of_text({"right": "fine"}[arguments["what"]])

    async def calc_reward(self, instance):
        return "much"

    async def release(self, instance):
        raise KeyError("released twice")


async def test_a_tool_that_raises_fails_its_episode_and_not_the_run(tmp_path):
    file = tmp_path / "tools.yaml"
    file.write_text(f"tools:\n- class: {__name__}:CarelessTool\n  retries: 1\n")
    box = toolbox(tools_file=file)
    async with box.session(REQUEST) as session:
        with pytest.raises(ToolFailed, match="failed 2 times: KeyError: 'wrong'"):
            await session.call(ToolCall("careless", {"what": "wrong"}), 100, 0)
        assert text(await session.call(ToolCall("careless", {"what": "right"}), 100, 0)) == "fine"
        with pytest.raises(ToolFailed, match="careless: no reward: ValueError"):
            await session.rewards()
    assert box.failures == {"careless": 3}  # two tries and a release


def test_tools_and_parsers_are_registered_by_name():
    assert TOOLS.names == ("calculator", "python", "search")
    assert TOOL_PARSERS.names == ("hermes", "tags")
    with pytest.raises(ConfigError, match=r"agent\.tools"):
        TOOLS.check("serach")


def test_a_schema_is_a_function_as_openai_has_it():
    (schema,) = Toolbox(Agent(tool_parser="hermes"), Services(FakeSearch())).prompt_schemas
    assert schema["type"] == "function"
    assert schema["function"]["name"] == "search"
    assert schema["function"]["parameters"]["required"] == ["query"]


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("tools: [{name: calculator, timeout: 3}]", "tools.0.timeout"),
        ("tools: [{config: {}}]", "either name or class"),
        ("tools: [{name: calculater}]", "did you mean 'calculator'"),
        ("tools: [{class: 'nowhere:Tool'}]", "cannot be imported"),
        ("tools: [{class: 'pathlib:Path'}]", "not a subclass"),
        ("tools: [{name: calculator}, {name: calculator}]", "'calculator' is taken"),
        ("mcp_servers: [{name: a}]", "either command or url"),
        ("tools: [", "cannot be read as YAML"),
        ("tools: [{name: python}]", "no sandbox"),
    ],
)
def test_a_wrong_file_is_an_error_that_says_what(tmp_path, file, words):
    path = tmp_path / "tools.yaml"
    path.write_text(file)
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        toolbox(tools_file=path)


def test_a_file_that_is_not_there_is_an_error():
    with pytest.raises(ConfigError, match=r"tools_file: /nowhere"):
        read_catalogue("/nowhere")


def test_the_file_s_settings_of_a_tool_win_over_the_list(tmp_path):
    path = tmp_path / "tools.yaml"
    path.write_text("tools: [{name: search, retries: 0, timeout_s: 1}]")
    assert toolbox(tools_file=path).tags == ("search",)


def test_a_long_text_is_many_passages_and_an_empty_one_is_said_to_be_empty():
    assert [len(p.text) for p in ToolResult.of_text("x" * (LONGEST_LINE + 1)).passages] == [LONGEST_LINE, 1]
    assert text(ToolResult.of_text("a\n\nb\n")) == "a\n\nb"
    assert text(ToolResult.of_text("")) == "(no output)"
    assert ToolResult.of_text("x" * 40_000).passages[-1].text == "[cut at 32768 characters]"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"n": 3}, ""),
        ({"n": 3, "name": "x"}, ""),
        ({}, "missing argument 'n'"),
        ({"n": "3"}, "argument 'n' must be a JSON integer"),
        ({"n": True}, "argument 'n' must be a JSON integer"),
        ({"n": 3, "m": 1}, "unknown argument 'm'"),
    ],
)
def test_arguments_are_checked_by_name_and_type(arguments, problem):
    parameters = {"properties": {"n": {"type": "integer"}, "name": {"type": "string"}}, "required": ["n"]}
    assert problem_of(arguments, parameters) == problem
