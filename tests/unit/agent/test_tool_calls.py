"""Forms of a call, and the format rules when a run has other tools than search."""

import pytest

from mempo_ray.agent.protocol import format_report, parse_turn
from mempo_ray.agent.tools import Services, Toolbox, ToolCall
from mempo_ray.config.schema import Agent
from mempo_ray.contracts import NO_SPAN
from mempo_ray.errors import ToolFailed
from tests.fakes.search import FakeSearch

OPENING = "<mem>m</mem><think>t</think>"


async def run_code(source):
    raise ToolFailed("not in this test")


def box(parser):
    return Toolbox(
        Agent(tools=("search", "calculator", "python"), tool_parser=parser), Services(FakeSearch(), run_code)
    )


def parse(text, tools):
    return parse_turn([text.encode()], tools.tags)


def hermes(json):
    return f"{OPENING}<tool_call>\n{json}\n</tool_call>"


@pytest.mark.parametrize(
    ("parser", "text", "call"),
    [
        ("tags", f"{OPENING}<search> mentor Boko </search>", ToolCall("search", {"query": "mentor Boko"})),
        ("tags", f"{OPENING}<python>\nprint('<b>')\n</python>", ToolCall("python", {"code": "print('<b>')"})),
        ("tags", f"{OPENING}<calculator>1 + 1</calculator>", ToolCall("calculator", {"expression": "1 + 1"})),
        ("tags", f"{OPENING}<calculator> </calculator>", None),
        ("tags", f"{OPENING}<answer>x</answer>", None),
        ("tags", hermes('{"name": "search", "arguments": {"query": "x"}}'), None),
        ("hermes", hermes('{"name": "search", "arguments": {"query": "x"}}'), ToolCall("search", {"query": "x"})),
        ("hermes", hermes('{"name": "python", "arguments": {}}'), ToolCall("python", {})),
        ("hermes", hermes('{"name": "rm", "arguments": {}}'), None),
        ("hermes", hermes('{"name": "search"}'), None),
        ("hermes", hermes('{"name": "search", "arguments": "x"}'), None),
        ("hermes", hermes("search x"), None),
        ("hermes", hermes("[1]"), None),
        ("hermes", hermes(r'{"name": "search", "arguments": {"query": "\ud83d"}}'), None),
        (
            "hermes",
            hermes(r'{"name": "search", "arguments": {"query": "\ud83d\ude00"}}'),
            ToolCall("search", {"query": "😀"}),
        ),
        ("hermes", f"{OPENING}<search>x</search>", None),
    ],
)
def test_a_call_is_read_from_its_block(parser, text, call):
    tools = box(parser)
    assert tools.call_of(parse(text, tools).action) == call


def test_json_in_a_tag_is_for_tools_that_do_not_take_one_text(tmp_path):
    file = tmp_path / "tools.yaml"
    file.write_text("tools: [{class: 'tests.fakes.tools:PairTool'}]")
    tools = Toolbox(Agent(tools=(), tools_file=str(file)), Services(FakeSearch()))
    texts = ['<pair>{"a": 1, "b": "x"}</pair>', "<pair>1, x</pair>"]
    calls = [tools.call_of(parse(text, tools).action) for text in texts]
    assert calls == [ToolCall("pair", {"a": 1, "b": "x"}), None]


@pytest.mark.parametrize(
    ("parser", "call"),
    [
        ("tags", "<search>x</search>"),
        ("tags", "<python>print(1)</python>"),
        ("hermes", '<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>'),
    ],
)
def test_to_the_format_rules_every_call_is_the_search(parser, call):
    tools = box(parser)
    turns = [parse(OPENING + call, tools), parse(f"{OPENING}<answer>a</answer>", tools)]
    assert all(format_report(turns, [True, False]).values())
    start, stop = turns[0].spans["search"]
    assert (start, stop) != NO_SPAN


@pytest.mark.parametrize(
    ("texts", "failed"),
    [
        (["<python>1</python><search>x</search>", "<answer>a</answer>"], {"search_answered"}),
        (["<python>1</python>"], {"answer_present", "search_answered"}),
        (["<python>1</python><python>", "<answer>a</answer>"], {"search_paired"}),
        (["<answer>a</answer>"], {"search_present"}),
        (["<answer>a</answer><calculator>1</calculator>"], {"answer_in_order"}),
    ],
)
def test_a_turn_takes_one_call_or_one_answer_whatever_the_tool(texts, failed):
    tools = box("tags")
    turns = [parse(OPENING + text, tools) for text in texts]
    report = format_report(turns, [True, False][: len(turns)] if len(turns) > 1 else [False])
    assert {check for check, passed in report.items() if not passed} == failed


def test_a_tool_that_a_run_does_not_have_is_text():
    turn = parse_turn([f"{OPENING}<python>print(1)</python>".encode()])
    assert turn.action is None
    assert [block.name for block in turn.blocks] == ["mem", "think"]


def test_two_calls_in_a_turn_have_no_span():
    tools = box("tags")
    assert parse(f"{OPENING}<python>1</python><search>x</search>", tools).spans["search"] == NO_SPAN
