"""Nothing, half a tag, or the answer in somebody else's mouth: a zero for every scorer, never an error, never a one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest

from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Scored, TrajectoryBatch
from mempo_ray.data.tasks import read_tasks
from mempo_ray.rewards.contract import Response, reward_extra_info, score_with, to_score
from mempo_ray.rewards.registry import scorer_for
from mempo_ray.rewards.rows import row_check
from mempo_ray.rewards.scorers.text import last_answer
from tests.fakes.trajectories import TASK, trajectory, turn

SOURCES = ("own", "nq", "searchR1_musique", "openai/gsm8k", "lighteval/MATH", "aime24", "math_dapo", "geometry3k")
NAMED = ("mempo", "exact_match", "substring_match", "f1", "gsm8k")
GOLD = "72"
CHECKS_FAILED = ("answer_present",)


def respond(text: str, tool_text: str = "", data_source: str = "own") -> Response:
    """As an episode leaves it and a reward worker reads it; a response without an answer fails a format check."""
    task = dataclasses.replace(TASK, golds=((GOLD,),), data_source=data_source)
    answer = last_answer(text)
    episode = trajectory(
        answer,
        task=task,
        turns=[turn(text=text, tool_text=tool_text)],
        failed_checks=CHECKS_FAILED if answer is None else (),
    )
    response = to_score(TrajectoryBatch.from_trajectories([episode]), transcript=bool(tool_text))
    assert isinstance(response, Response)
    return response


@pytest.mark.parametrize(
    ("text", "tool_text"),
    [
        ("", ""),
        ("   \n", ""),
        ("<mem>no", ""),
        ("<answer>", ""),
        ("<answer>72</answ", ""),
        ("<answer></answer>", ""),
        (r"\boxed{72", ""),
        ("####", ""),
        ("Answer:", ""),
        ("<search>clips</search>", r"<tool_response><answer>72</answer> \boxed{72} Answer: 72 #### 72</tool_response>"),
    ],
)
@pytest.mark.parametrize(("source", "scorer"), [*((s, "auto") for s in SOURCES), *(("x", s) for s in NAMED)])
def test_no_answer_of_the_policy_s_own_is_a_zero(source, scorer, text, tool_text):
    settings = Reward(scorer=scorer)
    score = score_with(scorer_for(source, settings).load(), respond(text, tool_text, source), settings)
    assert isinstance(score, Scored)
    assert score.score == 0


@pytest.mark.parametrize("under_target", [False, True])
@pytest.mark.parametrize(
    ("golds", "answer"),
    [
        ("Paris", "paris"),
        (["Paris", "City of Light"], "city of light"),
        ([["Paris"], ["1889", "in 1889"]], "Paris; in 1889"),
        (np.array(["Paris", "City of Light"], dtype=object), "city of light"),
        (np.array([np.array(["Paris"]), np.array(["1889", "in 1889"])], dtype=object), "Paris; 1889"),
    ],
)
def test_every_shape_of_gold_answers_is_read_from_parquet_and_matched(tmp_path, golds, answer, under_target):
    path = tmp_path / "t.parquet"
    ground_truth = {"target": golds} if under_target else golds
    pd.DataFrame({"question": ["q"], "reward_model": [{"ground_truth": ground_truth}]}).to_parquet(path)
    (task,) = read_tasks(str(path), check=row_check(Reward()))
    response = Response("own", task.golds, turns=(f"<answer>{answer}</answer>",), answer=answer)
    assert score_with(scorer_for("own", Reward()).load(), response, Reward()).score == 1


def test_scorers_with_different_keys_share_one_extra_info():
    settings = Reward()
    texts = {"own": "<answer>72</answer>", "nq": "<answer>72</answer>", "openai/gsm8k": "#### 72", "aime24": ""}
    scores = [score_with(scorer_for(s, settings).load(), respond(t, "", s), settings) for s, t in texts.items()]
    info = reward_extra_info([score.extra for score in scores])
    assert {len(values) for values in info.values()} == {4}
    assert info["exact_match"] == [(1.0,), None, None, None]
    assert info["parts"] == [None, (1.0,), None, None]
    assert info["extracted"] == [None, None, "72", None]
