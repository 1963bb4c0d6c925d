"""Settings of all tests, and what the policy's suites share: a tiny model, one process that is a gang."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# As in `make test`, before numpy, torch or FAISS load: on busy cores OpenMP's threads wait for one another, many times
# as long as they work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Clusters of one process must agree, and Ray would ask for a token only where an earlier run has left one at home.
# tests/e2e/test_jobs.py has a head with a token.
os.environ["RAY_AUTH_MODE"] = "disabled"

from tests.fakes.training import free_port, write_tiny_model

# Tests share a machine with engines and other suites: the time of one example says nothing about the code.
hypothesis.settings.register_profile("mempo", deadline=None)
hypothesis.settings.load_profile("mempo")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def solo_gang() -> Iterator:
    import torch

    from mempo_ray.training.sharding import Gang

    torch.set_num_threads(1)
    gang = Gang.join(0, 1, ("127.0.0.1", free_port()), "cpu", 60)
    yield gang
    gang.leave()
