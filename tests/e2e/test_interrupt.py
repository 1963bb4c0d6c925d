"""Ctrl-C at any moment: exit code 130, no traceback, no process, no hang."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.fakes.driver_run import SMALL, DriverRun, adopted_orphans

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WORDS = (*SMALL, "run.name=interrupt", "run.steps=1000", "rollout.engine=fake")


def interrupt(run: DriverRun) -> None:
    """As a terminal does it: every process of the group gets it."""
    os.killpg(run.process.pid, signal.SIGINT)


@pytest.mark.parametrize("stage", ["starting Ray", "cold start", "step 1: sampling"])
def test_twice_stops_at_once_whatever_the_driver_is_doing(stage: str, tmp_path: Path) -> None:
    with adopted_orphans(), DriverRun(tmp_path, *WORDS) as run:
        run.wait_for(stage)
        interrupt(run)
        # While Ray starts there is no step to wait for; on a busy machine it may have started before the signal came.
        if run.says("once more to stop at once"):
            interrupt(run)
        else:
            assert stage == "starting Ray", run.output
        code = run.finish()
    assert code == 130, run.output
    assert "Traceback" not in run.output
    assert run.left_behind == []
    assert not list(Path("/dev/shm").glob(f"mempo-{run.folder.name}*"))


def test_once_stops_after_the_step(tmp_path: Path) -> None:
    with adopted_orphans(), DriverRun(tmp_path, *WORDS) as run:
        run.wait_for("step 1: sampling")
        interrupt(run)
        assert run.finish() == 130, run.output
    assert "stopped after step" in run.output
    assert run.left_behind == []
    assert list(run.folder.glob("checkpoints/*/COMPLETE"))
