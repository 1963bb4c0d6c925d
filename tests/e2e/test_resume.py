"""A run that was stopped goes on as if it had not been: bitwise with the fake engine, request by request with vLLM."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from mempo_ray.agent.group import turn_seed
from tests.fakes.driver_run import SMALL, DriverRun, adopted_orphans, drive, read_metrics, read_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 3
TIMES = ("_s", "/seconds", "_per_s", "_gb", "waiting_share")
"""How names of metrics end that a clock or the machine decides."""
MACHINE = ("bottleneck/", "retrieval/", "eval/retrieval_", "rollout/searches_repeated", "eval/searches_repeated")
"""How names begin of shares of time, and of what search caches answered: a run that starts anew has empty ones."""
BITWISE = (
    *SMALL,
    "run.name=resume",
    "run.deterministic=true",
    f"run.keep_checkpoints={STEPS}",
    "rollout.engine=fake",
    "eval.every=2",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of a run that was never stopped."""
    return drive(tmp_path_factory.mktemp("whole"), *BITWISE, f"run.steps={STEPS}").folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """The runs of a run that SIGTERM met in its first step."""
    runs = tmp_path_factory.mktemp("stopped")
    with adopted_orphans(), DriverRun(runs, *BITWISE, f"run.steps={STEPS}") as run:
        run.wait_for("step 1: sampling")
        run.process.terminate()
        assert run.finish() == 130, run.output
        assert run.left_behind == []
    assert "go on with run.resume=auto" in run.output
    return runs


@pytest.fixture(scope="module")
def resumed(stopped) -> Path:
    """The same run after `run.resume=auto`, in a copy, so that `stopped` stays as it was."""
    runs = shutil.copytree(stopped, stopped.with_name("resumed"), symlinks=True)
    return drive(runs, *BITWISE, f"run.steps={STEPS}", "run.resume=auto").folder


def facts(folder: Path, step: int) -> dict:
    return json.loads((folder / "checkpoints" / f"step_{step:06d}" / "facts.json").read_text())


def without_times(row: dict) -> dict:
    return {name: row[name] for name in row if not name.endswith(TIMES) and not name.startswith(MACHINE)}


def test_sigterm_ends_a_run_after_its_step_with_a_checkpoint(stopped):
    folder = (stopped / "latest").resolve()
    assert [row["step"] for row in read_metrics(folder)] == [0, 1]
    assert facts(folder, 1)["extra"]["progress"]["step"] == 1
    assert (folder / "checkpoints" / "step_000001" / "COMPLETE").is_file()
    assert not (folder / "summary.json").exists()


def test_a_resumed_run_goes_on_in_the_same_folder(stopped, resumed):
    assert resumed.name == (stopped / "latest").resolve().name
    assert [row["step"] for row in read_metrics(resumed)] == [0, 1, 2, 3, 3]
    assert json.loads((resumed / "summary.json").read_text())["steps"] == STEPS


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_weights_and_optimiser_are_bitwise_those_of_the_uninterrupted_run(whole, resumed, step):
    expected, found = facts(whole, step), facts(resumed, step)
    assert set(expected["checksums"]) >= {"model", "optimizer", "random"}
    for name in ("checksums", "version", "schedule_step"):
        assert found[name] == expected[name]
    assert found["extra"]["source"] == expected["extra"]["source"]
    assert found["extra"]["next"] == expected["extra"]["next"]


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_rows_are_bitwise_those_of_the_uninterrupted_run(whole, resumed, step):
    assert rows_equal(read_rows(resumed, step), read_rows(whole, step))


def rows_equal(a: pa.Table, b: pa.Table) -> bool:
    """Null-safe, and NaN would be a difference: no column may hold one."""
    return a.schema == b.schema and a.equals(b)


def test_metrics_less_times_are_those_of_the_uninterrupted_run(whole, resumed):
    expected, found = ([without_times(row) for row in read_metrics(folder)] for folder in (whole, resumed))
    assert found == expected


def test_a_finished_run_resumes_to_its_end(resumed):
    """Nothing is left to do but the last evaluation and the summary; the newest checkpoint without a marker is no
    checkpoint, so the step before it is done again, to the same end."""
    before = facts(resumed, STEPS)
    (resumed / "checkpoints" / f"step_{STEPS:06d}" / "COMPLETE").unlink()
    folder = drive(resumed.parent, *BITWISE, f"run.steps={STEPS}", "run.resume=auto").folder
    assert folder == resumed
    assert facts(folder, STEPS)["checksums"] == before["checksums"]

    run = drive(resumed.parent, *BITWISE, f"run.steps={STEPS}", "run.resume=auto")
    assert "sampling" not in run.output
    assert run.folder == resumed


def test_on_vllm_the_next_step_after_a_restore_is_the_one_that_was_recorded(tmp_path):
    """Hashes of weights, optimiser and random state are checked inside the restore, which would end with exit 4."""
    words = (*SMALL, "run.name=vllm", "policy.ranks=2")
    before = drive(tmp_path, *words, "run.steps=1").folder
    recorded = facts(before, 1)

    run = drive(tmp_path, *words, "run.steps=2", "run.resume=auto", "policy.ranks=1")
    assert run.folder == before
    rows = read_rows(run.folder, 2).to_pylist()
    firsts = [[row["task_id"], row["sibling"], row["seed"]] for row in rows if row["turn"] == 0]
    assert firsts == [[task_id, sibling, turn_seed(seed, 0)] for task_id, sibling, seed in recorded["extra"]["next"]]
    assert {row["weight_version"] for row in rows} == {recorded["version"]}
