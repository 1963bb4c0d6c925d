"""Three nodes of logical GPUs: the bundles of each layout land where the plan says.

Strategies are preferences, and Ray breaks ties by itself: where two nodes are equal, it is the numbers that must agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import ray
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import ClusterConfig
from ray.util.placement_group import placement_group_table

from mempo_ray.config.load import build
from mempo_ray.placement.plan import Plan, make_plan
from mempo_ray.placement.ray_state import NODE_GROUP, largest_shape
from mempo_ray.placement.reserve import Reservation, reserve
from mempo_ray.placement.shape import MAX_NODES

pytestmark = pytest.mark.slow

SPOT, SURE = {"ray.io/market-type": "spot"}, {"ray.io/market-type": "on-demand"}
NODES = {
    "head": {"num_cpus": 4, "num_gpus": 0, "labels": SURE},
    "sure": {"num_cpus": 4, "num_gpus": 4, "labels": SURE},
    "spot": {"num_cpus": 4, "num_gpus": 4, "labels": {**SPOT, NODE_GROUP: "spot"}},
}
WORKERS = {"reward": {"workers": 3}, "agent": {"workers": 3}, "retrieval": {"replicas": 2}}


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    cluster = Cluster()
    for name, resources in NODES.items():
        cluster.add_node(node_name=name, include_dashboard=False, object_store_memory=80_000_000, **resources)
    ray.init(address=cluster.address, log_to_driver=False)
    yield
    ray.shutdown()
    cluster.shutdown()


def landed(reservation: Reservation) -> dict[tuple[str, int], str]:
    """(role, index) → name of the node that Ray has put its bundle on."""
    names = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
    found = {}
    for group in reservation.plan.groups:
        nodes = placement_group_table(reservation.groups[group.name])["bundles_to_node_id"]
        for position, bundle in enumerate(group.bundles):
            found |= dict.fromkeys(bundle.tenants, names[nodes[position]])
    return found


def planned(plan: Plan) -> dict[tuple[str, int], str]:
    return {(r.name, i): plan.node_of(r.name, i).name for r in plan.roles for i in range(r.count)}


def spread(places: dict[tuple[str, int], str], role: str) -> list[int]:
    """How many of a role's actors are on each node that has one."""
    return sorted(Counter(node for (name, _), node in places.items() if name == role).values())


def plan_of(layout: str, **sections: dict) -> Plan:
    placement = {"layout": layout, "num_cpus": 3, **sections.pop("placement", {})}
    policy = {"device": "cpu" if layout == "cpu" else "cuda", **sections.pop("policy", {})}
    config = build({**WORKERS, **sections, "policy": policy, "placement": placement})
    return make_plan(config, largest_shape()).require()


async def test_disaggregated_with_labels_ranks_on_demand_and_tensor_parallel_engines_on_spot():
    plan = plan_of(
        "disaggregated",
        policy={"ranks": 4},
        rollout={"replicas": 2, "min_replicas": 1, "max_replicas": 2, "tensor_parallel": 2},
        placement={"labels": {"policy": SURE, "rollout": SPOT}},
    )
    reservation = await reserve(plan, 60)
    places, words = landed(reservation), planned(plan)
    reservation.release()
    for actor in [*(("policy", i) for i in range(4)), ("rollout", 0), ("rollout", 1)]:
        assert places[actor] == words[actor]
    assert {places["policy", i] for i in range(4)} == {"sure"}
    assert places["rollout", 0] == places["rollout", 1] == "spot"
    for role in ("reward", "agent_loop", "retrieval"):
        assert spread(places, role) == spread(words, role) == [1] * plan.role(role).count


async def test_colocated_engines_share_the_bundles_of_their_ranks_on_one_node():
    plan = plan_of("colocated", policy={"ranks": 4}, rollout={"replicas": 4, "max_replicas": 4})
    reservation = await reserve(plan, 60)
    places, words = landed(reservation), planned(plan)
    reservation.release()
    assert {reservation.plan.find("policy", i) == reservation.plan.find("rollout", i) for i in range(4)} == {True}
    assert spread(places, "policy") == spread(words, "policy") == [4]
    assert spread(places, "reward") == spread(words, "reward") == [1, 1, 1]


async def test_a_wide_engine_gets_a_node_to_itself_and_the_ranks_another():
    plan = plan_of("disaggregated", policy={"ranks": 2}, rollout={"tensor_parallel": 4})
    reservation = await reserve(plan, 60)
    places, words = landed(reservation), planned(plan)
    reservation.release()
    assert places["rollout", 0] != places["policy", 0] == places["policy", 1]
    assert words["rollout", 0] != words["policy", 0] == words["policy", 1]


async def test_cpu_only_ranks_are_packed_and_workers_go_around():
    plan = plan_of("cpu", policy={"ranks": 2}, rollout={"replicas": 2, "min_replicas": 2, "max_replicas": 2})
    reservation = await reserve(plan, 60)
    places, words = landed(reservation), planned(plan)
    reservation.release()
    for role in ("policy", "retrieval", "reward", "agent_loop"):  # engines are apart: Ray takes what is emptiest then
        assert spread(places, role) == spread(words, role)
    assert places["policy", 0] == places["policy", 1] == places["batch_executor", 0]


@ray.remote
class Place:
    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()


async def test_an_elastic_replica_without_a_bundle_still_lands_on_a_node_with_its_labels():
    plan = plan_of(
        "disaggregated",
        rollout={"replicas": 1, "min_replicas": 1, "max_replicas": 2},
        placement={"labels": {"rollout": SPOT}},
    )
    reservation = await reserve(plan, 60)
    options = reservation.options("rollout", 1)
    assert options["label_selector"] == SPOT
    later = Place.options(**options).remote()
    node = ray.get(later.node.remote(), timeout=60)
    assert next(info["NodeName"] for info in ray.nodes() if info["NodeID"] == node) == "spot"
    ray.kill(later)
    reservation.release()


def test_node_types_that_an_autoscaler_has_told_the_cluster_of_are_the_largest_shape():
    """Last: the cluster remembers them. Labels of a type are those of a node of it that is up, as nobody tells them."""
    node_types = [
        {"name": "spot", "max_count": 3, "resources": {"CPU": 8, "GPU": 2, "memory": 64 * 10**9}},
        {"name": "new", "max_count": 1, "resources": {"CPU": 16, "GPU": 8, "accelerator_type:H100": 1}},
        {"name": "any number", "max_count": -1, "resources": {"CPU": 2}},
        {"name": "none", "max_count": 0, "resources": {"CPU": 1000}},
    ]
    told = ClusterConfig(node_group_configs=node_types).SerializeToString()
    GcsClient(address=ray.get_runtime_context().gcs_address).report_cluster_config(told)
    shape = largest_shape("no/such/file.yaml")
    assert shape.source == "the autoscaler's node types"
    by_type = {name: [n for n in shape.nodes if n.name.startswith(name)] for name in ("spot", "new", "any", "none")}
    assert {name: len(nodes) for name, nodes in by_type.items()} == {"spot": 3, "new": 1, "any": MAX_NODES, "none": 0}
    spot, new = by_type["spot"][0], by_type["new"][0]
    assert (spot.cpus, spot.gpus, spot.memory_gb, spot.has(SPOT)) == (8, 2, 64, True)
    assert (new.gpus, new.gpu_memory_gb, new.has(SPOT)) == (8, 80, False)
