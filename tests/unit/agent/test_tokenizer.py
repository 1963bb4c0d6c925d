"""FileTokenizer: what an id stands for in bytes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempo_ray.agent.tokenizer import FileTokenizer
from mempo_ray.errors import ConfigError
from tests.fakes.tokenizer import byte_level_folder, metaspace_folder


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return FileTokenizer.from_folder(byte_level_folder(tmp_path_factory.mktemp("bpe")))


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory):
    return FileTokenizer.from_folder(metaspace_folder(tmp_path_factory.mktemp("words")))


@given(text=st.text() | st.from_regex(r"(<mem>|</mem>|<\|im_end\|>|é|😀| |\n|a)*"))
def test_bytes_of_byte_level_ids_give_the_text_back(byte_level, text):
    ids, offsets = byte_level.encode_with_offsets(text)
    assert b"".join(map(byte_level.token_bytes, ids)) == text.encode()
    assert byte_level.decode(ids) == text
    assert [text.encode()[a:b] for a, b in offsets] == [byte_level.token_bytes(i) for i in ids]


def test_a_character_split_over_tokens_has_byte_offsets_of_its_own(byte_level):
    ids, offsets = byte_level.encode_with_offsets("😀")
    assert len(ids) > 1
    assert offsets[0][0] == 0
    assert offsets[-1][1] == len("😀".encode())


def test_metaspace_text_comes_back_with_the_prepended_space(metaspace):
    ids, offsets = metaspace.encode_with_offsets("<answer>Sari</answer>")
    assert len(ids) == 3
    assert metaspace.decode(ids) == "<answer> Sari</answer>"
    assert offsets == [(0, 8), (8, 12), (12, 21)]


def test_metaspace_offsets_are_bytes_of_the_original_text(metaspace):
    _, offsets = metaspace.encode_with_offsets("é Boko")
    assert offsets[-1] == (2, 7)


def test_the_end_of_turn_token_is_the_eos_token(byte_level):
    assert byte_level.token_bytes(byte_level.end_of_turn_id) == b"<|im_end|>"
    assert byte_level.encode("x<|im_end|>")[-1] == byte_level.end_of_turn_id


def test_the_end_of_turn_token_may_come_from_generation_config(tmp_path):
    folder = byte_level_folder(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert FileTokenizer.from_folder(folder).end_of_turn_id == 2


def test_only_a_vocabulary_of_words_has_a_token_for_unknown_ones(byte_level, metaspace):
    assert byte_level.unknown_id is None
    assert set(metaspace.encode("qwrtz")) == {metaspace.unknown_id}


def test_an_id_outside_the_vocabulary_stands_for_no_bytes(byte_level):
    assert byte_level.token_bytes(999_999) == b""


def test_a_folder_without_tokenizer_names_the_key(tmp_path):
    with pytest.raises(ConfigError, match=r"policy\.model.*holds no tokenizer\.json"):
        FileTokenizer.from_folder(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        FileTokenizer.from_folder(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_that_was_cut_is_named(tmp_path, name):
    file = byte_level_folder(tmp_path) / name
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ConfigError, match=rf"policy\.model: .*{name} is no.*copy the model folder again"):
        FileTokenizer.from_folder(tmp_path)


def test_a_folder_without_end_of_turn_token_says_so(tmp_path):
    folder = byte_level_folder(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match="eos_token"):
        FileTokenizer.from_folder(folder)
