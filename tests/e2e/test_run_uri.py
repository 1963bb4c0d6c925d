"""A run whose folder is a URI ends there, and goes on from there on a machine that has seen nothing of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.driver_run import SMALL, read_metrics

WORDS = (*SMALL, "run.name=uri", "rollout.engine=fake", "eval.probe_ratios=false")


def drive_from(machine: Path, *words: str) -> None:
    """A whole run; `machine` is where it may write locally."""
    machine.mkdir()
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"MEMPO_LOCAL_RUNS": str(machine)}
    command = [sys.executable, "-m", "mempo_ray.driver", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_at_a_uri_goes_on_elsewhere(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    where = f"run.dir={bucket.as_uri()}"
    drive_from(tmp_path / "first", *WORDS, where, "run.steps=1")
    (run,) = bucket.iterdir()
    assert {"config.yaml", "metrics.jsonl", "summary.json", "trajectories"} <= {p.name for p in run.iterdir()}
    assert (run / "checkpoints" / "step_000001" / "COMPLETE").is_file()

    drive_from(tmp_path / "second", *WORDS, where, "run.steps=2", "run.resume=auto")
    assert [path.name for path in bucket.iterdir()] == [run.name]
    assert {row["step"] for row in read_metrics(run)} == {0, 1, 2}
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
