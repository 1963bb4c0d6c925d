import faiss
import numpy as np
import pytest

from retrieval_index.gpu import SCRATCH_BYTES, GpuPlan, index_bytes, plan_gpus

GB = 10**9


def free(*gigabytes: float) -> list[int]:
    return [int(g * GB) + SCRATCH_BYTES for g in gigabytes]


@pytest.mark.parametrize(
    ("index_gb", "free_gb", "expected"),
    [
        (10, [40], GpuPlan((0,))),
        (10, [40, 40], GpuPlan((0, 1))),
        (10, [5, 40], GpuPlan((1,))),
        (40, [30, 30], GpuPlan((0, 1), sharded=True)),
        (40, [30, 1, 30], GpuPlan((0, 2), sharded=True)),
        (40, [25], GpuPlan((0,), float16=True)),
        (40, [12, 12], GpuPlan((0, 1), sharded=True, float16=True)),
        (100, [20] * 8, GpuPlan((0, 1, 2, 3, 4), sharded=True)),
    ],
)
def test_exact_comes_before_fast_and_a_copy_before_a_shard(
    index_gb: int, free_gb: list[int], expected: GpuPlan
) -> None:
    assert plan_gpus(index_gb * GB, index_gb * GB // 2, free(*free_gb)) == expected


def test_what_does_not_fit_stays_on_the_cpu_and_says_how_much_is_missing() -> None:
    plan = plan_gpus(100 * GB, 50 * GB, free(10, 10))
    assert plan.gpus == ()
    assert plan.reason == "the index takes 50.0 GB, the GPUs have 10.0, 10.0 GB free"
    assert plan_gpus(GB, GB, []).reason == "FAISS sees no GPU"


def test_codes_that_float16_does_not_shrink_are_not_stored_in_it() -> None:
    assert not plan_gpus(40 * GB, 40 * GB, free(25)).gpus


def test_plans_read_well() -> None:
    assert str(GpuPlan((0,))) == "cuda 0"
    assert str(GpuPlan((0, 2), sharded=True, float16=True)) == "cuda 0,2, a shard each, float16"
    assert str(GpuPlan((0, 1))) == "cuda 0,1, a copy each"
    assert str(GpuPlan((), reason="no GPU")) == "cpu (no GPU)"


def test_the_bytes_of_an_index_are_counted_by_its_kind() -> None:
    vectors = np.random.default_rng(0).standard_normal((1000, 16), dtype=np.float32)
    counted = {}
    for factory in ("Flat", "IVF4,Flat", "IVF4,PQ4x4np"):
        index = faiss.index_factory(16, factory, faiss.METRIC_INNER_PRODUCT)
        index.train(vectors)
        index.add(vectors)
        counted[factory] = index_bytes(index)
    beside = 1000 * 8 + 4 * 16 * 4
    assert counted == {
        "Flat": (64_000, 32_000),
        "IVF4,Flat": (64_000 + beside, 64_000 + beside),
        "IVF4,PQ4x4np": (2_000 + beside, 2_000 + beside),
    }
