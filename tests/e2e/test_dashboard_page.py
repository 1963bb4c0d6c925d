"""The Ray dashboard's page of actors while a job runs, in headless Chromium.

With MEMPO_WRITE_IMAGES=1 the picture is also written to docs/images/dashboard.png.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from ray.job_submission import JobStatus

from tests.fakes.ray_head import RayHead

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1800,1000",
    "--virtual-time-budget=12000",
)
NAMED = {"rollout-0": "RolloutActor(rollout-0)", "policy-0": "PolicyWorker(policy-0)",
         "agent_loop-0": "AgentLoopWorker(0)", "batch_executor-0": "BatchExecutor(batch_executor-0)"}  # fmt: skip
"""End of a name → repr."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]


def open_page(url: str, profile: Path, *action: str) -> str:
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", *action, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_the_page_of_a_running_job_shows_its_actors_by_their_names(tmp_path: Path) -> None:
    picture = tmp_path / "dashboard.png"
    with RayHead(tmp_path / "head", token=False) as head:
        words = ("run.steps=1000", "rollout.engine=fake", "cold_start=null", "reward.log_samples=0", "eval.tasks=4")
        job = head.submit(ROOT, *words)
        head.wait_for(job, "step 1/1000")
        page = f"{head.dashboard}/#/actors"
        shown = open_page(page, tmp_path / "profile", "--dump-dom")
        open_page(page, tmp_path / "profile", f"--screenshot={picture}")
        head.client.stop_job(job)
        assert head.wait_for_end(job) == JobStatus.STOPPED
    for name, repr_ in NAMED.items():
        assert f"/{name}<" in shown, name
        assert repr_ in shown
    assert picture.stat().st_size > 20_000
    if os.environ.get("MEMPO_WRITE_IMAGES"):
        shutil.copy(picture, ROOT / "docs" / "images" / "dashboard.png")
