"""The naive manager chooses a scorer and turns whatever it does into a value."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mempo_ray.config.schema import CustomFunction, Reward
from mempo_ray.contracts import Scored, Task, Unscored
from mempo_ray.errors import ConfigError
from mempo_ray.rewards.contract import Response, response_of
from mempo_ray.rewards.custom import ground_truth
from mempo_ray.rewards.registry import load_manager, register_scorer
from tests.fakes.trajectories import TASK, trajectory, turn

OWN = dataclasses.replace(TASK, data_source="own")


def response(*args, **kwargs) -> Response:
    return response_of(trajectory(*args, **kwargs))


def custom(tmp_path: Path, source: str, name: str = "compute_score") -> Reward:
    path = tmp_path / "my_reward.py"
    path.write_text(source)
    return Reward(custom_function=CustomFunction(path=str(path), name=name))


def test_auto_takes_mempo_where_the_row_names_no_data_source():
    assert load_manager(Reward()).score(response("paris", failed_checks=["mem_paired"], task=OWN)).score == 0.0


def test_auto_scores_no_data_source_that_nobody_knows():
    score = load_manager(Reward()).score(response(task=dataclasses.replace(TASK, data_source="who/knows")))
    assert isinstance(score, Unscored)
    assert (score.kind, "register_scorer" in score.reason) == ("data", True)


def test_auto_takes_a_scorer_registered_for_the_data_source():
    @register_scorer("test-org/always-half")
    def always_half(response, settings):
        return 0.5

    task = Task("q", "?", (("a",),), "test-org/always-half")
    assert load_manager(Reward()).score(response("a", task=task)).score == 0.5


def test_a_named_scorer_is_used_for_every_data_source():
    assert load_manager(Reward(scorer="substring_match")).score(response("in Paris")).score == 1.0


@pytest.mark.parametrize(("key", "known"), [("manager", "naive"), ("scorer", "mempo")])
def test_an_unknown_name_lists_the_known_ones(key, known):
    with pytest.raises(ConfigError, match=f"reward.{key}: unknown name 'nope'.*{known}"):
        load_manager(Reward(**{key: "nope"}))


def test_a_custom_function_gets_what_verls_users_expect(tmp_path):
    settings = custom(
        tmp_path,
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': 0.25, 'seen': [data_source, solution_str, ground_truth, extra_info['num_turns']]}\n",
    )
    turns = [turn(text="one", tool_text="TOOL"), turn(text="two")]
    score = load_manager(settings).score(response(turns=turns))
    assert score == Scored(0.25, {"seen": ["hotpotqa", "one\ntwo", ["Paris", "Paris, France"], 2]})


@pytest.mark.parametrize(
    ("body", "reason"),
    [("raise ValueError('oops')", "ValueError: oops"), ("return float('nan')", "nan"), ("return 'good'", "a str")],
)
def test_a_custom_function_that_fails_is_unscored_never_zero(tmp_path, body, reason):
    score = load_manager(custom(tmp_path, f"def compute_score(**kwargs):\n    {body}\n")).score(response())
    assert isinstance(score, Unscored)
    assert (score.kind, reason in score.reason) == ("scorer_error", True)


def test_a_missing_file_or_function_is_a_configuration_error_that_names_the_key(tmp_path):
    with pytest.raises(ConfigError, match=r"reward\.custom_function\.path: there is no file"):
        load_manager(Reward(custom_function=CustomFunction(path=str(tmp_path / "none.py"))))
    with pytest.raises(ConfigError, match=r"reward\.custom_function\.name: .* no function 'other'; it has score_me"):
        load_manager(custom(tmp_path, "def score_me(): ...", name="other"))
    with pytest.raises(ConfigError, match=r"does not import: SyntaxError"):
        load_manager(custom(tmp_path, "def"))
    with pytest.raises(ConfigError, match=r"does not import: SystemExit"):
        load_manager(custom(tmp_path, "raise SystemExit(0)"))


@pytest.mark.parametrize(
    ("golds", "shape"),
    [((("a",),), "a"), ((("a", "b"),), ["a", "b"]), ((("a",), ("b", "c")), [["a"], ["b", "c"]])],
)
def test_ground_truth_has_the_simplest_shape_that_holds_all_golds(golds, shape):
    assert ground_truth(response_of(trajectory(task=dataclasses.replace(TASK, golds=golds)))) == shape
