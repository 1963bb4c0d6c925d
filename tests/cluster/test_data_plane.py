"""What the benchmark claims, in small: reads without a copy, payloads past the driver, equal rows on both sides."""

import sys
from pathlib import Path

import numpy as np
import pytest
import ray
from ray.experimental import get_object_locations

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import data_plane

from mempo_ray.actors.agent_loop import PAYLOADS_IN_STORE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cluster():
    folder = str(Path(data_plane.__file__).parent)
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False,
             object_store_memory=100 * 2**20, runtime_env={"env_vars": {"PYTHONPATH": folder}})  # fmt: skip
    yield
    ray.shutdown()


def test_a_batch_comes_out_of_the_store_as_views_of_it():
    rows = data_plane.make_rows(10**6, data_plane.SIGMA)
    batch = ray.get(ray.put(data_plane.build_batch(rows)))
    for array in data_plane.arrays_of_batch(batch):
        assert not array.flags.owndata
        assert not array.flags.writeable


def test_payloads_lie_in_the_store_and_summaries_come_by_value():
    worker = ray.remote(num_cpus=1, runtime_env=PAYLOADS_IN_STORE)(data_plane.Worker).remote()
    references = list(worker.run.options(num_returns="streaming").remote(10**6))
    ray.wait(references, num_returns=len(references), timeout=60, fetch_local=False)
    locations = get_object_locations(references, timeout_ms=10_000)
    assert all(locations[payload]["node_ids"] for payload in references[::2])
    assert not any(locations[summary]["node_ids"] for summary in references[1::2])


def test_padding_and_consolidating_keep_the_rows():
    """The other side of the benchmark carries what ours carries."""
    rows = data_plane.make_rows(10**5, data_plane.SIGMA)
    rows = {name: [row * (i + 1) for i, row in enumerate(column)] for name, column in rows.items()}
    batch = data_plane.build_batch({**rows})
    carried = ray.get(ray.put(data_plane.build_dataproto({**rows}))).tensors
    for name in data_plane.COLUMNS:
        assert np.array_equal(carried[name].numpy(), batch.to_padded(name))
