"""`mempo-ray reward-check` on fresh episodes: real engines and actors, no training."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_fresh_episodes_of_the_shipped_policy_are_sampled_and_scored(tmp_path) -> None:
    words = ["reward-check", "--limit", "8", "--out", str(tmp_path / "out"), f"run.dir={tmp_path / 'runs'}"]
    done = subprocess.run(
        [sys.executable, "-m", "mempo_ray.cli", *words], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "8 of 8 responses scored" in done.stdout
    found = json.loads((tmp_path / "out" / "reward_check.json").read_text())
    assert found["num_scored"] == sum(found["histogram"]["counts"]) == 8
    assert found["latency_s"]["max"] > 0
