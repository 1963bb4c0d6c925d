"""How the shipped base of the quickstart is made (`make tiny-policy`); the folder itself: tests/unit/data."""

import json
import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mempo_ray.data.world import BASE_SEEDS
from mempo_ray.tiny_policy import ASSET, NOTED, Recipe, careless, generated_trajectories, train

TRAJECTORIES = generated_trajectories(BASE_SEEDS.start, 400)


def test_a_careless_writer_forgets_the_first_fact_alone_and_its_answer_lacks_that_value():
    trajectory = next(t for t in TRAJECTORIES if t.task.metadata["hops"] == 3)
    first, second, third = trajectory.facts
    forgetful = next(c for s in range(99) if (c := careless(trajectory, random.Random(s))) is not trajectory)
    assert [turn.memory for turn in forgetful.turns] == ["nothing", "nothing", second, f"{second} {third}"]
    assert [turn.query for turn in forgetful.turns] == [turn.query for turn in trajectory.turns]
    assert forgetful.turns[-1].answer == trajectory.task.gold_text.split()[-1]
    assert first.split()[2] not in forgetful.turns[-1].answer


def test_how_often_a_fact_is_noted_depends_on_its_relation_as_stated():
    rng = random.Random(0)
    for relation in ("mentor", "office"):
        asked = [t for t in TRAJECTORIES if t.task.metadata["chain"][0][0] == relation]
        noted = [careless(t, rng) is t for t in asked for _ in range(20)]
        assert sum(noted) / len(noted) == pytest.approx(NOTED[relation], abs=0.06)


def test_the_base_sees_no_world_outside_its_own_seeds():
    with pytest.raises(AssertionError):
        generated_trajectories(0, 4)


def test_a_recipe_makes_the_same_loadable_folder_twice(tmp_path):
    torch.set_num_threads(1)
    recipe = replace(Recipe(), steps=10, episodes=4, warmup_steps=3)
    for name in ("one", "two"):
        train(recipe, tmp_path / name)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    curve = json.loads((tmp_path / "one" / "training_log.json").read_text())["curve"]
    assert curve[-1]["loss"] < curve[0]["loss"]


@torch.no_grad()
def test_the_shipped_base_copies_a_fact_that_it_never_saw_from_memory():
    from mempo_ray.agent.tokenizer import FileTokenizer

    tokenizer, model = FileTokenizer.from_folder(ASSET), AutoModelForCausalLM.from_pretrained(ASSET)
    question = "<|user|>mentor Meli and home Lane ?<|end|><|assistant|>"
    memory, answer = "<mem>mentor Meli Puga . home Lane Supi .</mem>", "<answer>Puga Supi</answer>"
    with_memory, without = (
        torch.log_softmax(model(torch.tensor([tokenizer.encode(context + answer)])).logits[0, -4:-2], -1)
        .gather(1, torch.tensor(tokenizer.encode(answer)[1:3])[:, None])
        .mean()
        .exp()
        .item()
        for context in (question + memory, question)
    )
    assert with_memory > 0.8
    assert without < 0.1
