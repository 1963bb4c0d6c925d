"""Every example of docs/extending.md is run, as a module that `plugins` would name, and does what the page says."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from mempo_ray.agent.tools import TOOLS, Services
from mempo_ray.algo.estimators import ScoredTrajectory
from mempo_ray.algo.policy_loss import Tokens
from mempo_ray.algo.registry import ADV_ESTIMATORS, MEMORY_REWARDS, POLICY_LOSSES
from mempo_ray.config.schema import Algorithm, CustomFunction, MemoryReward, Reward
from mempo_ray.contracts import EndReason, LogProbResult, PayloadRef, Probe, Scored, TrajectorySummary
from mempo_ray.errors import ConfigError
from mempo_ray.rewards.contract import Response, score_with
from mempo_ray.rewards.custom import load_custom_scorer
from mempo_ray.rewards.registry import MANAGERS, SCORERS, load_manager, scorer_for
from tests.fakes.search import FakeSearch

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"^## (.+?)\n(?:(?!^## ).)*?```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE))
RIGHT = Response("my-org/capitals", (("Paris",),), turns=("<answer>Paris</answer>",), answer="Paris", num_tokens=100)


REGISTRIES = (SCORERS, MANAGERS, ADV_ESTIMATORS, POLICY_LOSSES, MEMORY_REWARDS, TOOLS)


@pytest.fixture
def pieces(monkeypatch) -> None:
    """All examples as one plugin, in registries that forget them after the test."""
    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    exec("\n\n".join(EXAMPLES.values()), {"__name__": "my_pieces"})


def test_each_kind_of_piece_has_an_example():
    assert len(EXAMPLES) == 7


def test_the_scorer_is_found_by_the_data_source_of_a_row(pieces):
    entry = scorer_for("my-org/capitals", Reward())
    assert score_with(entry.load(), RIGHT, Reward()) == Scored(1.0, {"num_turns": 1})


def test_the_function_in_a_file_is_loaded_with_its_arguments(tmp_path):
    (tmp_path / "my_reward.py").write_text(EXAMPLES["A reward function in a file"])
    section = CustomFunction(path=str(tmp_path / "my_reward.py"), name="compute_score", kwargs={"bonus": 0.5})
    assert score_with(load_custom_scorer(section), RIGHT, Reward()) == Scored(1.5)


def test_the_manager_is_made_by_its_name(pieces):
    manager = load_manager(Reward(manager="brief", scorer="exact_match"))
    assert manager.score(RIGHT).score == pytest.approx(0.9)


def test_the_estimator_gives_a_number_a_turn(pieces):
    group = [ScoredTrajectory(score, 2, True) for score in (0.0, 0.5, 1.0)]
    [found] = ADV_ESTIMATORS.get("median")([group], Algorithm())
    assert np.array(found).tolist() == [[-0.5, -0.5], [0.0, 0.0], [0.5, 0.5]]


def test_the_loss_gives_a_number_a_token(pieces):
    given = Tokens(
        torch.log(torch.tensor([1.0, 2.0])), torch.zeros(2), torch.ones(2), torch.zeros(2, dtype=torch.int64)
    )
    found = POLICY_LOSSES.get("hinge")(given, Algorithm())
    assert found.loss.tolist() == pytest.approx([-1.0, -1.2])
    assert found.is_clipped.tolist() == [False, True]


def test_the_memory_reward_asks_as_mempo_and_pays_for_gains_only(pieces):
    method = MEMORY_REWARDS.get("only_gains")
    probe = Probe((7, 8), 0, 2)
    ended = TrajectorySummary("q", 0, 0, EndReason.ANSWERED, "", True, (9, 9), (6, 6), (5, 0), (4, 4), (0, 0), (probe,))
    asked = method.request(ended, PayloadRef("q", None), MemoryReward(), policy_version=0, deadline_s=1)
    logprobs = [np.zeros(2, np.float32) for _ in asked.request.marked]
    worse, better = asked.samples
    logprobs[worse.memory] -= 1.0
    logprobs[better.baseline] -= 1.0
    samples = method.rewards(asked, LogProbResult(asked.request.id, 0, tuple(logprobs)), MemoryReward())
    assert [sample.reward for sample in samples] == pytest.approx([0.0, 1 - np.exp(-1)])


async def test_the_tool_answers_a_call(pieces):
    tool = TOOLS.get("shout")(Services(FakeSearch({})), 3, {})
    result = await tool.execute(await tool.create(None), {"text": "hello"})
    assert [passage.text for passage in result.passages] == ["HELLO"]
    assert tool.schema["function"]["name"] == "shout"


def test_a_name_that_is_taken_is_refused_with_both_places(pieces):
    with pytest.raises(ConfigError, match=r"'dapo' is registered twice, at .*dapo.* and at"):
        exec(EXAMPLES["A reward manager"].replace('"brief"', '"dapo"'), {"__name__": "again"})
