"""The plan is arithmetic: groups of bundles, fractions and shortages without a cluster."""

import pytest

from mempo_ray.config.load import build
from mempo_ray.config.models import KNOWN, ModelShape
from mempo_ray.errors import ConfigError, PlacementError
from mempo_ray.placement.memory import SLEEPING_GB
from mempo_ray.placement.plan import Plan, make_plan, may_leave
from mempo_ray.placement.shape import ClusterShape, Node

LAPTOP = ClusterShape((Node(cpus=2, memory_gb=16),))
GPU_BOX = ClusterShape((Node(cpus=64, gpus=8, memory_gb=1000, gpu_memory_gb=80),))
TWO_BOXES = ClusterShape(
    (Node(cpus=16, gpus=4, gpu_memory_gb=80, name="a"), Node(cpus=16, gpus=4, gpu_memory_gb=80, name="b"))
)
SPOT = {"ray.io/market-type": "spot"}
ON_DEMAND = {"ray.io/market-type": "on-demand"}


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
    assert tenants == [("policy", 0), ("batch_executor", 0), ("rollout", 0), ("retrieval", 0), ("reward", 0),
                       ("agent_loop", 0)]  # fmt: skip


def test_ranks_are_packed_and_all_others_are_spread():
    plan = make_plan(config("disaggregated"), GPU_BOX)
    strategies = {role.name: plan.groups[plan.find(role.name, 0)[0]].strategy for role in plan.roles}
    assert strategies == {"policy": "PACK", "batch_executor": "PACK", "rollout": "SPREAD", "retrieval": "SPREAD",
                          "reward": "SPREAD", "agent_loop": "SPREAD"}  # fmt: skip


def test_the_executor_is_reserved_with_its_ranks_and_each_other_role_apart():
    plan = make_plan(config("disaggregated"), GPU_BOX)
    assert plan.find("batch_executor", 0)[0] == plan.find("policy", 0)[0]
    assert len({plan.find(role, 0)[0] for role in ("policy", "rollout", "retrieval", "reward", "agent_loop")}) == 5


def groups_of(plan: Plan, role: str) -> list[str]:
    return [group.name for group in plan.groups if any(bundle.tenants[0][0] == role for bundle in group.bundles)]


@pytest.mark.parametrize("least", [1, 3])
def test_an_engine_has_a_group_of_its_own_in_a_fixed_pool_too_for_its_node_may_go(least):
    sections = {"rollout": {"replicas": 3, "min_replicas": least, "max_replicas": 3}}
    plan = make_plan(build(sections), LAPTOP)
    assert groups_of(plan, "rollout") == ["rollout-0", "rollout-1", "rollout-2"]
    assert ("elastic: 1 to 3 engines" in plan.table()) == (least == 1)


@pytest.mark.parametrize(
    ("most", "groups"), [(0, ["retrieval"]), (2, ["retrieval"]), (4, ["retrieval-0", "retrieval-1"])]
)
def test_a_retrieval_replica_that_may_leave_has_a_group_of_its_own(most, groups):
    plan = make_plan(build({"retrieval": {"replicas": 2, "max_replicas": most}}), LAPTOP)
    assert groups_of(plan, "retrieval") == groups
    assert ("elastic: 2 to 4 retrieval replicas" in plan.table()) == (most == 4)


def test_an_engine_on_a_rank_s_gpu_and_a_pool_that_is_not_needed_stay_as_they_are():
    assert not may_leave(config("colocated"), "rollout")
    replay = build({"retrieval": {"max_replicas": 2, "mode": "replay", "record": "searches.arrow"}})
    assert not may_leave(replay, "retrieval")


@pytest.mark.parametrize(("layout", "gpus", "bundles"), [("cpu", 0, 12), ("disaggregated", 8, 12), ("colocated", 4, 8)])
def test_layouts_share_or_part_the_gpus(layout, gpus, bundles):
    sections = {"policy": {"ranks": 4}, "rollout": {"replicas": 4, "max_replicas": 4}, "placement": {"layout": layout}}
    sections["policy"]["device"] = "cpu" if layout == "cpu" else "cuda"
    plan = make_plan(build(sections), GPU_BOX).require()
    assert (plan.gpus, len(plan.bundles)) == (gpus, bundles)


def test_each_reward_model_has_a_bundle_of_its_own_with_its_gpu():
    model = {"style": "model", "reward_model": {"folder": "nowhere", "device": "cuda"}}
    plan = make_plan(build({"reward": {"manager": "hybrid", "styles": {"a": model, "b": model}}}), GPU_BOX)
    assert (plan.role("reward_model").count, plan.gpus) == (2, 2)


def test_colocated_rank_and_engine_share_a_bundle_and_half_a_gpu_each():
    plan = make_plan(config("colocated"), GPU_BOX)
    assert plan.find("policy", 2) == plan.find("rollout", 2)
    assert plan.role("policy").gpus == plan.role("rollout").gpus == 0.5
    assert "memory_reward.streaming has no effect" in plan.table()


def test_tensor_parallel_engines_take_whole_gpus_of_one_node():
    sections = {"policy": {"device": "cuda", "ranks": 2}, "placement": {"layout": "disaggregated"},
                "rollout": {"replicas": 1, "tensor_parallel": 4}}  # fmt: skip
    plan = make_plan(build(sections), TWO_BOXES).require()
    group, bundle = plan.find("rollout", 0)
    assert plan.groups[group].bundles[bundle].resources["GPU"] == 4
    assert plan.node_of("rollout", 0) is not plan.node_of("policy", 0) is plan.node_of("policy", 1)


def test_labels_of_a_role_choose_its_nodes():
    nodes = (Node(cpus=8, gpus=4, name="cheap", labels=SPOT), Node(cpus=8, gpus=4, name="sure", labels=ON_DEMAND))
    labels = {"policy": ON_DEMAND, "rollout": SPOT}
    plan = make_plan(config("disaggregated", labels=labels), ClusterShape(nodes)).require()
    assert {plan.node_of("policy", i).name for i in range(4)} == {"sure"} == {plan.node_of("batch_executor", 0).name}
    assert {plan.node_of("rollout", i).name for i in range(4)} == {"cheap"}
    assert [dict(bundle.labels) for bundle in plan.bundles if bundle.tenants[0][0] == "retrieval"] == [{}]


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
          "placement": {"layout": "disaggregated"}}, TWO_BOXES,
         "rollout[0] needs 6 GPUs on one node (rollout.tensor_parallel=6); the largest node has 4 GPUs"),
        ({"policy": {"device": "cuda"}, "rollout": {"tensor_parallel": 2, "replicas": 3, "max_replicas": 3},
          "placement": {"layout": "disaggregated", "num_cpus": 1}},
         ClusterShape(tuple(Node(cpus=8, gpus=g, name=f"n{g}") for g in (1, 3, 3))),
         "left beside the others: n1 "),
        ({"placement": {"labels": {"reward": SPOT}}}, ClusterShape((Node(cpus=2, labels=ON_DEMAND),)),
         "reward[0] needs a node labelled ray.io/market-type=spot (placement.labels.reward), which no node has; "
         "labels that nodes have: ray.io/market-type=on-demand"),
        ({"placement": {"labels": {"agent": SPOT}}}, LAPTOP,
         "(placement.labels.agent), which no node has; no node has any label"),
        ({"rollout": {"kv_cache_gb": 40}}, LAPTOP,
         "rollout[0] holds about 44.3 GB in memory; the largest node has 16.0 GB. Lower rollout.kv_cache_gb"),
        ({"policy": {"device": "cuda"}, "placement": {"layout": "colocated", "labels": {"policy": ON_DEMAND,
          "rollout": SPOT}}}, ClusterShape((Node(cpus=2, gpus=2, labels=ON_DEMAND),)),
         "colocated ranks and engines share nodes, but policy wants ray.io/market-type=on-demand"),
        ({}, ClusterShape(tuple(Node(cpus=0.4) for _ in range(9)), max_nodes=2), "at most 2 nodes at once"),
    ],
)  # fmt: skip
def test_what_is_short_is_said_in_words(sections, shape, words):
    plan = make_plan(build(sections), shape)
    assert words in "\n".join(plan.shortages)
    assert f"SHORT: {plan.shortages[0]}" in plan.table()
    with pytest.raises(PlacementError):
        plan.require()


def test_many_equal_actors_that_nothing_holds_are_one_sentence():
    sections = {"rollout": {"replicas": 6, "min_replicas": 6, "max_replicas": 6, "kv_cache_gb": 40}}
    assert len(make_plan(build(sections), LAPTOP).shortages) == 1


def test_the_table_has_role_count_bundles_and_nodes():
    table = make_plan(config("disaggregated"), TWO_BOXES, KNOWN["Qwen2.5-7B"]).table()
    rows = {line.split()[0]: line.split() for line in table.splitlines() if line.startswith("  ")}
    header = "role actors CPU each GPU each strategy bundles nodes"
    assert " ".join(table.splitlines()[2].split()) == header
    policy = next(line.split() for line in table.splitlines() if line.startswith("  policy"))
    assert (policy[1], policy[4], policy[5], policy[6]) == ("4", "PACK", "0-3", "a")
    for term in ("weights", "gradients", "optimiser", "reference", "KV cache", "object store"):
        assert term in table
    assert "rollout" in rows


# -- memory ---------------------------------------------------------------------------------------------------


def test_the_memory_of_a_rank_is_16_bytes_a_parameter_over_the_ranks():
    model = KNOWN["Qwen2.5-7B"]
    plan = make_plan(config("disaggregated"), GPU_BOX, model)
    gpu = plan.role("policy").memory.gpu
    assert gpu["weights"] + gpu["gradients"] + gpu["optimiser"] == pytest.approx(16 * model.num_params / 4 / 1e9)


def test_cpu_offload_moves_the_shards_to_the_host():
    sections = {"policy": {"device": "cuda", "ranks": 4, "cpu_offload": True}, "placement": {"layout": "disaggregated"}}
    policy = make_plan(build(sections), GPU_BOX, KNOWN["Qwen2.5-7B"]).role("policy")
    assert {"weights", "gradients", "optimiser", "reference"} <= set(policy.memory.host)
    assert not {"weights", "optimiser"} & set(policy.memory.gpu)


def test_the_estimate_of_a_rank_is_near_what_was_measured_on_cpu():
    """docs/results.md: 8.2 GB at the peak with 1,024 tokens a micro-batch, 1.2 GB more with twice as many."""
    policy = {"autocast": "bfloat16", "micro_batch_tokens": 1024}
    sections = {"policy": policy, "algorithm": {"kl_coef": 0.0}}
    rank = make_plan(build(sections), LAPTOP, SMOLLM2).role("policy").memory.host
    assert sum(rank.values()) == pytest.approx(8.2, rel=0.2)
    wider = make_plan(build({**sections, "policy": {**policy, "micro_batch_tokens": 2048}}), LAPTOP, SMOLLM2)
    assert sum(wider.role("policy").memory.host.values()) == pytest.approx(9.4, rel=0.2)


SMOLLM2 = ModelShape(num_params=134_515_008, layers=30, hidden=576, intermediate=1536, vocab=49152)


def test_a_policy_that_no_gpu_holds_is_short_but_what_only_a_micro_batch_takes_is_a_note():
    small = ClusterShape((Node(cpus=64, gpus=8, gpu_memory_gb=24),))
    plan = make_plan(config("disaggregated"), small, KNOWN["Qwen2.5-7B"])
    assert any("policy: about 38.1 GB in GPU memory, where 24.0 GB are" in words for words in plan.shortages)
    large = make_plan(config("disaggregated"), ClusterShape((Node(cpus=64, gpus=8, gpu_memory_gb=40),)),
                      KNOWN["Qwen2.5-7B"]).require()  # fmt: skip
    assert any("policy: about" in note and "a GPU has 40 GB" in note for note in large.notes)


def test_an_engine_whose_weights_are_larger_than_its_share_of_a_gpu_is_short():
    small = ClusterShape((Node(cpus=64, gpus=8, gpu_memory_gb=16),))
    sections = {"policy": {"device": "cuda", "ranks": 7}, "placement": {"layout": "disaggregated"}}
    words = make_plan(build(sections), small, KNOWN["Qwen2.5-7B"]).shortages
    assert any("rollout: about 15.2 GB in GPU memory, where 13.6 GB" in sentence for sentence in words)


def test_gpus_that_a_role_does_not_land_on_are_no_measure_for_it():
    """As in configs/cluster/aws.yaml: large GPUs for ranks, smaller ones for engines."""
    nodes = (Node(cpus=64, gpus=8, gpu_memory_gb=80, name="large"), *(Node(cpus=16, gpus=1, gpu_memory_gb=48),) * 4)
    policy = {"device": "cuda", "ranks": 8, "dtype": "bfloat16", "micro_batch_tokens": 16384}
    sections = {
        "policy": {**policy, "activation_checkpointing": True},
        "rollout": {"replicas": 4, "max_replicas": 4},
        "placement": {"layout": "disaggregated"},
    }
    plan = make_plan(build(sections), ClusterShape(nodes), KNOWN["Qwen2.5-7B"]).require()
    assert {plan.node_of("policy", i).name for i in range(8)} == {"large"}
    assert plan.role("policy").memory.gpu_gb > 48
    assert not any("of GPU memory estimated" in note for note in plan.notes)
    assert plan.role("rollout").memory.gpu_gb == pytest.approx(0.85 * 48)


def colocated_7b(gpu_gb: float, share: float, ranks: int = 4, **policy) -> Plan:
    sections = {
        "policy": {"device": "cuda", "ranks": ranks, "dtype": "bfloat16", **policy},
        "rollout": {"replicas": ranks, "max_replicas": ranks, "gpu_memory_utilization": share},
        "placement": {"layout": "colocated"},
    }
    shape = ClusterShape((Node(cpus=64, gpus=8, memory_gb=2000, gpu_memory_gb=gpu_gb),))
    return make_plan(build(sections), shape, KNOWN["Qwen2.5-7B"])


def test_a_rank_and_an_engine_that_no_gpu_holds_together_are_short_with_the_share_that_fits():
    (words,) = colocated_7b(80, 0.85).shortages
    rests = 7.616e9 * (4 + 8 + 2) / 4 / 1e9  # weights, moments, reference; gradients are gone
    assert f"a rank keeps about {rests:.1f} GB while rollout.gpu_memory_utilization=0.85 takes 68.0 GB" in words
    assert "Lower it to 0.66, or set policy.cpu_offload=true" in words
    assert not colocated_7b(80, 0.66).shortages
    assert not colocated_7b(80, 0.85, cpu_offload=True).shortages


def test_where_no_share_leaves_room_for_the_engine_s_weights_more_ranks_are_asked_for():
    assert any("takes 34.0 GB. Raise policy.ranks" in words for words in colocated_7b(40, 0.85).shortages)


def test_the_note_of_a_shared_gpu_adds_what_each_side_has_and_a_sleeping_engine_keeps():
    plan = colocated_7b(80, 0.6)
    assert any("a rank has about 26.7 GB while its engine has 48.0 GB" in note for note in plan.notes)
    assert plan.role("rollout").memory.host["sleeping weights"] == pytest.approx(15.2, rel=0.01)
    need = plan.role("policy").memory.gpu_gb + SLEEPING_GB
    assert not any("of GPU memory estimated" in note for note in colocated_7b(need + 1, 0.3).notes)
    assert any(f"about {need:.0f} GB of GPU memory" in note for note in colocated_7b(need - 1, 0.3).notes)


def test_more_memory_than_the_nodes_have_is_noted():
    tight = ClusterShape((Node(cpus=2, memory_gb=3.1),))
    assert any("the nodes have 3.1 GB" in note for note in make_plan(config(), tight).notes)


def test_labels_are_words_not_expressions():
    with pytest.raises(ConfigError, match=r"placement\.labels"):
        build({"placement": {"labels": {"policy": {"a": "in(x,y)"}}}})
