"""A reward model's scores are those of transformers, whatever else is in the micro-batch, at the token that counts."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
)

from mempo_ray.actors.reward_model import RewardModelWorker
from mempo_ray.config.schema import RewardModel as Section
from mempo_ray.contracts import Scored
from mempo_ray.errors import ConfigError, DataError
from mempo_ray.training.reward_model import Conversation, RewardModel, turn_ends
from tests.fakes.reward_model import save_model, save_process_model

QUESTION, TURNS = "mentor Boko ?", ("mentor Boko Sari .", "mentor Sari Boko . mentor")


@pytest.fixture(scope="module")
def bradley_terry(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("bt"), Qwen2ForSequenceClassification, 1)


@pytest.fixture(scope="module")
def process_model(tmp_path_factory) -> Path:
    return save_process_model(tmp_path_factory.mktemp("prm"))


def test_a_bradley_terry_score_is_the_logit_of_transformers_alone_and_in_company(bradley_terry):
    model = RewardModel.from_folder(Section(folder=str(bradley_terry), squash=False))
    long, short = model.encode(QUESTION, TURNS), model.encode(QUESTION, TURNS[:1])
    referee = Qwen2ForSequenceClassification.from_pretrained(bradley_terry).eval()
    with torch.inference_mode():
        expected = [referee(torch.tensor([c.ids])).logits.item() for c in (long, short)]
    assert abs(expected[0] - expected[1]) > 1e-3
    together = [score for (score,) in model.score([long, short])]
    alone = [score for c in (long, short) for (score,) in model.score([c])]
    assert together == pytest.approx(expected, abs=1e-5)
    assert alone == pytest.approx(expected, abs=1e-5)
    squashed = RewardModel.from_folder(Section(folder=str(bradley_terry)))
    assert squashed.score([long])[0][0] == pytest.approx(torch.tensor(expected[0]).sigmoid().item(), abs=1e-6)


def test_the_conversation_is_the_templates(bradley_terry):
    conversation = RewardModel.from_folder(Section(folder=str(bradley_terry))).encode("a", ("b", "c"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(bradley_terry)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\nc"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert list(conversation.ids) == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert conversation.ends == (len(conversation.ids) - 1,)


def test_a_process_score_stands_at_the_end_of_its_turn(process_model):
    model = RewardModel.from_folder(Section(folder=str(process_model), process=True))
    conversation = model.encode(QUESTION, TURNS)
    referee = Qwen2ForTokenClassification.from_pretrained(process_model).eval()
    with torch.inference_mode():
        good = referee(torch.tensor([conversation.ids])).logits.softmax(-1)[0, :, 1]
    (scores,) = model.score([conversation])
    assert scores == pytest.approx(good[list(conversation.ends)].tolist(), abs=1e-5)
    first = model.encode(QUESTION, TURNS[:1])
    assert conversation.ends[0] == first.ends[0]  # a later turn moves nothing


def test_turn_ends_are_found_in_order_even_where_turns_are_alike():
    assert turn_ends("q one one", ["one", "one"], [(0, 1), (2, 5), (6, 9)]) == (1, 2)
    with pytest.raises(DataError, match="turn 1 is not in"):
        turn_ends("q one", ["one", "two"], [(0, 1), (2, 5)])
    assert turn_ends("one one", ["one"], [(0, 3), (4, 7)]) == (1,)  # not the question's


@pytest.mark.parametrize(
    ("text", "turns", "ends"),
    [
        ("q one\n\ntwo", ["one", "", "two"], (1, 1, 3)),
        ("q one\n\n", ["one", " ", ""], (1, 1, 1)),
        ("q \none", ["", "one"], (1, 2)),
        ("q ", ["", ""], (0, 0)),
    ],
)
def test_an_empty_turn_is_read_where_the_turn_before_ends(text, turns, ends):
    offsets = [(m.start(), m.end()) for m in re.finditer(r"\w+\s?|\s+", text)]
    assert turn_ends(text, turns, offsets) == ends


def test_what_is_cut_on_the_left_is_read_where_the_first_turn_that_is_left_ends():
    conversation = Conversation((1, 2, 3, 4, 5, 6), (1, 3, 5))
    assert conversation.truncate(6) is conversation
    assert conversation.truncate(4) == Conversation((3, 4, 5, 6), (1, 1, 3), truncated=True)
    assert Conversation((1, 2, 3, 4), (0, 1)).truncate(2) == Conversation((3, 4), (1, 1), truncated=True)


def test_what_is_no_reward_model_is_told_before_anything_is_scored(tmp_path, bradley_terry):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        RewardModel.from_folder(Section(folder=str(tmp_path)))
    three = save_model(tmp_path / "three", Qwen2ForSequenceClassification, 3)
    with pytest.raises(ConfigError, match="3 labels, which is no reward model"):
        RewardModel.from_folder(Section(folder=str(three)))


async def test_a_policy_cannot_write_itself_out_of_its_score(process_model):
    worker = RewardModelWorker("prm", Section(folder=str(process_model), process=True, max_tokens=12))
    long = await worker.score(QUESTION, ("mentor " * 50, "", "Boko Sari"))
    assert (long.extra, len(long.process_scores)) == ({"truncated": True}, 3)
    short = await worker.score("x", ("", "x"))
    assert (short.extra, len(short.process_scores)) == ({"truncated": False}, 2)
    await worker.close()


async def test_waiting_requests_share_forwards_and_each_gets_its_own_score(process_model, bradley_terry):
    worker = RewardModelWorker("rm", Section(folder=str(bradley_terry), squash=False, micro_batch_tokens=200))
    alone = [await worker.score(QUESTION, TURNS[:n]) for n in (1, 2)]
    scores = await asyncio.gather(*(worker.score(QUESTION, TURNS[:n]) for n in (1, 2) * 8))
    assert all(isinstance(score, Scored) and score.process_scores is None for score in scores)
    assert [s.score for s in scores] == pytest.approx([s.score for s in alone] * 8, abs=1e-5)
    assert (await worker.take_stats())["num_micro_batches"] < 2 + 16
    await worker.close()

    process = RewardModelWorker("prm", Section(folder=str(process_model), process=True, aggregate="min"))
    score = await process.score(QUESTION, TURNS)
    assert score.score == min(score.process_scores)
    assert len(score.process_scores) == 2
    await process.close()


async def test_without_an_aggregate_only_the_turns_have_a_score(process_model):
    worker = RewardModelWorker("prm", Section(folder=str(process_model), process=True, aggregate="none"))
    score = await worker.score(QUESTION, TURNS)
    assert (score.score, len(score.process_scores)) == (0.0, 2)
    assert all(step > 0 for step in score.process_scores)
    await worker.close()
    with pytest.raises(ValidationError, match="aggregate=none leaves only the scores of the turns"):
        Section(folder=str(process_model), aggregate="none")


async def test_a_forward_that_fails_leaves_only_its_own_micro_batch_without_scores(bradley_terry, monkeypatch):
    worker = RewardModelWorker("rm", Section(folder=str(bradley_terry), max_wait_s=0))
    score = RewardModel.score

    def out_of_memory(model, conversations):
        raise torch.OutOfMemoryError("no memory for this one")

    monkeypatch.setattr(RewardModel, "score", out_of_memory)
    failed = await worker.score(QUESTION, TURNS)
    assert (failed.kind, "OutOfMemoryError" in failed.reason) == ("infrastructure", True)
    monkeypatch.setattr(RewardModel, "score", score)
    assert isinstance(await worker.score(QUESTION, TURNS), Scored)
    await worker.close()


def test_a_chat_template_that_refuses_a_conversation_is_data(bradley_terry, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ raise_exception('only one turn') }}")
    model = RewardModel.from_folder(Section(folder=str(bradley_terry), chat_template=str(tmp_path / "t.jinja")))
    with pytest.raises(DataError, match="refuses the conversation: only one turn"):
        model.encode(QUESTION, TURNS)
