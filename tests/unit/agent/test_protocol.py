"""Blocks, spans and the format verdict (algorithm.md §1, §2)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempo_ray.agent.protocol import FORMAT_CHECKS, extract_answer, format_report, parse_turn, write_turn
from mempo_ray.agent.tokenizer import FileTokenizer
from mempo_ray.contracts import NO_SPAN
from tests.fakes.tokenizer import byte_level_folder

SEARCH = write_turn("nothing", "look", search="mentor Boko")
ANSWER = write_turn("Sari", "done", answer="Sari")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return FileTokenizer.from_folder(byte_level_folder(tmp_path_factory.mktemp("bpe")))


def turn(text):
    return parse_turn([text.encode()])


def failed(*texts, responded=None):
    turns = [turn(text) for text in texts]
    responded = [t.action is not None and t.action.name == "search" for t in turns] if responded is None else responded
    return {check for check, ok in format_report(turns, responded).items() if not ok}


def test_the_example_of_the_docstring_holds():
    parsed = parse_turn([b"<mem>", b"a</mem", b"><", b"answer>", b"b</answer>"])
    assert parsed.spans == {"mem": (0, 3), "think": NO_SPAN, "search": NO_SPAN, "answer": (3, 5)}


def test_a_straddling_token_belongs_to_the_block_of_its_first_byte(tokenizer):
    ids = tokenizer.encode("<mem>a</mem><answer>b</answer>")
    pieces = [tokenizer.token_bytes(i) for i in ids]
    assert b"><" in pieces, "the test tokenizer should straddle"
    parsed = parse_turn(pieces)
    assert parsed.spans["mem"][1] == parsed.spans["answer"][0] == pieces.index(b"><") + 1


@given(
    parts=st.lists(
        st.sampled_from(["<mem>", "</mem>", "<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>"])
        | st.text(max_size=6),
        max_size=14,
    )
)
def test_a_span_owns_exactly_the_tokens_whose_first_byte_lies_in_its_block(tokenizer, parts):
    pieces = [tokenizer.token_bytes(i) for i in tokenizer.encode("".join(parts))]
    parsed = parse_turn(pieces)
    assert parsed.text == "".join(parts).encode()
    for name, (start, stop) in parsed.spans.items():
        block = parsed.block(name)
        assert (block is None) == ((start, stop) == NO_SPAN)
        if block is not None:
            owned = [n for n, at in enumerate(parsed.starts_T) if block.start <= at < block.stop]
            assert owned == list(range(start, stop))
            assert parsed.text[block.start : block.stop] == f"<{name}>".encode() + block.content + f"</{name}>".encode()
    for earlier, later in zip(parsed.blocks, parsed.blocks[1:], strict=False):
        assert earlier.stop <= later.start


def test_a_correct_episode_passes_all_eleven_checks():
    assert failed(SEARCH, ANSWER) == set()
    assert tuple(format_report([], [])) == FORMAT_CHECKS
    assert len(FORMAT_CHECKS) == 11


@pytest.mark.parametrize(
    ("texts", "checks"),
    [
        ((ANSWER,), {"search_present"}),
        ((SEARCH, ANSWER.replace("</think>", "")), {"think_paired", "think_follows_mem"}),
        ((SEARCH, SEARCH), {"answer_present"}),
        ((SEARCH, ANSWER.replace("</answer>", "")), {"answer_paired", "answer_present"}),
        ((SEARCH + "<search>", ANSWER), {"search_paired"}),
        ((SEARCH, ANSWER + "</mem>"), {"mem_paired"}),
        ((SEARCH, "well, " + ANSWER), {"mem_opens_each_turn"}),
        ((SEARCH, "<mem>a</mem>" + ANSWER), {"mem_opens_each_turn", "think_follows_mem"}),
        ((SEARCH, "<mem>Sari</mem><answer>Sari</answer>"), {"think_follows_mem"}),
        ((SEARCH, "</answer>" + ANSWER + "<answer>"), {"mem_opens_each_turn", "answer_paired", "answer_in_order"}),
        ((SEARCH + "<answer>Sari</answer>", ANSWER), {"search_answered"}),
        ((SEARCH + "<search>again</search>", ANSWER), {"search_answered"}),
        ((SEARCH, ANSWER + "<search>more</search>"), {"answer_in_order"}),
    ],
)
def test_each_violation_is_reported_by_name(texts, checks):
    assert failed(*texts) == checks


def test_a_search_without_its_response_is_a_violation():
    assert failed(SEARCH, ANSWER, responded=[False, False]) == {"search_answered"}


def test_an_episode_without_turns_fails_what_must_be_present():
    assert {c for c, ok in format_report([], []).items() if not ok} == {
        *("think_present", "answer_present", "search_present", "mem_opens_each_turn", "think_follows_mem")
    }


def test_white_space_before_and_text_between_blocks_are_ignored():
    assert (
        failed(SEARCH, "\n " + ANSWER.replace("<think>", " so <think>").replace("<answer>", " hence <answer>")) == set()
    )


def test_the_first_action_counts():
    assert turn("<search>a</search><answer>b</answer>").action.text == "a"
    assert turn("<answer>b</answer><search>a</search>").action.text == "b"


def test_tags_inside_a_block_are_content():
    parsed = turn("<mem>m</mem><think>maybe <search>x</search></think><answer>b</answer>")
    assert [block.name for block in parsed.blocks] == ["mem", "think", "answer"]
    assert parsed.action.text == "b"


def test_a_search_for_nothing_is_no_action():
    assert turn("<mem>m</mem><think>t</think><search> </search>").action is None


@pytest.mark.parametrize("text", ["<mem>a</mem><mem>b</mem>", "<mem>a", "<mem>a<mem>b</mem>", "a</mem>", ""])
def test_memories_that_are_repeated_truncated_or_nested_have_no_span(text):
    assert turn(text).block("mem") is None
    assert turn(text).spans["mem"] == NO_SPAN


def test_the_last_answer_counts_stripped():
    assert extract_answer([turn("<answer>a</answer>"), turn("<answer>b</answer> or <answer> c\n</answer>")]) == "c"
    assert extract_answer([turn(SEARCH)]) is None
