"""From a scorer's answer to one number on one token; what is not a number never becomes one."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Batch, EndReason, Ragged, Scored, TrajectoryBatch, Unscored
from mempo_ray.errors import DataError
from mempo_ray.rewards.contract import (
    RESPONSE_INFO,
    Response,
    as_score,
    last_policy_token,
    place_scores,
    response_of,
    reward_extra_info,
    score_with,
    to_score,
    token_level_rewards,
    with_rewards,
    with_tool_rewards,
)
from tests.fakes.trajectories import TASK, trajectory, turn


def rows(ragged: Ragged) -> list[list[float]]:
    return [ragged[i].tolist() for i in range(len(ragged))]


def two_trajectories() -> TrajectoryBatch:
    first = trajectory(turns=[turn((1, 1)), turn((1, 1, 0))])
    return TrajectoryBatch.from_trajectories([first, trajectory(turns=[turn((1,))])])


@pytest.mark.parametrize("value", [1, 0.5, True, np.float32(0.25), np.int64(1), np.bool_(True), {"score": 1.0}])
def test_a_finite_number_is_a_score(value):
    assert isinstance(as_score(value), Scored)


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), 10**400, None, "1", 1j, [1.0], (1.0, {}), {"em": 1}, {"score": None}, Scored("x")],
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


def test_process_scores_lie_on_the_last_policy_token_of_their_turn():
    batch = TrajectoryBatch.from_trajectories([trajectory(turns=[turn((1, 1)), turn((0, 0)), turn((1, 1, 0))])])
    scores = place_scores(batch, [Scored(0.5, process_scores=(0.125, 0.25, -1.0))])
    assert rows(scores) == [[0, 0.375], [0, 0], [0, -0.5, 0]]


def test_process_scores_come_in_a_dict_one_a_turn():
    assert as_score({"score": 1, "process_scores": np.array([0.5, 0])}, num_turns=2).process_scores == (0.5, 0.0)
    assert "3 process scores for 2 turns" in as_score({"score": 1, "process_scores": [0] * 3}, num_turns=2).reason
    assert "process score is nan" in as_score({"score": 1, "process_scores": [float("nan")]}).reason
    assert "process score is a str" in as_score({"score": 1, "process_scores": "ab"}).reason


def test_process_scores_by_turn_number_are_refused_and_not_read_by_their_keys():
    score = as_score({"score": 1, "process_scores": {0: 0.5, 1: 0.25}}, num_turns=2)
    assert (score.kind, "process_scores is a dict" in score.reason) == ("scorer_error", True)


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


def test_a_payload_that_brings_its_scores_is_not_scored_again():
    batch = TrajectoryBatch.from_trajectories([trajectory(turns=[turn((1, 1)), turn((1, 1, 0))])])
    for values, score in (
        ([0, 0.25, 0, 0.5, 0], Scored(0.75)),
        ([np.nan] * 5, Unscored("rm_scores are not finite", "data")),
    ):
        given = Ragged(np.array(values, np.float32), batch.ragged["output_mask"].offsets)
        there = TrajectoryBatch({**batch.ragged, "rm_scores": given}, batch.fixed, batch.table)
        assert to_score(there) == score


def test_only_a_single_episode_that_the_policy_ended_is_scored():
    assert to_score(two_trajectories()).kind == "data"
    broken = TrajectoryBatch.from_trajectories([trajectory(None, end_reason=EndReason.TOOL_FAILED)])
    assert to_score(broken).kind == "infrastructure"


def test_tool_text_reaches_only_a_scorer_that_asks_for_the_transcript():
    turns = [turn(text="one", tool_text="<answer>Paris</answer>"), turn(text="two")]
    batch = TrajectoryBatch.from_trajectories([trajectory(None, turns=turns)])
    response = to_score(batch)
    assert (response.solution, response.answer, response.tool_texts) == ("one\ntwo", None, ())
    assert to_score(batch, transcript=True).tool_texts == ("<answer>Paris</answer>", "")


def test_extra_info_is_the_rows_own_and_what_is_known_of_the_response():
    response = response_of(trajectory("Paris", task=dataclasses.replace(TASK, metadata={"index": 3})))
    assert set(response.extra_info) == {"index", *RESPONSE_INFO}
    assert (response.extra_info["index"], response.extra_info["answer"], response.num_tokens) == (3, "Paris", 2)


def test_the_policys_answer_never_stands_where_the_row_has_its_own():
    """verl's GSM8K rows have the solution there; a scorer that compares with it would find every answer right."""
    metadata = {"answer": "#### 72", "question": "short form", "task_id": "its own"}
    info = response_of(trajectory("Paris", task=dataclasses.replace(TASK, metadata=metadata))).extra_info
    assert (info["answer"], info["question"], info["task_id"]) == ("#### 72", TASK.question, TASK.task_id)


# -- calling a scorer -------------------------------------------------------------------------------------


async def async_half(response, settings):
    return 0.5


def exits(response, settings):
    raise SystemExit(3)


async def cancels_itself(response, settings):
    raise asyncio.CancelledError


def bad_row(response, settings):
    raise DataError("no gold")


def line_after(function) -> str:
    return f"(test_contract.py, line {function.__code__.co_firstlineno + 1})"


@pytest.mark.parametrize(
    ("scorer", "score"),
    [
        (lambda r, s: {"score": 1, "em": np.float32(0.5)}, Scored(1.0, {"em": 0.5})),
        (async_half, Scored(0.5)),
        (exits, Unscored(f"SystemExit: 3 {line_after(exits)}", "scorer_error")),
        (cancels_itself, Unscored(f"CancelledError:  {line_after(cancels_itself)}", "scorer_error")),
        (bad_row, Unscored("no gold", "data")),
    ],
)
def test_whatever_a_scorer_does_becomes_a_value(scorer, score):
    assert score_with(scorer, response_of(trajectory()), Reward()) == score


# -- tokens -----------------------------------------------------------------------------------------------


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
    extras = [{"em": 1}, {}, {"f1": 0.5, "why": ["a", 2]}]
    assert reward_extra_info(extras) == {
        "em": [1, None, None],
        "f1": [None, None, 0.5],
        "why": [None, None, ["a", 2]],
    }


def test_tool_rewards_are_reported_and_weigh_in_the_score_where_they_have_a_weight():
    response = Response("own", (("x",),), turns=("a",), tool_rewards={"count": 0.5, "search": 2.0})
    scored = with_tool_rewards(Scored(1.0), response, Reward(tool_weights={"count": 0.2}))
    assert scored == Scored(1.1, {"tool_reward/count": 0.5, "tool_reward/search": 2.0})


def test_a_tool_reward_that_is_no_number_is_no_score():
    response = Response("own", (("x",),), turns=("a",), tool_rewards={"count": float("nan")})
    assert isinstance(with_tool_rewards(Scored(1.0), response, Reward(tool_weights={"count": 0.2})), Unscored)
