"""Over random clusters and runs: no node is over-subscribed, and nothing is split or put where it must not be."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mempo_ray.config.load import build
from mempo_ray.placement.fit import Bundle, Group, fit
from mempo_ray.placement.plan import Plan, make_plan
from mempo_ray.placement.shape import ClusterShape, Node

ZONES = st.sampled_from([{}, {"zone": "a"}, {"zone": "b"}])
NODES = st.builds(
    Node,
    cpus=st.sampled_from([0, 0.5, 1, 4, 16]),
    gpus=st.integers(0, 8),
    memory_gb=st.sampled_from([0.0, 2.0, 16.0, 512.0]),
    gpu_memory_gb=st.sampled_from([0.0, 80.0]),
    name=st.just("n"),
    labels=ZONES,
)
SHAPES = st.builds(ClusterShape, st.lists(NODES, min_size=1, max_size=6).map(tuple), max_nodes=st.integers(0, 4))
LAYOUTS = st.sampled_from(["cpu", "colocated", "disaggregated"])


@st.composite
def runs(draw):
    layout, replicas = draw(LAYOUTS), draw(st.integers(1, 4))
    labels = {role: draw(ZONES) for role in ("policy", "rollout", "reward")}
    return build({
        "policy": {"ranks": draw(st.integers(1, 6)), "device": "cpu" if layout == "cpu" else "cuda"},
        "rollout": {"replicas": replicas, "max_replicas": 5, "min_replicas": draw(st.integers(0, replicas)),
                    "tensor_parallel": draw(st.sampled_from([1, 2, 4]))},
        "reward": {"workers": draw(st.integers(1, 4))},
        "agent": {"workers": draw(st.integers(1, 4))},
        "retrieval": {"replicas": draw(st.integers(1, 3)), "device": draw(st.sampled_from(["cpu", "cuda"]))},
        "placement": {"layout": layout, "num_cpus": draw(st.sampled_from([0.5, 1, 6])), "labels": labels},
    })  # fmt: skip


def taken(plan: Plan) -> dict[int, list[float]]:
    """CPUs, GPUs and GB that the plan puts on each node."""
    sums: dict[int, list[float]] = {}
    for group, places in zip(plan.groups, plan.places, strict=True):
        for bundle, node in zip(group.bundles, places, strict=True):
            if node is not None:
                sums[node] = [a + b for a, b in zip(sums.get(node, [0, 0, 0]), bundle.need, strict=True)]
    return sums


@settings(max_examples=150, deadline=None)
@given(runs(), SHAPES)
def test_no_node_is_over_subscribed(config, shape):
    sums = taken(make_plan(config, shape))
    for position, (cpus, gpus, memory_gb) in sums.items():
        node = shape.nodes[position]
        assert cpus <= node.cpus + 1e-6
        assert gpus <= node.gpus
        assert memory_gb <= (node.memory_gb or memory_gb) + 1e-6
    assert len(sums) <= (shape.max_nodes or len(shape.nodes))


@settings(max_examples=150, deadline=None)
@given(runs(), SHAPES)
def test_nothing_is_split_and_labels_hold(config, shape):
    """A bundle has one node: a tensor-parallel engine its GPUs, a colocated rank its engine."""
    plan = make_plan(config, shape)
    layout = config.placement.layout
    for role in plan.roles:
        for index in range(role.count):
            group, position = plan.find(role.name, index)
            bundle = plan.groups[group].bundles[position]
            if role.name == "rollout" and layout == "disaggregated":
                assert bundle.resources["GPU"] == config.rollout.tensor_parallel
            if role.name == "rollout" and layout == "colocated" and index < config.policy.ranks:
                assert ("policy", index) in bundle.tenants
            if (node := plan.node_of(role.name, index)) is not None:
                assert node.has(bundle.labels)
    actors = [tenant for bundle in plan.bundles for tenant in bundle.tenants]
    assert sorted(actors) == sorted((role.name, i) for role in plan.roles for i in range(role.count))


@settings(max_examples=150, deadline=None)
@given(runs(), SHAPES)
def test_a_plan_is_either_whole_or_says_what_is_short(config, shape):
    plan = make_plan(config, shape)
    if not plan.shortages:
        assert all(node is not None for group in plan.places for node in group)


CPU_NODES = ClusterShape(tuple(Node(cpus=4, name=f"n{i}") for i in range(3)))


def worker(number: int, cpus: float = 1, gpus: float = 0, **more) -> Bundle:
    return Bundle({"CPU": cpus} | ({"GPU": gpus} if gpus else {}), (("reward", number),), **more)


def test_spread_goes_around_and_pack_stays_together():
    bundles = tuple(worker(i) for i in range(6))
    (spread,) = fit([Group("w", "SPREAD", bundles)], CPU_NODES)
    (packed,) = fit([Group("w", "PACK", bundles[:4])], CPU_NODES)
    assert sorted(spread) == [0, 0, 1, 1, 2, 2]
    assert len(set(packed)) == 1


def test_groups_of_one_replica_are_spread_like_one_group():
    groups = [Group(f"rollout-{i}", "SPREAD", (worker(i),)) for i in range(3)]
    assert sorted(node for (node,) in fit(groups, CPU_NODES)) == [0, 1, 2]


def test_workers_leave_gpus_to_those_who_need_them():
    shape = ClusterShape((Node(cpus=4, gpus=4), Node(cpus=4)))
    assert fit([Group("w", "SPREAD", (worker(0),)), Group("p", "PACK", (worker(1),))], shape) == ((1,), (1,))


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD"])
def test_a_group_that_would_block_a_larger_one_is_moved_out_of_its_way(strategy):
    """Placed in order, the small bundle takes the only node with room for the large one."""
    shape = ClusterShape((Node(cpus=1, gpus=2), Node(cpus=1, gpus=1)))
    groups = [Group("a", strategy, (worker(0, 0.5, 1), worker(1, 0.5, 1))), Group("b", "PACK", (worker(2, 0.5, 1),))]
    assert None not in [node for group in fit(groups, shape) for node in group]


def test_a_thousand_machines_are_planned_at_once():
    shape = ClusterShape(tuple(Node(cpus=8, gpus=8) for _ in range(1000)))
    groups = [Group("g", "PACK", tuple(worker(i, 0.1, 4) for i in range(400)))]
    (places,) = fit(groups, shape)
    assert len(set(places)) == 200
