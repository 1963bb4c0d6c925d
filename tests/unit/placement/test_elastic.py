"""When a pool grows and shrinks: no cluster, and a clock that the test holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempo_ray.config.schema import Scaling
from mempo_ray.placement.elastic import Bounds, Change, ElasticPolicy, Reading, Replica, num_wanted

SLOTS = 16
BOUNDS = Bounds(min_replicas=1, max_replicas=4, slots=SLOTS, kv_use=0.9)
SCALING = Scaling(up_wait_s=10, down_idle_s=60, cooldown_s=20, min_waiting_share=0.2)


def reading(now: float, *requests: int, kv_use: float = 0.0, joining: int = 0, waiting: int = 0, share: float = 1.0):
    serving = tuple(Replica(f"rollout-{i}", n, kv_use) for i, n in enumerate(requests))
    return Reading(now, serving, joining, waiting, share)


def first_change(policy: ElasticPolicy, *requests: int, until_s: int = 200, since_s: int = 0, **more):
    """(seconds, change) under a load that stays as it is."""
    for now in range(since_s, until_s):
        if (change := policy.decide(reading(now, *requests, **more))) != Change():
            return now, change
    return None


@pytest.mark.parametrize(
    ("state", "wanted"),
    [
        pytest.param(reading(0, 0), 1, id="an idle pool keeps one"),
        pytest.param(reading(0, 16), 1, id="full slots are no queue"),
        pytest.param(reading(0, 17), 2, id="one request too many"),
        pytest.param(reading(0, 10, 10, 10), 2, id="room in others counts"),
        pytest.param(reading(0, 4, waiting=30), 3, id="requests that nobody has count"),
        pytest.param(reading(0, 900), 4, id="never above the largest size"),
        pytest.param(reading(0, 8, 8, kv_use=0.95), 3, id="full caches want another, whatever the slots say"),
        pytest.param(reading(0, 8, 8, kv_use=0.9), 2, id="caches at their limit are enough"),
    ],
)
def test_a_pool_wants_as_many_as_its_load_needs(state, wanted):
    assert num_wanted(state, BOUNDS) == wanted


def test_a_queue_that_lasts_grows_the_pool_to_what_it_needs_at_once():
    at, change = first_change(ElasticPolicy(BOUNDS, SCALING), 40)
    assert (at, change.grow, change.shrink) == (10, 2, ())
    assert "queued for 10 s" in change.because


def test_a_queue_that_ends_in_between_grows_nothing():
    policy = ElasticPolicy(BOUNDS, SCALING)
    assert all(policy.decide(reading(now, 40 if now % 9 else 3)) == Change() for now in range(100))


def test_replicas_that_are_on_their_way_are_not_asked_for_again():
    assert first_change(ElasticPolicy(BOUNDS, SCALING), 40, joining=2) is None


def test_a_pool_that_the_run_hardly_waits_for_does_not_grow():
    assert first_change(ElasticPolicy(BOUNDS, SCALING), 40, share=0.1) is None


def test_idle_replicas_leave_the_last_come_first_and_as_many_stay_as_were_wanted_meanwhile():
    policy = ElasticPolicy(BOUNDS, SCALING)
    for now in range(60):
        assert policy.decide(reading(now, 0, 5, 1 if now != 30 else 20, 2)) == Change()
    assert policy.decide(reading(60, 0, 5, 1, 2)).shrink == ("rollout-2", "rollout-3")


def test_nobody_leaves_while_somebody_joins():
    assert first_change(ElasticPolicy(BOUNDS, SCALING), 0, 0, joining=1) is None


def test_after_a_change_the_pool_rests():
    policy = ElasticPolicy(BOUNDS, SCALING)
    at, _ = first_change(policy, 40)
    again, change = first_change(policy, 60, 60, 60, since_s=at + 1)
    assert (again - at, change.grow) == (20, 1)


def test_a_pool_below_its_least_size_is_filled_without_waiting():
    bounds = Bounds(min_replicas=2, max_replicas=4, slots=SLOTS)
    assert ElasticPolicy(bounds, SCALING).decide(reading(0, 0)).grow == 1


class Pool:
    """A pool that obeys; what it is asked for serves `start_s` later."""

    def __init__(self, bounds: Bounds, start_s: int) -> None:
        self.policy, self.start_s = ElasticPolicy(bounds, SCALING), start_s
        self.joining: list[int] = []  # when each will serve
        self.names, self.made = [f"rollout-{i}" for i in range(bounds.least)], bounds.least
        self.changes: list[tuple[int, Change]] = []

    @property
    def size(self) -> int:
        return len(self.names) + len(self.joining)

    def tick(self, now: int, num_requests: int) -> None:
        for _ in [at for at in self.joining if at <= now]:
            self.names.append(f"rollout-{self.made}")
            self.made += 1
        self.joining = [at for at in self.joining if at > now]
        share, rest = divmod(num_requests, len(self.names))
        serving = tuple(Replica(name, share + (i < rest)) for i, name in enumerate(self.names))
        change = self.policy.decide(Reading(now, serving, len(self.joining)))
        self.joining += [now + self.start_s] * change.grow
        self.names = [name for name in self.names if name not in change.shrink]
        if change != Change():
            self.changes.append((now, change))


bounds_of_pools = st.builds(
    lambda least, more: Bounds(least, least + more, SLOTS), st.integers(0, 3), st.integers(1, 6)
)
loads = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 120)), min_size=1, max_size=12)  # (requests, seconds)


@given(bounds_of_pools, loads, st.integers(0, 90))
def test_whatever_the_load_a_pool_stays_within_its_bounds_and_does_not_flap(bounds, loads, start_s):
    pool = Pool(bounds, start_s)
    now = 0
    for num_requests, seconds in loads:
        for _ in range(seconds):
            pool.tick(now, num_requests)
            assert bounds.least <= pool.size <= bounds.max_replicas
            now += 1
    for (before, change), (after, next_change) in zip(pool.changes, pool.changes[1:], strict=False):
        assert after - before >= SCALING.cooldown_s
        if change.grow and next_change.shrink:
            assert after - before >= SCALING.down_idle_s
    assert all(not (change.grow and change.shrink) for _, change in pool.changes)


@given(bounds_of_pools, st.integers(0, 300), st.integers(0, 300), st.integers(0, 90))
def test_a_lasting_load_is_met_in_bounded_time(bounds, before, load, start_s):
    """Rest, the longer of the two waits, and a start: then the pool has the size that the load wants."""
    pool = Pool(bounds, start_s)
    for now in range(200):
        pool.tick(now, before)
    bound_s = int(SCALING.cooldown_s + max(SCALING.up_wait_s, SCALING.down_idle_s) + start_s) + 2
    for now in range(200, 200 + bound_s):
        pool.tick(now, load)
    wanted = num_wanted(Reading(0, (Replica("all", load),)), bounds)
    assert len(pool.names) == wanted


def test_the_decision_is_a_value():
    assert ElasticPolicy(BOUNDS, SCALING).decide(reading(0, 3)) == Change(grow=0, shrink=(), because="")
