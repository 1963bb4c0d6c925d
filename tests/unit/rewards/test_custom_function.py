"""A user's reward function: called as verl calls it, whatever its form."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mempo_ray.config.schema import CustomFunction, Reward
from mempo_ray.contracts import Score, Scored, Trajectory, TrajectoryBatch, Unscored
from mempo_ray.data.tasks import read_tasks
from mempo_ray.rewards.contract import response_of, score_with
from mempo_ray.rewards.custom import load_custom_scorer
from tests.fakes.trajectories import TASK, trajectory, turn

TURNS = [turn(text="<mem>m</mem>", tool_text="<answer>of the tool</answer>"), turn(text="<answer>Paris</answer>")]
ROW = dataclasses.replace(TASK, data_source="nobody/knows", metadata={"index": 4, "split": "train"})


OWN = trajectory("Paris", turns=TURNS, task=ROW)


def score_of(tmp_path: Path, source: str, scored: Trajectory = OWN, **kwargs) -> Score:
    path = tmp_path / "mine.py"
    path.write_text(source)
    scorer = load_custom_scorer(CustomFunction(path=str(path), kwargs=kwargs))
    return score_with(scorer, response_of(scored), Reward())


SIGNATURE = "compute_score(data_source, solution_str, ground_truth, extra_info=None"
FORMS = {
    "plain": f"def {SIGNATURE}):\n    return 0.5\n",
    "kwargs": f"def {SIGNATURE}, **kwargs):\n    return 0.5\n",
    "async": f"async def {SIGNATURE}):\n    return 0.5\n",
    "awaits": (
        "import asyncio\n"
        "async def compute_score(**kwargs):\n"
        "    return sum(await asyncio.gather(*(asyncio.sleep(0, 0.25) for _ in range(2))))\n"
    ),
    "object": (
        "class Judge:\n"
        "    def __call__(self, **kwargs):\n"
        "        return {'score': 0.5}\n"
        "compute_score = Judge()\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_function_of_any_form_gives_its_score(tmp_path, form):
    assert score_of(tmp_path, FORMS[form]) == Scored(0.5)


def test_it_gets_the_policy_s_own_text_the_golds_and_all_of_the_row(tmp_path):
    source = (
        "def compute_score(data_source, solution_str, ground_truth, extra_info, scale):\n"
        "    seen = [data_source, solution_str, ground_truth, extra_info['index'], extra_info['answer']]\n"
        "    return {'score': scale * len(solution_str.split('<mem>')), 'seen': seen}\n"
    )
    golds = ["Paris", "Paris, France"]
    seen = ["nobody/knows", "<mem>m</mem>\n<answer>Paris</answer>", golds, 4, "Paris"]
    assert score_of(tmp_path, source, scale=2) == Scored(4.0, {"seen": seen})


def test_it_may_score_each_turn(tmp_path):
    source = (
        "def compute_score(extra_info, **_):\n"
        "    return {'score': 1, 'process_scores': [0.5] * extra_info['num_turns']}\n"
    )
    assert score_of(tmp_path, source).process_scores == (0.5, 0.5)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return (1.0, {})", "score is a tuple"),
        ("return '1'", "score is a str"),
        ("return None", "score is a NoneType"),
        ("return float('-inf')", "score is -inf"),
        ("return {'acc': 1}", "dict without 'score': ['acc']"),
        ("return {'score': 1, 'process_scores': [1]}", "1 process scores for 2 turns"),
        ("import sys; sys.exit()", "SystemExit"),
        ("return undefined", "NameError: name 'undefined' is not defined"),
    ],
)
def test_what_is_no_score_is_unscored_with_the_reason(tmp_path, body, reason):
    score = score_of(tmp_path, f"def compute_score(**kwargs):\n    {body}\n")
    assert isinstance(score, Unscored)
    assert score.kind == "scorer_error"
    assert reason in score.reason


def test_what_it_raises_is_told_with_its_own_line_not_with_one_of_a_library(tmp_path):
    score = score_of(tmp_path, "import json\ndef compute_score(**kwargs):\n    return json.loads('{')\n")
    assert isinstance(score, Unscored)
    assert score.reason.endswith("(mine.py, line 3)")


@pytest.mark.parametrize("truth", [{"target": ["Paris", "Paname"]}, ["Paris"]])
def test_a_row_of_verl_gives_it_the_ground_truth_as_it_stands_there(tmp_path, truth):
    row = {"prompt": [{"role": "user", "content": "Where?"}], "reward_model": {"ground_truth": truth}}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "verl.parquet")
    (task,) = read_tasks(str(tmp_path / "verl.parquet"))
    (crossed,) = TrajectoryBatch.from_trajectories([trajectory("Paris", turns=TURNS, task=task)]).trajectories()
    source = "def compute_score(ground_truth, **_):\n    return {'score': 1, 'seen': ground_truth}\n"
    assert score_of(tmp_path, source, crossed) == Scored(1.0, {"seen": truth})


def test_what_it_changes_in_extra_info_nobody_else_sees(tmp_path):
    source = (
        "def compute_score(extra_info, **_):\n"
        "    extra_info['calls'] = extra_info.get('calls', 0) + 1\n"
        "    return extra_info['calls']\n"
    )
    assert score_of(tmp_path, source) == score_of(tmp_path, source) == Scored(1.0)
