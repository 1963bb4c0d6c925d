"""`mempo-ray reward-check --responses`: given responses, scored as a run scores them."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from mempo_ray.actors.manager_host import NUM_THREADS
from mempo_ray.actors.reward import RewardManagerWorker, scored_at_once
from mempo_ray.cli import app
from mempo_ray.config.load import load_config
from mempo_ray.config.schema import Reward, Sandbox, Style
from mempo_ray.contracts import Scored, TrajectoryBatch
from mempo_ray.errors import DataError
from mempo_ray.reward_check import check_given, read_responses
from tests.fakes.trajectories import trajectory, turn

CONFIG = load_config(["reward.scorer=mempo"])
GOOD = ["<mem>m</mem><think>t</think><search>X</search>", "<mem>m</mem><think>t</think><answer>Paris</answer>"]


def rows_file(folder: Path, *responses: object) -> Path:
    path = folder / "responses.jsonl"
    row = {"question": "Where was X born?", "golden_answers": ["Paris"], "data_source": "hotpotqa"}
    path.write_text("".join(json.dumps({**row, "response": response}) + "\n" for response in responses))
    return path


async def test_rows_with_responses_are_scored_by_rule(tmp_path):
    report = await check_given(CONFIG, rows_file(tmp_path, GOOD, "<answer>Paris</answer>"), 64)
    assert report.scores.tolist() == [1.0, 0.0]
    assert report.checked[0].failed_rules == ()
    assert "mem_opens_each_turn" in report.checked[1].failed_rules


async def test_the_scorer_follows_the_data_source_and_the_limit_holds(tmp_path):
    report = await check_given(
        load_config(["reward.scorer=auto"]), rows_file(tmp_path, *["<answer>Paris</answer>"] * 3), 2
    )
    assert report.scores.tolist() == [1.0, 1.0]


async def test_a_logged_trajectory_is_scored_again_whatever_score_stands_beside_it(tmp_path):
    episodes = [trajectory(turns=[turn(text="<answer>paris!</answer>")]), trajectory(None, turns=[turn()])]
    table = TrajectoryBatch.from_trajectories(episodes).to_arrow()
    table = table.append_column("score", [[0.25] * len(table)])
    path = tmp_path / "step_0001.parquet"
    pq.write_table(table, path)
    report = await check_given(load_config(["reward.scorer=exact_match"]), path, 64)
    assert report.scores.tolist() == [1.0, 0.0]


async def test_no_response_waits_for_another_on_its_own_time(tmp_path, monkeypatch):
    running, most = 0, 0

    async def judge(worker, response):
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(20):
            await asyncio.sleep(0)
        running -= 1
        return Scored(1.0)

    monkeypatch.setattr(RewardManagerWorker, "judge", judge)
    await check_given(load_config(["reward.scorer=f1"]), rows_file(tmp_path, *["x"] * 30), 30)
    assert most == scored_at_once(Reward(scorer="f1"), "nq") == NUM_THREADS


def test_as_many_are_scored_at_once_as_have_a_place():
    assert scored_at_once(Reward(processes=3), "aime24") == 3
    assert scored_at_once(Reward(), "taco") == Sandbox().concurrency
    assert scored_at_once(Reward(manager="batch", batch_size=5), "nq") == 5
    styles = {"em": Style(scorer="exact_match"), "math": Style(scorer="math", data_sources=("aime*",))}
    hybrid = Reward(manager="hybrid", styles=styles, processes=2)
    assert [scored_at_once(hybrid, source) for source in ("nq", "aime24")] == [NUM_THREADS, 2]


def test_a_batch_survives_arrow(tmp_path):
    batch = TrajectoryBatch.from_trajectories([trajectory(turns=[turn((1, 0, 1)), turn((1,))])])
    batch.to_parquet(tmp_path / "batch.parquet")
    again = TrajectoryBatch.from_arrow(pq.read_table(tmp_path / "batch.parquet"))
    for name, column in batch.ragged.items():
        assert np.array_equal(again.ragged[name].values, column.values), name
        assert np.array_equal(again.ragged[name].offsets, column.offsets), name
    for name, column in batch.fixed.items():
        assert np.array_equal(again.fixed[name], column), name
    assert again.table.equals(batch.table)


def test_a_row_without_a_response_says_what_it_needs(tmp_path):
    with pytest.raises(DataError, match=r"column 'response' must hold the response's text, or a list of texts"):
        read_responses(CONFIG, rows_file(tmp_path, 7))


def test_a_file_that_is_no_parquet_says_so(tmp_path):
    (tmp_path / "r.parquet").write_text("PAR1 and no more")
    with pytest.raises(DataError, match="not a Parquet file that can be read"):
        read_responses(CONFIG, tmp_path / "r.parquet")


def test_the_command_shows_the_report_writes_it_and_compares_with_an_expectation(tmp_path):
    words = ["reward-check", "--responses", str(rows_file(tmp_path, GOOD, *["<answer>no</answer>"] * 9))]
    words += ["--out", str(tmp_path / "out"), "reward.scorer=mempo"]
    done = CliRunner().invoke(app, [*words, "--expect", "0.1"])
    assert done.exit_code == 0, done.output
    assert "10 of 10 responses scored, mean 0.100" in done.output
    assert (tmp_path / "out" / "reward_check.png").exists()
    assert json.loads((tmp_path / "out" / "reward_check.json").read_text())["num_scored"] == 10
    wrong = CliRunner().invoke(app, [*words, "--expect", "0.9"])
    assert wrong.exit_code == 1
    assert "expected 0.900" in wrong.output


def test_a_reward_that_scores_nothing_is_a_failed_check(tmp_path):
    (tmp_path / "mine.py").write_text("def compute_score(**row):\n    return row['nothing']\n")
    words = ["reward-check", "--responses", str(rows_file(tmp_path, GOOD))]
    done = CliRunner().invoke(app, [*words, f"reward.custom_function.path={tmp_path / 'mine.py'}"])
    assert done.exit_code == 1
    assert "KeyError: 'nothing' (mine.py, line 2)" in done.output
