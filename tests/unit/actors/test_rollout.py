"""The states of a RolloutActor, as a plain class over the scripted engine."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from mempo_ray.actors.rollout import RolloutActor
from mempo_ray.config.schema import Rollout, WeightSync
from mempo_ray.contracts import WeightManifest, WeightProof
from mempo_ray.errors import DeadlineExceeded, EngineFailed
from mempo_ray.generation.fake_engine import FakeEngine
from mempo_ray.ports import GenerateRequest

TURN = GenerateRequest(np.array([4, 5], np.int32), seed=0, max_tokens=8, group="q")
MANIFEST = WeightManifest(version=1, uri="", proof=WeightProof((4, 5), (-1.0,)))


def rollout_actor(**options) -> tuple[RolloutActor, FakeEngine]:
    rollout = Rollout(engine="fake", **options)
    engine = FakeEngine("rollout-0", lambda request: [7, 1], rollout)
    return RolloutActor("rollout-0", "", rollout, WeightSync(), 1, "", engine=engine), engine


async def test_an_actor_goes_from_starting_over_stale_to_serving():
    actor, _ = rollout_actor()
    assert (await actor.status()).state == "starting"
    assert (await actor.start()).state == "stale"
    status = await actor.start(MANIFEST)
    assert (status.state, status.weight_version, status.name) == ("serving", 1, "rollout-0")
    assert (await actor.generate(TURN)).output_ids.tolist() == [7, 1]


async def test_draining_finishes_what_is_in_flight_and_takes_nothing_new():
    actor, engine = rollout_actor()
    await actor.start(MANIFEST)
    await engine.pause()
    running = asyncio.create_task(actor.generate(TURN))
    await asyncio.sleep(0)
    draining = asyncio.create_task(actor.drain())
    await asyncio.sleep(0)
    assert ((await actor.status()).state, (await actor.status()).num_in_flight) == ("draining", 1)
    with pytest.raises(EngineFailed, match="draining"):
        await actor.generate(TURN)
    await engine.resume()
    assert (await running).finish_reason == "stop"
    assert (await draining).num_in_flight == 0


async def test_draining_ends_at_its_deadline_and_fails_what_is_left():
    actor, engine = rollout_actor(request_timeout_s=0.05)
    await actor.start(MANIFEST)
    await engine.pause()
    running = asyncio.create_task(actor.generate(TURN))
    await asyncio.sleep(0)
    with pytest.raises(DeadlineExceeded, match=r"1 requests left after 0\.05 s"):
        await actor.drain()
    with pytest.raises(EngineFailed):
        await running


async def test_a_dead_engine_shows_in_the_status_and_fails_its_turns():
    actor, engine = rollout_actor()
    await actor.start(MANIFEST)
    await engine.pause()
    running = asyncio.create_task(actor.generate(TURN))
    await asyncio.sleep(0)
    await engine.kill()
    with pytest.raises(EngineFailed):
        await running
    assert (await actor.status()).state == "dead"


def test_an_actor_names_itself():
    actor, _ = rollout_actor()
    assert repr(actor) == "RolloutActor(rollout-0)"
