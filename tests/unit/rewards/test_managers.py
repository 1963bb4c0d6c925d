"""Managers by name: what each adds to the naive one, and where it has its scorers run."""

from __future__ import annotations

from pathlib import Path

import pytest

from mempo_ray.config.schema import CustomFunction, Overlong, Reward
from mempo_ray.contracts import Scored, Unscored
from mempo_ray.rewards.contract import Response
from mempo_ray.rewards.hosting import place_of
from mempo_ray.rewards.registry import load_manager
from tests.fakes import batch_function, hostile_scorers

BATCH_FUNCTION = CustomFunction(path=str(Path(batch_function.__file__)), kwargs={"unit": 0.5})


def response(answer: str, num_tokens: int = 0) -> Response:
    return Response("nq", (("Paris", "Lutetia"),), ("t",), answer, extra_info={"answer": answer}, num_tokens=num_tokens)


# -- batch ----------------------------------------------------------------------------------------------------


def test_batch_hands_lists_to_the_custom_function():
    manager = load_manager(Reward(manager="batch", custom_function=BATCH_FUNCTION))
    scores = manager.score_batch([response("Paris"), response("Rome"), response("Lutetia")])
    assert scores == [Scored(value, {"size": 3}) for value in (0.5, 0.0, 0.5)]


@pytest.mark.parametrize(("bad", "reason"), [("raises", "no such reference"), ("short", "0 scores for 1 responses")])
def test_in_a_batch_that_fails_only_the_culprit_has_no_score(bad, reason):
    manager = load_manager(Reward(manager="batch", custom_function=BATCH_FUNCTION))
    right, culprit, wrong = manager.score_batch([response("Paris"), response(bad), response("Rome")])
    assert (right, wrong) == (Scored(0.5, {"size": 1}), Scored(0.0, {"size": 1}))
    assert isinstance(culprit, Unscored)
    assert (culprit.kind, reason in culprit.reason) == ("scorer_error", True)


def test_batch_scores_by_registered_scorers_in_a_row():
    manager = load_manager(Reward(manager="batch"))
    assert [s.score for s in manager.score_batch([response("Paris"), response("Rome")])] == [1.0, 0.0]


# -- dapo -----------------------------------------------------------------------------------------------------


def test_dapo_takes_the_overlong_penalty_off_and_says_so():
    overlong = Overlong(max_response_tokens=100, buffer_tokens=20, penalty_factor=0.5)
    manager = load_manager(Reward(manager="dapo", scorer="exact_match", overlong=overlong))
    short, long = manager.score(response("Paris", 80)), manager.score(response("Paris", 95))
    assert (short.score, short.extra["overlong"], short.extra["overlong_reward"]) == (1.0, False, 0.0)
    assert (long.score, long.extra["overlong"], long.extra["accuracy"]) == (0.625, True, 1.0)


def test_dapo_leaves_an_unscored_response_unscored():
    score = load_manager(Reward(manager="dapo")).score(Response("no-such-source", (("a",),), ("t",)))
    assert isinstance(score, Unscored)


# -- where ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        (Reward(scorer="mempo"), "thread"),
        (Reward(scorer="mempo", isolation="process"), "process"),
        (Reward(custom_function=BATCH_FUNCTION), "process"),
        (Reward(custom_function=BATCH_FUNCTION, isolation="thread"), "thread"),
        (Reward(manager="prime", isolation="thread"), "process"),
        (Reward(manager="remote"), "ray"),
        (Reward(scorer="math", isolation="thread"), "process"),
        (Reward(scorer="code"), "sandbox"),
        (Reward(scorer="code", isolation="process"), "process"),
    ],
)
def test_the_strictest_wish_decides_where_a_scorer_runs(settings, place):
    assert place_of(settings, "nq") == place


def test_each_data_source_has_its_scorers_place():
    assert hostile_scorers.hostile  # registers test-org/hostile
    assert [place_of(Reward(), source) for source in ("nq", "test-org/hostile", "unknown")] == [
        "thread",
        "process",
        "thread",
    ]
