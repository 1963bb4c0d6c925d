"""From a scorer's answer to one number on one token; what is not a number never becomes one."""

from __future__ import annotations

import numpy as np
import pytest

from mempo_ray.contracts import Batch, Ragged, Scored, TrajectoryBatch, Unscored
from mempo_ray.errors import DataError
from mempo_ray.rewards.contract import (
    as_score,
    last_policy_token,
    place_scores,
    reward_extra_info,
    token_level_rewards,
    with_rewards,
)
from tests.fakes.trajectories import trajectory, turn


def rows(ragged: Ragged) -> list[list[float]]:
    return [ragged[i].tolist() for i in range(len(ragged))]


def two_trajectories() -> TrajectoryBatch:
    first = trajectory(turns=[turn((1, 1)), turn((1, 1, 0))])
    return TrajectoryBatch.from_trajectories([first, trajectory(turns=[turn((1,))])])


@pytest.mark.parametrize("value", [1, 0.5, True, np.float32(0.25), np.int64(1), np.bool_(True), {"score": 1.0}])
def test_a_finite_number_is_a_score(value):
    assert isinstance(as_score(value), Scored)


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), None, "1", [1.0], {"em": 1}, {"score": None}, Scored("x")]
)
def test_anything_else_is_unscored_and_says_why(value):
    answer = as_score(value)
    assert isinstance(answer, Unscored)
    assert answer.kind == "scorer_error"
    assert answer.reason


def test_an_unscored_of_a_scorer_stays_as_it_is():
    assert as_score(Unscored("judge is down", "infrastructure")) == Unscored("judge is down", "infrastructure")


def test_the_score_lies_on_the_last_policy_token_of_each_trajectory():
    scores = place_scores(two_trajectories(), [Scored(0.5), Scored(1.0)])
    assert rows(scores) == [[0, 0], [0, 0.5, 0], [1.0]]


def test_a_last_turn_without_policy_tokens_leaves_the_score_to_the_turn_before():
    assert last_policy_token([np.array([1, 1, 0]), np.array([0, 0])]) == (0, 1)
    with pytest.raises(DataError, match="without a token of the policy"):
        last_policy_token([np.array([0])])


def test_an_unscored_trajectory_never_gets_a_row_of_zeros():
    with pytest.raises(DataError, match="timeout: slow"):
        place_scores(two_trajectories(), [Scored(0.5), Unscored("slow", "timeout")])
    with pytest.raises(DataError, match="1 scores for 2 trajectories"):
        place_scores(two_trajectories(), [Scored(0.5)])


def test_scores_already_in_the_batch_are_used_as_they_are():
    batch = two_trajectories()
    given = Ragged(np.arange(6, dtype=np.float32), batch.ragged["output_mask"].offsets)
    there = TrajectoryBatch({**batch.ragged, "rm_scores": given}, batch.fixed, batch.table)
    out = with_rewards(there)
    assert rows(out.ragged["token_level_scores"]) == rows(given)
    assert rows(out.ragged["token_level_rewards"]) == rows(given)


def test_kl_is_taken_from_every_token_of_the_scores():
    batch = two_trajectories()
    kl = Ragged(np.full(6, 0.1, np.float32), batch.ragged["output_mask"].offsets)
    out = with_rewards(batch, [Scored(0.5), Scored(1.0)], kl, coef=2.0)
    assert isinstance(out, Batch)
    np.testing.assert_allclose(out.ragged["token_level_rewards"].values, [-0.2, -0.2, -0.2, 0.3, -0.2, 0.8], rtol=1e-6)
    np.testing.assert_allclose(out.ragged["token_level_scores"].values, [0, 0, 0, 0.5, 0, 1])


def test_kl_of_other_rows_is_refused():
    a, b = (Ragged.from_rows(r, np.float32) for r in ([[1.0], [2.0]], [[1.0, 2.0]]))
    with pytest.raises(DataError, match="differ in their rows"):
        token_level_rewards(a, b, 1.0)


def test_extra_info_has_every_key_for_every_trajectory():
    scores = [Scored(1.0, {"em": 1}), Unscored("x", "timeout"), Scored(0.0, {"f1": 0.5})]
    assert reward_extra_info(scores) == {"em": [1, None, None], "f1": [None, None, 0.5]}
