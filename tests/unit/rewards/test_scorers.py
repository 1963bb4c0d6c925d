"""The shipped scorers, by what they accept and reject."""

from __future__ import annotations

import dataclasses

import pytest

from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Task
from mempo_ray.rewards.contract import Response, response_of
from mempo_ray.rewards.registry import SCORERS
from mempo_ray.rewards.scorers.mempo import score_mempo
from tests.fakes.trajectories import TASK, trajectory, turn


def response(*args, **kwargs) -> Response:
    return response_of(trajectory(*args, **kwargs))


def two_objectives() -> Task:
    return dataclasses.replace(TASK, golds=(("Paris",), ("1889", "year 1889")))


def test_mempo_gives_1_for_a_match_after_normalisation_in_the_right_format():
    scored = score_mempo(response("The PARIS, France."), Reward())
    assert scored.score == 1.0
    assert scored.extra["exact_match"] == (1.0,)


def test_mempo_gives_0_for_the_right_answer_in_the_wrong_format_and_does_not_evaluate_it():
    scored = score_mempo(response("Paris", failed_checks=["mem_paired"]), Reward())
    assert scored.score == 0.0
    assert "exact_match" not in scored.extra
    assert (scored.extra["format/mem_paired"], scored.extra["format/answer_present"]) == (False, True)


def test_mempo_gives_0_where_the_answer_stands_in_tool_text_only():
    searching = turn(text="<mem>m</mem>", tool_text="<answer>Paris</answer>")
    assert score_mempo(response(None, turns=[searching, turn()]), Reward()).score == 0.0


@pytest.mark.parametrize(
    ("multi_objective", "answer", "score"),
    [
        ("mean", "paris; 1890", 0.5),
        ("sum", "paris; year 1889", 2.0),
        ("all", "paris; 1890", 0.0),
        ("mean", "paris", 0.5),
    ],
)
def test_mempo_matches_several_objectives_by_position(multi_objective, answer, score):
    settings = Reward(multi_objective=multi_objective)
    assert score_mempo(response(answer, task=two_objectives()), settings).score == score


def test_mempo_counts_parts_that_nobody_asked_for():
    assert score_mempo(response("paris; 1889; x", task=two_objectives()), Reward()).extra["num_surplus_parts"] == 1


@pytest.mark.parametrize(
    ("name", "answer", "score"),
    [
        ("exact_match", "Paris", 1.0),
        ("exact_match", "in Paris", 0.0),
        ("substring_match", "in Paris", 1.0),
        ("substring_match", None, 0.0),
        ("f1", "in Paris", pytest.approx(2 / 3)),
    ],
)
def test_search_scorers_ask_nothing_of_the_format(name, answer, score):
    badly_formed = response(answer, failed_checks=["mem_paired"])
    assert SCORERS.get(name).load()(badly_formed, Reward()).score == score
