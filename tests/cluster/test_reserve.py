"""A plan becomes real bundles on a real local Ray."""

import asyncio

import pytest
import ray

from mempo_ray.config.load import build
from mempo_ray.errors import PlacementError
from mempo_ray.placement.plan import make_plan
from mempo_ray.placement.reserve import cluster_shape, reserve

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _cluster():
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
    yield
    ray.shutdown()


@ray.remote
class Place:
    def bundle(self) -> str | None:
        return ray.get_runtime_context().get_placement_group_id()


async def test_every_actor_of_the_plan_starts_in_its_bundle_and_two_runs_fit_on_two_cpus():
    plans = [make_plan(build({}), cluster_shape()).require() for _ in range(2)]
    reservations = [await reserve(plan, 30) for plan in plans]
    for reservation in reservations:
        actors = [
            Place.options(**reservation.options(role.name, i)).remote()
            for role in reservation.plan.roles
            for i in range(role.count)
        ]
        places = ray.get([a.bundle.remote() for a in actors], timeout=120)
        assert places == [reservation.group.id.hex()] * len(actors)
        for actor in actors:
            ray.kill(actor)
    for reservation in reservations:
        reservation.release()


async def test_a_busy_cluster_ends_the_wait_with_what_is_not_free():
    held = await reserve(make_plan(build({"placement": {"num_cpus": 2}}), cluster_shape()), 30)
    with pytest.raises(PlacementError, match=r"CPU 0\S* free of 0\.99"):
        await reserve(make_plan(build({}), cluster_shape()), 0.5)
    held.release()


async def test_an_actor_that_is_not_in_the_plan_is_refused():
    reservation = await reserve(make_plan(build({}), cluster_shape()), 30)
    with pytest.raises(KeyError, match="rollout"):
        reservation.options("rollout", 5)
    reservation.release()


async def test_who_stops_waiting_gives_everything_back():
    held = await reserve(make_plan(build({"placement": {"num_cpus": 2}}), cluster_shape()), 30)
    waiting = asyncio.create_task(reserve(make_plan(build({}), cluster_shape()), 30))
    await asyncio.sleep(0)  # it has asked
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    held.release()
    (await reserve(make_plan(build({"placement": {"num_cpus": 2}}), cluster_shape()), 30)).release()
