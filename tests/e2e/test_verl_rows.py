"""A data set in verl's Parquet form trains as it is: the driver on a file that the test writes. Then one with a reward
function that always fails: the run says so and ends, it does not learn from zeros.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mempo_ray.data.world import same_atlas, synthetic_tasks
from tests.fakes.driver_run import DriverRun, adopted_orphans, drive, read_rows, step_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_TASKS, GROUP_SIZE = 8, 4
SOURCES = ("searchR1_nq", "searchR1_hotpotqa")
SMALL = (
    "run.steps=1",
    f"data.tasks_per_step={NUM_TASKS}",
    f"algorithm.group_size={GROUP_SIZE}",
    "cold_start=null",
    "eval.probe_ratios=false",
    "eval.before_train=false",
    "eval.tasks=4",
)


def write_verl_file(path: Path, split: str) -> list[dict]:
    """Questions of the synthetic world in the columns of verl's examples, golds plain and under "target"."""
    rows = [
        {
            "data_source": SOURCES[index % 2],
            "prompt": [{"role": "user", "content": task.question}],
            "ability": "fact-reasoning",
            "reward_model": {"style": "rule", "ground_truth": {"target": list(task.golds[0])}},
            "extra_info": {"index": index, "split": split, "question": task.question},
        }
        for index, task in enumerate(synthetic_tasks(f"synthetic:{split}?tasks={NUM_TASKS}"))
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return rows


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("verl")
    for split in ("train", "eval"):
        write_verl_file(folder / f"{split}.parquet", split)
    passages = same_atlas("synthetic:train").passages()
    lines = [json.dumps({"id": p.id, "title": p.title, "text": p.text}) for p in passages]
    (folder / "passages.jsonl").write_text("\n".join(lines))
    files = (f"data.{split}={folder / split}.parquet" for split in ("train", "eval"))
    return [*SMALL, *files, f"retrieval.corpus={folder / 'passages.jsonl'}"]


@pytest.fixture(scope="module")
def run(words, tmp_path_factory) -> DriverRun:
    return drive(tmp_path_factory.mktemp("runs"), *words)


@pytest.fixture(scope="module")
def rows(run) -> list[dict]:
    return read_rows(run.folder, 1).to_pylist()


def test_every_row_is_trained_on_with_its_own_source_and_extra_info(rows):
    tasks = {row["task_id"]: json.loads(row["task"]) for row in rows}
    assert len(tasks) == NUM_TASKS
    for task_id, question, golds, source, extra_info in tasks.values():
        index = extra_info["index"]
        assert task_id == f"train-{index + 1}"
        assert source == SOURCES[index % 2]
        assert (extra_info["split"], extra_info["question"]) == ("train", question)
        assert golds == [list(synthetic_tasks(f"synthetic:train?tasks={NUM_TASKS}")[index].golds[0])]


def test_the_source_s_scorer_decides_and_its_score_lies_on_the_last_token(run, rows):
    scores = []
    for _, turns in itertools.groupby(rows, key=lambda row: (row["task_id"], row["sibling"])):
        turns = list(turns)
        (gold,) = json.loads(turns[0]["task"])[2][0]
        answer = turns[-1]["answer"]
        assert turns[0]["score"] == float(answer is not None and answer.lower() == gold.lower())
        tokens = np.concatenate([row["rm_scores"] for row in turns])
        assert tokens[-1] == turns[0]["score"]
        assert not tokens[:-1].any()
        info = json.loads(turns[0]["reward_extra_info"])
        assert set(info) == set(turns[0]["reward_extra_keys"]) == {"parts", "num_surplus_parts", "traj_avg_mem_reward"}
        memory = [row["memory_reward"] for row in turns if row["memory_reward"] is not None]
        assert info["traj_avg_mem_reward"] == (pytest.approx(np.mean(memory)) if memory else None)
        scores.append(turns[0]["score"])
    assert len(scores) == NUM_TASKS * GROUP_SIZE
    assert step_metrics(run.folder, 1)["reward/outcome_mean"] == pytest.approx(np.mean(scores))


def test_the_first_three_trajectories_are_printed_and_logged_with_prompt_tags_and_score(run):
    shown = (run.folder / "samples.txt").read_text()
    assert shown.count("--- turn 1, prompt (") == 3
    assert shown.count("\nscore: ") == 3
    assert "parts: (" in shown
    for wanted in ("question: ", "<|user|>", "<mem>", "gold: ", "format: ", "score: "):
        assert wanted in shown
        assert wanted in run.output


def test_a_reward_function_that_always_fails_ends_the_run_with_the_reasons(words, tmp_path):
    function = tmp_path / "broken.py"
    function.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):\n"
                        "    raise KeyError(extra_info['index'])\n")  # fmt: skip
    with adopted_orphans(), DriverRun(tmp_path, *words, f"reward.custom_function.path={function}") as run:
        assert run.finish() == 4
    assert "reward.max_unscored_share is 20%" in run.output
    assert "× unscored: scorer_error: KeyError: " in run.output
    assert [path.name for path in run.folder.glob("checkpoints/step_*")] == ["step_000000"], "nothing was trained on"
    rows = read_rows(run.folder, 1).to_pylist()
    assert {(row["task_id"], row["sibling"]) for row in rows} == {
        (entry["task_id"], entry["sibling"])
        for entry in map(json.loads, (run.folder / "excluded.jsonl").read_text().splitlines())
    }
    assert {row[name] for row in rows for name in ("score", "outcome_advantage", "memory_advantage")} == {None}
    assert all("KeyError" in row["excluded_because"] for row in rows)
