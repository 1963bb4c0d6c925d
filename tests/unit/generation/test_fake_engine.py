"""The scripted turns of `rollout.engine: fake`."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from mempo_ray.config.schema import Rollout
from mempo_ray.contracts import WeightManifest, WeightProof
from mempo_ray.errors import EngineFailed
from mempo_ray.generation.fake_engine import FakeEngine, random_turns
from mempo_ray.ports import GenerateRequest

TAGS = [f"<{slash}{tag}>" for tag in ("mem", "think", "search", "answer") for slash in ("", "/")]
WORDS = ["<eot>", *TAGS, "who", "leads", "Boko", "?"]
TURN = re.compile(
    r"<mem>( \w+){3} </mem> <think>( \w+){2} </think> (<search>( \w+){2} </search>|<answer> \w+ </answer>) <eot>"
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tokenizer


def turn(seed: int, **options) -> GenerateRequest:
    prompt = [WORDS.index(word) for word in ("who", "leads", "Boko", "?")]
    return GenerateRequest(np.array(prompt, np.int32), seed, 100, "q", **options)


def text(ids: list[int]) -> str:
    return " ".join(WORDS[i] for i in ids)


def test_turns_are_well_formed_and_made_of_words_of_their_prompt(tokenizer: Tokenizer, tmp_path: Path):
    script = random_turns(str(tmp_path), end_of_turn_id=0)
    turns = [text(script(turn(seed))) for seed in range(40)]
    assert all(TURN.fullmatch(each) for each in turns)
    assert 0 < sum("<answer>" in each for each in turns) < 40
    assert not any("?" in each for each in turns)


def test_turns_follow_the_seed_and_greedy_ones_the_prompt_alone(tokenizer: Tokenizer, tmp_path: Path):
    script = random_turns(str(tmp_path), end_of_turn_id=0)
    assert script(turn(1)) == script(turn(1))
    assert len({tuple(script(turn(seed))) for seed in range(10)}) > 5
    assert script(turn(1, greedy=True)) == script(turn(2, greedy=True))


async def test_a_killed_engine_is_errored_and_refuses_everything():
    engine = FakeEngine("e", lambda request: [5, 0], Rollout())
    await engine.start()
    await engine.update(WeightManifest(1, "", WeightProof((), ())))
    await engine.kill()
    assert engine.errored
    for call in (engine.generate(turn(0)), engine.update(WeightManifest(2, "", WeightProof((), ()))), engine.pause()):
        with pytest.raises(EngineFailed, match="dead"):
            await call
