"""The run folder: what is written where, and what a resumed run finds in it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pytest

from mempo_ray.errors import ConfigError
from mempo_ray.observability.run_folder import COMPLETE, RunFolder, complete_checkpoints, newest_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs", "quick")


def checkpoint(folder: RunFolder, step: int, *, complete: bool = True, at_s: float = 0) -> Path:
    path = folder.checkpoint(step)
    path.mkdir(parents=True)
    (path / "state").touch()
    if complete:
        (path / COMPLETE).touch()
        os.utime(path / COMPLETE, (1_000_000 + at_s,) * 2)
    return path


def run_named(runs: Path, name: str) -> RunFolder:
    folder = RunFolder(runs / name)
    folder.root.mkdir(parents=True)
    return folder


def test_latest_points_at_the_newest_run(folder):
    latest = folder.root.parent / "latest"
    assert latest.resolve() == folder.root.resolve()
    newer = run_named(folder.root.parent, "quick-20300101-000000-1")
    newer.point_latest()
    assert latest.resolve() == newer.root.resolve()
    assert not list(folder.root.parent.glob(".latest*"))


def test_a_folder_that_cannot_be_written_names_the_key(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run\.dir.*writable"):
        RunFolder.create(tmp_path / "file", "quick")


def test_a_checkpoint_without_its_marker_is_no_checkpoint(folder):
    first = checkpoint(folder, 1)
    checkpoint(folder, 2, complete=False)
    assert complete_checkpoints(folder.root) == [first]
    assert newest_checkpoint(folder.root.parent, "quick") == first


def test_the_newest_checkpoint_is_the_one_completed_last_over_all_runs_of_the_name(tmp_path):
    older, newer = (run_named(tmp_path, f"quick-2026010{day}-000000-7") for day in (1, 2))
    checkpoint(newer, 5, at_s=10)
    last = checkpoint(older, 3, at_s=20)
    checkpoint(run_named(tmp_path, "quick-start-20260103-000000-7"), 9, at_s=30)  # of a run with another name
    assert newest_checkpoint(tmp_path, "quick") == last
    assert newest_checkpoint(tmp_path, "slow") is None


def test_pruning_keeps_the_newest_and_the_best(folder):
    for step in (1, 2, 3, 4, 5):
        checkpoint(folder, step)
    folder.prune(keep=2, best=2)
    assert [path.name for path in complete_checkpoints(folder.root)] == ["step_000002", "step_000004", "step_000005"]
    assert len(list(folder.root.glob("checkpoints/*"))) == 3


def test_rewinding_drops_the_steps_that_come_again_and_the_last_evaluation(folder):
    for row in ({"step": 0}, {"step": 1, "a": 1}, {"step": 2}, {"step": 2, "eval/em": 1}, {"step": 3}):
        folder.append_jsonl("metrics.jsonl", [row])
    table = pa.table({"x": [1]})
    for name in ("step_0001", "step_0002", "step_0003", "eval_step_0003_final"):
        folder.write_trajectories(name, [table])
        folder.append_jsonl("excluded.jsonl", [{"file": name, "reason": "tool_failed"}])

    folder.rewind(2)

    assert folder.read_metrics() == [{"step": 0}, {"step": 1, "a": 1}, {"step": 2}]
    kept = {path.stem for path in folder.root.glob("trajectories/*")}
    assert kept == {"step_0001", "step_0002"}
    excluded = (folder.root / "excluded.jsonl").read_text().splitlines()
    assert [json.loads(line)["file"] for line in excluded] == ["step_0001", "step_0002"]


def test_trajectories_of_a_step_without_any_leave_no_file(folder):
    folder.write_trajectories("step_0001", [])
    assert not folder.trajectory_file("step_0001").exists()


def test_versions_name_the_packages_that_decide_numbers(folder):
    folder.write_versions()
    versions = json.loads((folder.root / "versions.json").read_text())
    assert {"python", "platform", "cpus", "numpy", "pyarrow", "torch", "ray"} <= set(versions)
