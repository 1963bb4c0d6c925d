import pytest

from retrieval_index.errors import BuildError
from retrieval_index.plan import IndexPlan, Tuning, describe, estimate, plan_index


@pytest.mark.parametrize("kind", ["ivf", "ivfpq"])
@pytest.mark.parametrize("count", [10_000, 20_000, 5_000_000, 100_000_000])
def test_plans_stay_trainable_for_any_size(kind: str, count: int) -> None:
    plan = plan_index(kind, count, 384)
    num_lists = int(plan.factory.removeprefix("IVF").split(",")[0])
    assert 1 <= plan.search["nprobe"] <= num_lists <= plan.num_training_rows <= count


def test_what_the_tuning_says_goes_before_what_the_plan_would_choose() -> None:
    tuning = Tuning(
        nlist=100, nprobe=7, pq_bytes=48, training_rows=12_000, hnsw_links=16, ef_construction=80, ef_search=64
    )
    assert plan_index("ivfpq", 20_000, 384, tuning) == IndexPlan("IVF100,PQ48x8np", 12_000, {"nprobe": 7})
    assert plan_index("ivf", 20_000, 384, tuning) == IndexPlan("IVF100,Flat", 12_000, {"nprobe": 7})
    assert plan_index("hnsw", 20_000, 384, tuning) == IndexPlan(
        "HNSW16,Flat", 0, {"efSearch": 64}, {"efConstruction": 80}
    )
    assert plan_index("flat", 20_000, 384, tuning) == IndexPlan("Flat")


@pytest.mark.parametrize(
    ("kind", "count", "tuning", "remedy"),
    [
        ("ivfpq", 1_000, Tuning(), "use kind flat"),
        ("lsh", 1_000, Tuning(), "flat, ivf, hnsw, ivfpq"),
        ("ivf", 1_000, Tuning(nlist=1_001), "use at most 1000"),
        ("ivfpq", 20_000, Tuning(pq_bytes=100), "use 96, say"),
    ],
)
def test_a_plan_that_cannot_be_names_the_remedy(kind: str, count: int, tuning: Tuning, remedy: str) -> None:
    with pytest.raises(BuildError, match=remedy):
        plan_index(kind, count, 384, tuning)


def test_the_cost_of_five_million_vectors_stays_within_six_gigabytes() -> None:
    cost = estimate(plan_index("ivfpq", 5_000_000, 128), 5_000_000, 128, num_threads=1, given_vectors=True)
    assert cost.file_bytes == pytest.approx(5_000_000 * 40, rel=0.05)
    assert cost.memory_bytes < 6e9
    assert 100 < cost.seconds < 1_000


def test_flat_costs_its_vectors_and_more_threads_less_time() -> None:
    cost = estimate(plan_index("flat", 1_000, 384), 1_000, 384, 1)
    assert (cost.file_bytes, cost.disk_bytes, cost.seconds) == (1_536_000, 3_072_000, 0)
    plan = plan_index("hnsw", 10_000, 384)
    assert estimate(plan, 10_000, 384, 4).seconds == pytest.approx(estimate(plan, 10_000, 384, 1).seconds / 4)


def test_the_line_before_a_build_names_parameters_and_cost() -> None:
    line = describe(plan_index("ivf", 20_000, 384), 20_000, 384, 1)
    assert line.startswith("20,000 passages: IVF312,Flat, trained on 19,968, nprobe 64; beside the encoder about")
