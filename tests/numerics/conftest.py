"""One process that is a whole gang, and a tiny model, for the tests of the policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.training import free_port, write_tiny_model


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
