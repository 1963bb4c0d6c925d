"""Comparing answers: normalisation, aliases, objectives. More figures stand in tests/numerics/test_goldens.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempo_ray.rewards.scorers.overlong import overlong_penalty
from mempo_ray.rewards.scorers.text import exact_match, f1, last_answer, normalize_answer, score_objectives


@pytest.mark.parametrize(
    ("text", "normal"),
    [("The Beatles!", "beatles"), ("U.S.A", "usa"), ("well-known", "wellknown"), ("a theatre", "theatre"), ("the", "")],
)
def test_normalised_forms(text, normal):
    assert normalize_answer(text) == normal


@given(st.text(st.characters(max_codepoint=127)))  # in Unicode, lower('İ') may hold what lower() changes again
def test_normalising_an_answer_that_matches_itself(text):
    assert exact_match(text, [text]) == 1
    assert f1(text, [text]) == 1


def test_last_complete_answer_counts():
    assert last_answer("<answer> a </answer> <answer>b</answer> <answer>c") == "b"
    assert last_answer("<answer>open") is None


def test_f1_is_the_best_over_aliases():
    assert f1("Barack Obama", ["Obama", "Michelle"]) == pytest.approx(2 / 3)
    assert f1("x", []) == 0


GOLDS = (("Paris", "City of Light"), ("1889",), ("Eiffel",))


@pytest.mark.parametrize(("rule", "score"), [("mean", 2 / 3), ("sum", 2), ("all", 0)])
def test_objectives_are_matched_by_position(rule, score):
    found = score_objectives("city of light; 1890; Eiffel", GOLDS, multi_objective=rule)
    assert found.score == pytest.approx(score)
    assert found.parts == (1, 0, 1)


def test_missing_parts_score_zero_and_surplus_parts_are_counted():
    assert score_objectives("Paris", GOLDS, multi_objective="mean").parts == (1, 0, 0)
    surplus = score_objectives("Paris; 1889; Eiffel; and more; still", GOLDS, multi_objective="all")
    assert (surplus.score, surplus.num_surplus) == (1, 2)


def test_one_objective_is_never_split():
    assert score_objectives("a; b", (("A; B",),), multi_objective="mean").score == 1


@pytest.mark.parametrize("rule", ["mean", "sum", "all"])
def test_no_answer_scores_zero(rule):
    assert score_objectives(None, GOLDS, multi_objective=rule).score == 0


@given(st.integers(0, 200))
def test_overlong_penalty_never_rewards_and_never_falls_with_fewer_tokens(num_tokens):
    penalties = [
        overlong_penalty(n, max_response_tokens=100, buffer_tokens=20, penalty_factor=0.5)
        for n in (num_tokens, num_tokens + 1)
    ]
    assert 0 >= penalties[0] >= penalties[1]
