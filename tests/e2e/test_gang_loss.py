"""A rank or the batch executor is killed in the middle of a step: the run goes back to its checkpoint, or ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.driver_run import SMALL, DriverRun, adopted_orphans, read_metrics, read_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORDS = (*SMALL, "rollout.engine=fake", "run.steps=3", "policy.ranks=2")


def kill_a_rank(run: DriverRun) -> None:
    ranks = run.find_all("ray::PolicyWorker")
    assert len(ranks) == 2
    ranks[1].kill()


def kill_the_executor(run: DriverRun) -> None:
    run.find("ray::BatchExecutor").kill()


@pytest.mark.parametrize(
    ("kill", "step"),
    [
        pytest.param(kill_a_rank, 1, id="a rank, back to the checkpoint after the cold start"),
        pytest.param(kill_a_rank, 2, id="a rank, back to that of a step"),
        pytest.param(kill_the_executor, 2, id="the executor"),
    ],
)
def test_the_step_is_done_again_by_a_new_gang_from_the_newest_checkpoint(
    kill: Callable[[DriverRun], None], step: int, tmp_path: Path
):
    with adopted_orphans(), DriverRun(tmp_path, *WORDS) as run:
        run.wait_for(f"step {step}: sampling")
        kill(run)
        assert run.finish() == 0, run.output
        assert run.left_behind == []
    assert "going back to" in run.output
    rows = [row for row in read_metrics(run.folder) if "policy/loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["policy/num_restarts"] for row in rows] == [int(row["step"] >= step) for row in rows]
    assert rows[step - 1]["time/recovery_s"] > 0
    versions = [row["sync/version"] for row in rows]
    assert versions == sorted(versions)
    for row in rows:  # what a step trained on was sampled by the version before it
        sampled = set(read_rows(run.folder, row["step"])["weight_version"].to_pylist())
        assert len(sampled) == 1
        assert sampled < set(range(int(row["sync/version"]) + 1))
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["steps"] == 3
    assert "em_cold_start" in summary  # measured before RL: it does not go back


def test_with_no_restart_left_the_run_ends_as_an_infrastructure_failure(tmp_path: Path):
    with adopted_orphans(), DriverRun(tmp_path, *WORDS, "policy.max_restarts=0") as run:
        run.wait_for("step 1: sampling")
        kill_a_rank(run)
        assert run.finish() == 3, run.output
        assert run.left_behind == []
    message = run.output.splitlines()[-1]
    assert message.startswith("mempo_ray: ")
    assert "go on with run.resume=auto" in message
    assert "Traceback" not in run.output
