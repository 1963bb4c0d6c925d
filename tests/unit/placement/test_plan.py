"""The plan is arithmetic: bundles, fractions and shortages without a cluster."""

import pytest

from mempo_ray.config.load import build
from mempo_ray.config.models import KNOWN
from mempo_ray.errors import ConfigError, PlacementError
from mempo_ray.placement.plan import ClusterShape, Node, make_plan, read_cluster_shape

LAPTOP = ClusterShape((Node(cpus=2, memory_gb=16),))
GPU_BOX = ClusterShape((Node(cpus=64, gpus=8, memory_gb=1000, gpu_memory_gb=80),))
TWO_BOXES = ClusterShape((Node(cpus=16, gpus=4, gpu_memory_gb=80), Node(cpus=16, gpus=4, gpu_memory_gb=80)))


def config(layout: str = "cpu", **placement):
    sections = {"placement": {"layout": layout, **placement}}
    if layout != "cpu":
        sections |= {"policy": {"device": "cuda", "ranks": 4}, "rollout": {"replicas": 4, "max_replicas": 4}}
    return build(sections)


def test_the_default_run_asks_for_at_most_one_cpu_so_two_fit_on_two():
    plan = make_plan(config(), LAPTOP).require()
    assert 0.99 < plan.cpus <= 1.0
    assert plan.gpus == 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("num_cpus", [0.5, 1.0, 3.3])
def test_fractions_never_sum_to_more_than_the_run_may_ask(ranks, num_cpus):
    plan = make_plan(build({"policy": {"ranks": ranks}, "placement": {"num_cpus": num_cpus}}), LAPTOP)
    assert plan.cpus <= num_cpus
    assert all(
        bundle.resources["CPU"] * 1e4 == pytest.approx(round(bundle.resources["CPU"] * 1e4)) for bundle in plan.bundles
    )


def test_every_actor_has_one_bundle():
    plan = make_plan(config(), LAPTOP)
    tenants = [tenant for bundle in plan.bundles for tenant in bundle.tenants]
    assert tenants == [("policy", 0), ("rollout", 0), ("retrieval", 0), ("reward", 0), ("agent_loop", 0),
                       ("batch_executor", 0)]  # fmt: skip


@pytest.mark.parametrize(("layout", "gpus", "bundles"), [("cpu", 0, 12), ("disaggregated", 8, 12), ("colocated", 4, 8)])
def test_layouts_share_or_part_the_gpus(layout, gpus, bundles):
    sections = {"policy": {"ranks": 4}, "rollout": {"replicas": 4, "max_replicas": 4}, "placement": {"layout": layout}}
    sections["policy"]["device"] = "cpu" if layout == "cpu" else "cuda"
    plan = make_plan(build(sections), GPU_BOX).require()
    assert (plan.gpus, len(plan.bundles)) == (gpus, bundles)


def test_colocated_rank_and_engine_share_a_bundle_and_half_a_gpu_each():
    plan = make_plan(config("colocated"), GPU_BOX)
    assert plan.bundle_of("policy", 2) == plan.bundle_of("rollout", 2)
    assert plan.role("policy").gpus == plan.role("rollout").gpus == 0.5
    assert "memory_reward.streaming has no effect" in plan.table()


def test_tensor_parallel_engines_take_whole_gpus_in_one_bundle():
    sections = {"policy": {"device": "cuda", "ranks": 2}, "rollout": {"replicas": 1, "tensor_parallel": 4},
                "placement": {"layout": "disaggregated"}}  # fmt: skip
    plan = make_plan(build(sections), GPU_BOX).require()
    assert plan.bundles[plan.bundle_of("rollout", 0)].resources["GPU"] == 4


@pytest.mark.parametrize(
    ("sections", "shape", "words"),
    [
        ({"policy": {"device": "cuda", "ranks": 2}, "placement": {"layout": "disaggregated"}}, LAPTOP,
         "policy needs 2 GPUs (2 × 1), rollout needs 1 GPU; the cluster has 0 GPUs"),
        ({"placement": {"num_cpus": 8}}, LAPTOP, "the cluster has 2 CPUs. Lower placement.num_cpus (now 8)"),
        ({"policy": {"device": "cuda"}}, GPU_BOX, "policy.device=cuda needs placement.layout"),
        ({"placement": {"layout": "colocated"}}, GPU_BOX, "needs policy.device=cuda"),
        ({"policy": {"device": "cuda"}, "rollout": {"tensor_parallel": 2},
          "placement": {"layout": "colocated"}}, GPU_BOX,
         "rollout.tensor_parallel=1"),
        ({"policy": {"device": "cuda"}, "rollout": {"replicas": 2, "max_replicas": 2},
          "placement": {"layout": "colocated"}}, GPU_BOX, "each engine shares a rank's GPU"),
        ({"policy": {"device": "cuda", "ranks": 3}, "placement": {"layout": "disaggregated", "num_gpus": 2}}, GPU_BOX,
         "placement.num_gpus allows 2"),
        ({"policy": {"device": "cuda", "ranks": 2}, "rollout": {"tensor_parallel": 6},
          "placement": {"layout": "disaggregated"}}, TWO_BOXES, "rollout[0] needs"),
    ],
)  # fmt: skip
def test_what_is_short_is_said_in_words(sections, shape, words):
    plan = make_plan(build(sections), shape)
    assert words in "\n".join(plan.shortages)
    with pytest.raises(PlacementError):
        plan.require()


def test_the_memory_of_a_rank_is_16_bytes_a_parameter_over_the_ranks():
    model = KNOWN["Qwen2.5-7B"]
    plan = make_plan(config("disaggregated"), GPU_BOX, model)
    gpu = plan.role("policy").gpu_gb
    assert gpu["weights"] + gpu["gradients"] + gpu["optimiser"] == pytest.approx(16 * model.num_params / 4 / 1e9)


def test_cpu_offload_moves_optimiser_and_reference_to_the_host():
    sections = {"policy": {"device": "cuda", "ranks": 4, "cpu_offload": True}, "placement": {"layout": "disaggregated"}}
    policy = make_plan(build(sections), GPU_BOX, KNOWN["Qwen2.5-7B"]).role("policy")
    assert {"optimiser", "reference"} <= set(policy.host_gb)
    assert "optimiser" not in policy.gpu_gb


def test_more_memory_than_the_nodes_have_is_noted():
    tight = ClusterShape((Node(cpus=2, memory_gb=2),))
    assert any("the nodes have 2.0 GB" in note for note in make_plan(config(), tight).notes)


def test_a_cluster_that_is_not_up_is_planned_from_a_file(tmp_path):
    file = tmp_path / "shape.yaml"
    file.write_text("nodes: [{count: 2, cpus: 96, gpus: 8, memory_gb: 1000, gpu_memory_gb: 80}]")
    shape = read_cluster_shape(file)
    assert (shape.cpus, shape.gpus, shape.gpu_memory_gb) == (192, 16, 80)


@pytest.mark.parametrize("text", ["nodes: 3", "{}", "nodes: [{cpu: 1}]", "a: ["])
def test_a_file_that_is_no_shape_is_named(tmp_path, text):
    file = tmp_path / "shape.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"placement\.cluster_shape"):
        read_cluster_shape(file)


def test_each_reward_model_has_a_bundle_of_its_own():
    styles = {
        "em": {"scorer": "exact_match"},
        "rm": {"style": "model", "reward_model": {"folder": "builtin:tiny", "device": "cuda"}},
        "prm": {"style": "model", "reward_model": {"folder": "builtin:tiny", "device": "cuda", "process": True}},
    }
    plan = make_plan(build({"reward": {"manager": "hybrid", "styles": styles}}), GPU_BOX).require()
    assert plan.gpus == 2
    assert plan.bundle_of("reward_model", 0) != plan.bundle_of("reward_model", 1)
    assert "weights" in plan.role("reward_model").gpu_gb
