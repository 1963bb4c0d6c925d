"""Memory ids and probes (algorithm.md §3, "In tokens")."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempo_ray.agent.memory import encode_probe, joined_probe, memory_ids, swapped_memories
from mempo_ray.agent.protocol import parse_turn
from mempo_ray.agent.tokenizer import FileTokenizer
from mempo_ray.contracts import Task
from tests.fakes.tokenizer import byte_level_folder, metaspace_folder


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return FileTokenizer.from_folder(byte_level_folder(tmp_path_factory.mktemp("bpe")))


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory):
    return FileTokenizer.from_folder(metaspace_folder(tmp_path_factory.mktemp("words")))


def memory_of(tokenizer, text):
    ids = np.asarray(tokenizer.encode(text), np.int32)
    parsed = parse_turn([tokenizer.token_bytes(i) for i in ids])
    return memory_ids(ids, parsed, tokenizer)


def test_a_tail_that_reaches_past_the_tag_is_encoded_again_and_counted(byte_level):
    memory, num_reencoded = memory_of(byte_level, "<mem>a</mem><answer>b</answer>")
    assert byte_level.decode(memory.tolist()) == "<mem>a</mem>"
    assert num_reencoded == 1


def test_a_memory_that_ends_on_a_token_border_is_taken_as_sampled(metaspace):
    memory, num_reencoded = memory_of(metaspace, "<mem>mentor Boko Sari .</mem><think>done</think>")
    assert memory.tolist() == metaspace.encode("<mem>mentor Boko Sari .</mem>")
    assert num_reencoded == 0


@pytest.mark.parametrize("text", ["<mem>a</mem><mem>b</mem>", "<mem>a", "<think>b</think>"])
def test_no_single_whole_memory_no_ids(byte_level, text):
    memory, num_reencoded = memory_of(byte_level, text)
    assert (len(memory), num_reencoded) == (0, 0)


@given(before=st.text(max_size=4), inside=st.text(max_size=20), after=st.text(max_size=4))
def test_memory_ids_hold_exactly_the_bytes_of_the_block(byte_level, before, inside, after):
    memory, _ = memory_of(byte_level, f"{before}<mem>{inside}</mem>{after}")
    assert byte_level.decode(memory.tolist()) == f"<mem>{inside}</mem>"


@given(gold=st.text(min_size=1, max_size=20))
def test_probe_targets_are_the_tokens_that_hold_a_byte_of_the_gold_text(byte_level, gold):
    probe = encode_probe("<answer>", gold, "</answer>", byte_level)
    held = b"".join(byte_level.token_bytes(i) for i in probe.ids[probe.start : probe.stop])
    assert gold.encode() in held
    inner = b"".join(byte_level.token_bytes(i) for i in probe.ids[probe.start + 1 : probe.stop - 1])
    assert len(inner) < len(gold.encode()) or len(held) == len(gold.encode())


def test_the_tiny_tokenizer_scores_the_word_alone(metaspace):
    probe = encode_probe("<answer>", "Sari Lund", "</answer>", metaspace)
    assert (len(probe.ids), probe.start, probe.stop) == (4, 1, 3)


def test_an_empty_gold_text_has_no_targets(byte_level):
    probe = encode_probe("<answer>", "", "</answer>", byte_level)
    assert probe.start == probe.stop


def test_several_objectives_are_joined_by_default():
    assert joined_probe(Task("t", "q", (("a", "A"), ("b",)), "x")) == [("a; b", 0)]


def test_swapped_memories_come_from_another_question_and_the_same_turn():
    assert swapped_memories([[[1], [2]], [[], [4]], [[], []]]) == [((4,), (4,)), ((1,), (2,)), ((1,), (2,))]


def test_one_writer_has_nobody_to_swap_with():
    assert swapped_memories([[[1]], [[]]]) == [(), ()]
