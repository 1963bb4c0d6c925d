"""The whole run on GPUs, in both layouts. Not run on machines without CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fakes.driver_run import SMALL, drive, read_metrics

NUM_GPUS = torch.cuda.device_count()

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900)]

GPU = (*SMALL, "run.steps=2", "policy.device=cuda", "rollout.gpu_memory_utilization=0.3", "weight_sync.max_gap=1e-2")


@pytest.mark.parametrize(
    ("layout", "num_gpus"),
    [
        pytest.param("colocated", 1, marks=pytest.mark.skipif(NUM_GPUS < 1, reason="needs a CUDA device")),
        pytest.param("disaggregated", 2, marks=pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA devices")),
    ],
)
def test_pushed_weights_are_proven_after_every_step(layout: str, num_gpus: int, tmp_path: Path):
    run = drive(tmp_path, *GPU, f"placement.layout={layout}")
    rows = [row for row in read_metrics(run.folder) if "sync/max_gap" in row]
    assert [row["sync/num_engines"] for row in rows] == [1, 1, 1]
    assert all(row["sync/max_gap"] < 1e-2 for row in rows)
    assert len({row["sync/version"] for row in rows}) == 3


@pytest.mark.skipif(NUM_GPUS < 1, reason="needs a CUDA device")
def test_shards_in_host_memory_train_alike(tmp_path: Path):
    run = drive(tmp_path, *GPU, "placement.layout=colocated", "policy.cpu_offload=true")
    assert all(row["policy/grad_norm"] > 0 for row in read_metrics(run.folder) if "policy/grad_norm" in row)
