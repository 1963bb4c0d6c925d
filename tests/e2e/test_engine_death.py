"""A RolloutActor is killed in the middle of a step: nothing is lost, nothing is scored 0, a new engine takes over."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from tests.fakes.driver_run import SMALL, DriverRun, adopted_orphans, read_metrics, read_rows, step_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_TASKS, GROUP_SIZE = 8, 8
GONE_S = 30


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> DriverRun:
    """Two steps on one engine; its actor is killed while step 1 samples."""
    words = (
        *SMALL,
        "run.name=death",
        "run.steps=2",
        f"algorithm.group_size={GROUP_SIZE}",
        "rollout.request_timeout_s=300",  # a restart takes a minute on a busy machine
        "agent.limits.episode_s=300",
    )
    with adopted_orphans(), DriverRun(tmp_path_factory.mktemp("runs"), *words) as run:
        run.wait_for("step 1: sampling")
        actor = run.find("ray::RolloutActor")
        engine = actor.children(recursive=True)
        actor.kill()
        _, alive = psutil.wait_procs(engine, timeout=GONE_S)
        assert engine
        assert alive == []
        assert run.finish() == 0, run.output
    assert run.left_behind == []
    return run


@pytest.fixture(scope="module")
def folder(run) -> Path:
    return run.folder


def test_both_steps_complete_with_every_task(folder):
    for step in (1, 2):
        rows = read_rows(folder, step).to_pylist()
        keys = {(row["task_id"], row["sibling"]) for row in rows}
        assert len(keys) == NUM_TASKS * GROUP_SIZE
        assert len({task_id for task_id, _ in keys}) == NUM_TASKS
        assert step_metrics(folder, step)["rollout/num_trajectories"] == NUM_TASKS * GROUP_SIZE
    assert json.loads((folder / "summary.json").read_text())["steps"] == 2


def test_the_death_is_counted_with_its_recovery_time(folder):
    hit, after = step_metrics(folder, 1), step_metrics(folder, 2)
    assert hit["rollout/engine_restarts"] == 1
    assert 0 < hit["rollout/recovery_s"] <= hit["time/step_s"]
    assert hit["rollout/turns_asked_again"] > 0
    assert (after["rollout/engine_restarts"], after["rollout/recovery_s"]) == (0, 0)


def test_nothing_is_scored_zero_or_excluded_because_of_it(folder):
    """Turns were asked again, episodes were not broken: every row is a policy's own doing, of one weight version."""
    rows = read_rows(folder, 1).to_pylist()
    assert not (folder / "excluded.jsonl").read_text()
    assert {row["excluded_because"] for row in rows} == {None}
    assert {row["end_reason"] for row in rows} <= {"answered", "max_turns", "length", "format_stop"}
    assert all(row["score"] is not None for row in rows)
    assert len({row["weight_version"] for row in rows}) == 1


def test_the_new_engine_proved_the_version_that_it_then_sampled_with(folder):
    """Its log-probs are those of the trainer, in the step that it joined and after the next sync."""
    for step in (1, 2):
        metrics = step_metrics(folder, step)
        assert metrics["policy/logprob_gap_max"] <= 1e-3
        assert metrics["sync/num_engines"] == 1
        assert metrics["rollout/drift_turns"] == 0
    assert [row["step"] for row in read_metrics(folder)] == [0, 1, 2, 2]
