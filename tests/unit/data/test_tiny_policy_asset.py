"""The shipped base of the quickstart, as a folder: read with `tokenizers` and `safetensors` alone."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

import mempo_ray
from mempo_ray.agent.prompt import Renderer
from mempo_ray.agent.tokenizer import FileTokenizer
from mempo_ray.config.schema import Config
from mempo_ray.contracts import Passage
from mempo_ray.data.world import AtlasSpec, build_atlas, synthetic_tasks

FOLDER = Path(mempo_ray.__file__).parent / "assets" / "tiny_policy"
TOKENIZER = FileTokenizer.from_folder(FOLDER)
RENDERER = Renderer.from_folder(FOLDER, TOKENIZER, Config().agent)
ATLAS = build_atlas(AtlasSpec())


def test_the_folder_is_small_enough_to_ship():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 8_000_000
    with safe_open(FOLDER / "model.safetensors", "np") as weights:
        assert sum(weights.get_tensor(name).size for name in weights.keys()) <= 3_000_000  # noqa: SIM118


def test_its_log_says_with_which_recipe_it_was_made():
    log = json.loads((FOLDER / "training_log.json").read_text())
    assert log["recipe"]["seed"] >= 0
    assert log["curve"][-1]["step"] == log["recipe"]["steps"] - 1


def test_the_model_has_an_embedding_for_every_token_and_ends_turns_with_the_tokenizer_s_token():
    config = json.loads((FOLDER / "config.json").read_text())
    ids = json.loads((FOLDER / "tokenizer.json").read_text())["model"]["vocab"].values()
    assert config["vocab_size"] == len(ids) == max(ids) + 1
    assert config["eos_token_id"] == TOKENIZER.end_of_turn_id


def test_every_word_of_the_world_is_one_known_token():
    unknown = TOKENIZER.encode("<|unk|>")[0]
    texts = [p.text for p in ATLAS.passages()] + [t.question for t in synthetic_tasks("synthetic:train?tasks=300")]
    for text in texts:
        ids = TOKENIZER.encode(text)
        assert unknown not in ids
        assert len(ids) == len(text.split())


@pytest.mark.parametrize(
    "text",
    [
        "<mem>nothing</mem><think>need mentor Meli</think><search>mentor Meli</search>",
        "<mem> nothing </mem>\n<think> done </think> <answer> Puga  Supi </answer>",
    ],
)
def test_the_bytes_of_the_tokens_are_the_decoded_text(text):
    ids = TOKENIZER.encode(text)
    assert b"".join(map(TOKENIZER.token_bytes, ids)).decode() == TOKENIZER.decode(ids)
    assert TOKENIZER.encode(TOKENIZER.decode(ids)) == ids


def test_the_frame_of_a_message_is_two_tokens():
    ids = RENDERER.initial_ids("mentor Meli and home Lane ?")
    assert TOKENIZER.decode(ids) == "<|user|> mentor Meli and home Lane ?<|end|><|assistant|>"
    tool = RENDERER.tool_ids([Passage("p", "", "mentor Meli Puga .")], limit_tokens=64).ids
    assert TOKENIZER.decode(tool) == (
        "<|user|><tool_response> mentor Meli Puga .</tool_response><|end|><|assistant|>"
    )  # fmt: skip
