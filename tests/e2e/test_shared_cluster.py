"""Two runs of the same name, at the same time, on one Ray cluster of two CPUs: neither sees the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakes.driver_run import SMALL, DriverRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_two_runs_fit_side_by_side_on_two_cpus(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    words = (*SMALL, "run.steps=1", "rollout.engine=fake", f"placement.address={cluster.address}")
    try:
        with DriverRun(tmp_path / "a", *words) as first, DriverRun(tmp_path / "b", *words, "run.seed=1") as second:
            first.wait_for("step 1: sampling")
            second.wait_for("step 1: sampling")  # the first one's bundles are still held, or were when it started
            assert (first.finish(), second.finish()) == (0, 0), first.output + second.output
    finally:
        cluster.shutdown()
    for run in (first, second):
        assert json.loads((run.folder / "summary.json").read_text())["steps"] == 1
