"""Episodes with other tools than search: calculator, python in the sandbox, an MCP server, Hermes calls, rewards."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from mempo_ray.agent.episode import run_episode
from mempo_ray.agent.prompt import Renderer
from mempo_ray.agent.tokenizer import FileTokenizer
from mempo_ray.agent.tools import Services, Toolbox
from mempo_ray.config.schema import Agent, AgentLimits, Reward, Rollout, Sandbox
from mempo_ray.contracts import EndReason, EpisodeRequest, Passage, Scored, Task, Trajectory, TrajectoryBatch
from mempo_ray.errors import ToolFailed
from mempo_ray.ports import RunCode
from mempo_ray.rewards.contract import Response, to_score, with_tool_rewards
from mempo_ray.rewards.sandbox import as_text, code_service
from mempo_ray.rewards.sandbox.levels import Level
from mempo_ray.rewards.sandbox.local import detect_level
from mempo_ray.rewards.sandbox.outcome import Outcome, Status
from tests.fakes.generate import ScriptedGenerate
from tests.fakes.search import FakeSearch
from tests.fakes.tokenizer import CHATML, byte_level_folder

TASK = Task("q1", "How old ?", (("41",),), "test")
MCP_SERVER = Path(__file__).parents[2] / "fakes" / "mcp_server.py"
SCHEMAS_FIRST = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + CHATML


def say(action: str) -> str:
    return f"<mem>nothing</mem><think>look</think>{action}"


ANSWER = say("<answer>41</answer>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return byte_level_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def play(folder, tmp_path):
    async def play(lines, *, run_code: RunCode | None = None, tools_file=None, agent=None, **rollout) -> Trajectory:
        settings = agent or {}
        if tools_file is not None:
            file = tmp_path / "tools.yaml"
            file.write_text(yaml.safe_dump(tools_file))
            settings = {**settings, "tools_file": str(file)}
        agent = Agent(**settings)
        tools = Toolbox(agent, Services(FakeSearch(default=[Passage("p1", "Boko", "Boko is old .")]), run_code))
        await tools.open()
        tokenizer = FileTokenizer.from_folder(folder)
        renderer = Renderer.from_folder(folder, tokenizer, agent, tools.prompt_schemas)
        try:
            return await run_episode(
                EpisodeRequest(TASK, sibling=0, seed=7),
                generate=ScriptedGenerate(tokenizer, lines),
                tools=tools,
                renderer=renderer,
                agent=agent,
                rollout=Rollout(**rollout),
            )
        finally:
            await tools.close()

    return play


def told(trajectory: Trajectory) -> list[str]:
    return [
        turn.tool_text.removeprefix("<tool_response>").removesuffix("</tool_response>")
        for turn in trajectory.turns
        if len(turn.tool_ids)
    ]


async def test_an_episode_uses_search_calculator_and_python(play):
    if detect_level()[0] < Level.NAMESPACES_UID:
        pytest.skip(f"the machine's sandbox is weak: {detect_level()[1]}")
    trajectory = await play(
        [
            say("<search>Boko</search>"),
            say("<calculator>1889 - 1848</calculator>"),
            say("<python>\nfor n in range(3):\n    print('<b>', n)\n</python>"),
            say("<python>import os; print(os.getuid() == 0); 1 / 0</python>"),
            ANSWER,
        ],
        agent={"tools": ("search", "calculator", "python")},
        run_code=code_service(Sandbox()),
    )
    assert (trajectory.end_reason, trajectory.format_valid, trajectory.answer) == (EndReason.ANSWERED, True, "41")
    search, calculator, python, mistake = told(trajectory)
    assert (search, calculator, python) == ("Boko: Boko is old .", "41", "<b> 0\n<b> 1\n<b> 2")
    assert mistake.startswith("False\nTraceback")
    assert mistake.endswith("ZeroDivisionError: division by zero\n[exit code 1]")
    assert [turn.query for turn in trajectory.turns] == ["Boko", "", "", "", ""]
    assert trajectory.turns[0].passage_ids == ("p1",)
    assert trajectory.turns[1].passage_ids == ()


async def test_an_episode_uses_an_mcp_server_over_stdio(play):
    trajectory = await play(
        [say('<add>{"a": 40, "b": 1}</add>'), say('<add>{"a": 40}</add>'), say("<add>40 + 1</add>")],
        tools_file={"mcp_servers": [{"name": "calc", "command": [sys.executable, str(MCP_SERVER)], "tools": ["add"]}]},
    )
    assert told(trajectory) == ["41", "error: missing argument 'b'"]
    assert trajectory.end_reason is EndReason.FORMAT_STOP


async def test_hermes_calls_have_their_schemas_in_the_prompt_and_pass_the_format_rules(play, folder, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(SCHEMAS_FIRST)
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "40 + 1"}}</tool_call>'
    trajectory = await play(
        [say(call), ANSWER],
        agent={"tools": ("search", "calculator"), "tool_parser": "hermes", "chat_template": str(template)},
    )
    prompt = FileTokenizer.from_folder(folder).decode(trajectory.turns[0].prompt_ids.tolist())
    assert '"name": "search"' in prompt
    assert '"name": "calculator"' in prompt
    assert (told(trajectory), trajectory.format_valid) == (["41"], True)
    start, stop = trajectory.turns[0].spans["search"]
    span = FileTokenizer.from_folder(folder).decode(trajectory.turns[0].output_ids[start:stop].tolist())
    assert call.removeprefix("<") in span  # the token before it is `><`


async def test_a_hermes_search_leaves_its_query(play):
    call = '<tool_call>{"name": "search", "arguments": {"query": "Boko"}}</tool_call>'
    trajectory = await play([say(call), ANSWER], agent={"tool_parser": "hermes"})
    assert trajectory.turns[0].query == "Boko"


async def test_tags_stop_a_turn_whatever_the_tool(play):
    trajectory = await play(
        [say("<calculator>1 + 1</calculator>") + " and so on", ANSWER],
        agent={"tools": ("search", "calculator")},
        stop_at_tags=True,
    )
    assert "so on" not in trajectory.turns[0].text
    assert told(trajectory) == ["2"]


async def test_a_long_result_is_cut_between_two_lines_and_marked(play):
    async def run_code(source):
        return "\n".join(f"line {n}" for n in range(3000))

    trajectory = await play(
        [say("<python>1</python>"), ANSWER],
        agent={"tools": ("search", "python"), "limits": AgentLimits(tool_tokens=200)},
        run_code=run_code,
    )
    *lines, mark = told(trajectory)[0].splitlines()
    assert 150 < len(trajectory.turns[0].tool_ids) <= 200
    assert lines == [f"line {n}" for n in range(len(lines))]
    assert mark == f"[{len(lines)} of 3000 passages shown]"


async def test_a_sandbox_that_fails_ends_the_episode_as_tool_failed(play):
    async def run_code(source):
        raise ToolFailed("sandbox: no memory for a process")

    trajectory = await play(
        [say("<python>1</python>")],
        agent={"tools": ("search", "python"), "limits": AgentLimits(search_retries=0)},
        run_code=run_code,
    )
    assert trajectory.end_reason is EndReason.TOOL_FAILED
    assert "no memory for a process" in trajectory.detail


async def test_a_tool_s_reward_reaches_the_score(play):
    trajectory = await play(
        [say("<count>2</count>"), say("<count>3</count>"), ANSWER],
        tools_file={"tools": [{"class": "tests.fakes.tools:CountingTool"}]},
    )
    assert (told(trajectory), trajectory.tool_rewards) == (["2", "5"], {"count": 0.5})
    response = to_score(TrajectoryBatch.from_trajectories([trajectory]))
    assert isinstance(response, Response)
    score = with_tool_rewards(Scored(1.0), response, Reward(tool_weights={"count": 0.1}))
    assert score == Scored(1.05, {"tool_reward/count": 0.5})


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (Outcome(Status.OK, "a\n", "", 0), "a"),
        (Outcome(Status.OK, "a\n", "b\n", 2), "a\nb\n[exit code 2]"),
        (Outcome(Status.TIMEOUT, "a", detail="still running after 10 s"), "a\n[timeout: still running after 10 s]"),
    ],
)
def test_a_policy_is_told_how_its_program_ended(outcome, text):
    assert as_text(outcome) == text


def test_what_the_sandbox_fails_is_not_told_but_raised():
    with pytest.raises(ToolFailed, match="no bwrap"):
        as_text(Outcome(Status.SANDBOX_FAILED, detail="no bwrap"))
