"""What every `ports.Tokenizer` does: two small vocabularies made on the spot, and the shipped folder."""

from __future__ import annotations

import pytest

from mempo_ray.agent.tokenizer import FileTokenizer
from mempo_ray.config.models import model_folder
from mempo_ray.ports import Tokenizer
from tests.fakes.tokenizer import byte_level_folder, metaspace_folder

TURN = "<mem>nothing</mem><think>need mentor and home</think><search>mentor .</search>"
"""Of words that all three know."""


@pytest.fixture(scope="module", params=["trained BPE", "words", "builtin:tiny"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    make = {"trained BPE": byte_level_folder, "words": metaspace_folder}.get(request.param)
    folder = make(tmp_path_factory.mktemp("model")) if make else model_folder(request.param)
    return FileTokenizer.from_folder(folder)


@pytest.mark.parametrize("text", ["", TURN, "mentor Zürich", "<answer>home</answer>"])
def test_offsets_are_ascending_byte_ranges_of_the_same_ids(tokenizer, text):
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text)
    assert len(offsets) == len(ids)
    borders = [border for offset in offsets for border in offset]
    assert borders == sorted(borders)
    assert all(0 <= border <= len(text.encode()) for border in borders)


def test_text_is_the_bytes_of_its_ids(tokenizer):
    ids = tokenizer.encode(TURN)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == tokenizer.decode(ids)
    spelt = tokenizer.decode(ids)
    assert spelt.replace(" ", "") == TURN.replace(" ", "")  # word vocabularies put a space before a word


def test_what_was_decoded_encodes_to_the_same_ids(tokenizer):
    ids = tokenizer.encode(TURN)
    assert tokenizer.encode(tokenizer.decode(ids)) == ids


def test_nothing_is_added_and_the_end_of_turn_is_one_id_that_text_can_spell(tokenizer):
    end = tokenizer.token_bytes(tokenizer.end_of_turn_id).decode()
    assert tokenizer.encode(end) == [tokenizer.end_of_turn_id]
    assert tokenizer.encode("") == []
    assert tokenizer.encode(TURN + end) == [*tokenizer.encode(TURN), tokenizer.end_of_turn_id]


def test_an_id_of_no_token_stands_for_no_bytes(tokenizer):
    assert tokenizer.token_bytes(10**9) == b""
    assert tokenizer.decode([10**9]) == ""
