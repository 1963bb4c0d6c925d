"""A plan becomes real bundles on a real local Ray; a wait says what is missing and who holds it."""

import asyncio
import logging
import subprocess
import sys

import pytest
import ray

from mempo_ray.config.load import build
from mempo_ray.errors import PlacementError
from mempo_ray.placement import reserve as reserve_module
from mempo_ray.placement.plan import make_plan
from mempo_ray.placement.ray_state import largest_shape
from mempo_ray.placement.reserve import reserve

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _cluster():
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, namespace="first-run"
    )
    yield
    ray.shutdown()


@ray.remote
class Place:
    def bundle(self) -> str | None:
        return ray.get_runtime_context().get_placement_group_id()


def plan_of(num_cpus: float = 1.0, **sections):
    return make_plan(build({"placement": {"num_cpus": num_cpus}, **sections}), largest_shape())


async def test_every_actor_of_the_plan_starts_in_its_bundle_and_two_runs_fit_on_two_cpus():
    plans = [plan_of().require() for _ in range(2)]
    reservations = [await reserve(plan, 30) for plan in plans]
    for reservation in reservations:
        actors = {
            (role.name, i): Place.options(**reservation.options(role.name, i)).remote()
            for role in reservation.plan.roles
            for i in range(role.count)
        }
        places = ray.get([a.bundle.remote() for a in actors.values()], timeout=120)
        groups = [
            reservation.groups[reservation.plan.groups[reservation.plan.find(*actor)[0]].name] for actor in actors
        ]
        assert places == [group.id.hex() for group in groups]
        for actor in actors.values():
            ray.kill(actor)
    for reservation in reservations:
        reservation.release()


async def test_a_busy_cluster_says_who_holds_it_at_once_and_ends_the_wait_with_the_same_words(monkeypatch, caplog):
    monkeypatch.setattr(reserve_module, "FIRST_WORDS_S", 0.3)
    held = await reserve(plan_of(1.9), 30)
    other = Place.options(name="greedy", num_cpus=0.1).remote()
    ray.get(other.bundle.remote(), timeout=60)
    caplog.clear()  # on a busy machine the first run has had to wait, too
    with caplog.at_level(logging.WARNING), pytest.raises(PlacementError) as caught:
        await reserve(plan_of(), 1.5)
    held.release()
    ray.kill(other)
    said = [record.getMessage() for record in caplog.records if "waiting for the cluster" in record.getMessage()]
    for words in (said[0], str(caught.value)):
        assert "policy[0], batch_executor[0], rollout[0]" in words
        assert "asked for 2 × (0.3076 CPU), 3 × (0.0769 CPU), 1 × (0.1538 CPU)" in words
        assert "free now: " in words
        assert "held by run first-run (1.89" in words
        assert "actor greedy of first-run (0.1 CPU)" in words
    assert str(caught.value).startswith("placement.timeout_s: after 1.5 s the cluster has not given")


async def test_what_only_fits_once_nodes_are_added_waits_and_says_what_was_asked_for(tmp_path):
    file = tmp_path / "shape.yaml"
    file.write_text("nodes: [{cpus: 2}, {count: 2, cpus: 8, gpus: 4}]")
    sections = {"policy": {"device": "cuda", "ranks": 2}, "placement": {"layout": "disaggregated"}}
    plan = make_plan(build(sections), largest_shape(str(file))).require()
    with pytest.raises(PlacementError) as caught:
        await reserve(plan, 1.0)
    assert "policy[0], policy[1], batch_executor[0], rollout[0] have no place" in str(caught.value)
    assert "asked for 3 × (1 GPU, 0." in str(caught.value)


def test_the_file_of_an_autoscaler_on_this_machine_is_the_largest_shape_of_its_cluster_only(tmp_path):
    file = tmp_path / "cluster.yaml"
    types = "{h: {resources: {}}, g: {resources: {CPU: 8, GPU: 4}}}"
    file.write_text(f"{{max_workers: 3, head_node_type: h, available_node_types: {types}}}")
    for address, gpus in (("127.0.0.1:1", 0), (ray.get_runtime_context().gcs_address, 12)):
        words = [f"--gcs-address={address}", f"--autoscaling-config={file}"]
        with subprocess.Popen([sys.executable, "-c", "input()", *words], stdin=subprocess.PIPE) as monitor:
            shape = largest_shape()
            monitor.kill()
        assert (shape.gpus, shape.nodes[0].cpus) == (gpus, 2)  # the head is up: what it has is known


async def test_two_reservations_that_hold_half_each_do_not_wait_for_each_other_for_ever(monkeypatch):
    monkeypatch.setattr(reserve_module, "GRACE_S", 0.3)
    monkeypatch.setattr(reserve_module, "GIVE_WAY_S", 1.0)
    plan = plan_of(1.4).require()

    async def hold() -> None:
        (await reserve(plan, 60)).release()

    await asyncio.gather(*(hold() for _ in range(3)))


async def test_a_replica_of_its_own_group_is_given_back_and_may_come_again_without_one():
    pool = {"rollout": {"replicas": 2, "min_replicas": 2, "max_replicas": 2}}
    reservation = await reserve(plan_of(**pool), 30)
    before = ray.available_resources()["CPU"]
    assert not reservation.give_back("policy", 0)  # shares a group
    assert reservation.give_back("rollout", 1)
    assert not reservation.give_back("rollout", 1)
    assert not reservation.give_back("rollout", 2)  # was never reserved
    async with asyncio.timeout(30):
        while ray.available_resources()["CPU"] <= before:  # Ray removes groups in the background
            await asyncio.sleep(0.1)
    for index in (1, 2):
        assert reservation.options("rollout", index) == {
            "num_cpus": reservation.plan.role("rollout").cpus,
            "num_gpus": 0,
            "scheduling_strategy": "SPREAD",
        }
    reservation.release()


async def test_a_role_that_is_not_in_the_plan_is_refused():
    reservation = await reserve(plan_of(), 30)
    with pytest.raises(KeyError, match="judge"):
        reservation.options("judge", 0)
    reservation.release()


async def test_who_stops_waiting_gives_everything_back():
    held = await reserve(plan_of(2), 30)
    waiting = asyncio.create_task(reserve(plan_of(), 30))
    await asyncio.sleep(0)  # it has asked
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    held.release()
    (await reserve(plan_of(2), 30)).release()
