"""Permits: never more in flight than allowed, never closer together; one that is lost comes back."""

from __future__ import annotations

import itertools
import random

import pytest

from mempo_ray.actors.limiter import JudgeLimiter
from mempo_ray.config.schema import Judge, Style
from mempo_ray.errors import DeadlineExceeded
from mempo_ray.rewards.styles.limits import Limits, Permit, Wait


def test_requests_start_at_least_an_interval_apart():
    limits = Limits(requests_per_s=10, concurrency=100, lease_s=60)
    assert isinstance(limits.take(0.0), Permit)
    assert limits.take(0.04) == Wait(pytest.approx(0.06))
    assert isinstance(limits.take(0.1), Permit)


def test_no_more_are_in_flight_than_allowed():
    limits = Limits(requests_per_s=1e9, concurrency=2, lease_s=60)
    first, _ = limits.take(0.0), limits.take(1.0)
    assert limits.take(2.0) == Wait(58.0)  # when the first permit lapses
    assert isinstance(first, Permit)
    limits.give_back(first.number)
    assert isinstance(limits.take(2.0), Permit)


def test_a_permit_whose_holder_died_lapses():
    limits = Limits(requests_per_s=1e9, concurrency=1, lease_s=60)
    limits.take(0.0)
    assert isinstance(limits.take(59.9), Wait)
    assert isinstance(limits.take(60.0), Permit)


def test_nobody_starts_while_the_service_asked_for_quiet():
    limits = Limits(requests_per_s=10, concurrency=10, lease_s=60)
    limits.pause_until(30.0)
    limits.pause_until(20.0)  # a shorter one shortens nothing
    assert limits.take(10.0) == Wait(20.0)
    assert isinstance(limits.take(30.0), Permit)


def test_over_a_random_day_no_limit_is_exceeded():
    rng, now_s, limits = random.Random(0), 0.0, Limits(requests_per_s=7, concurrency=5, lease_s=1e9)
    starts: list[float] = []
    held: list[int] = []
    for _ in range(5000):
        now_s += rng.expovariate(20)
        if held and rng.random() < 0.4:
            limits.give_back(held.pop(rng.randrange(len(held))))
        elif isinstance(decision := limits.take(now_s), Permit):
            starts.append(now_s)
            held.append(decision.number)
        assert len(held) <= 5
    assert min(b - a for a, b in itertools.pairwise(starts)) >= 1 / 7 - 1e-9
    assert len(starts) > 1000


async def test_who_waits_too_long_for_a_permit_is_told_so():
    judge = Judge(url="http://x", template="t", concurrency=1, requests_per_s=1000)
    limiter = JudgeLimiter({"judge": Style(style="api", judge=judge)})
    permit = await limiter.acquire("judge", 10)
    with pytest.raises(DeadlineExceeded, match=r"reward\.styles\.judge\.judge: no permit"):
        await limiter.acquire("judge", 0.01)
    await limiter.release("judge", permit)
    await limiter.acquire("judge", 10)


async def test_a_limiter_that_has_forgotten_its_permits_waits_until_they_have_lapsed():
    now = 0.0
    judge = Judge(url="http://x", template="t", timeout_s=60)
    limiter = JudgeLimiter({"judge": Style(style="api", judge=judge)}, clock=lambda: now)
    limiter.forget()
    now = 59.9
    with pytest.raises(DeadlineExceeded):
        await limiter.acquire("judge", 0.01)
    now = 60.0
    await limiter.acquire("judge", 0.01)
