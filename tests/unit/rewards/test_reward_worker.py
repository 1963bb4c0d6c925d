"""The reward worker as a plain class: nothing blocks anything, and what is late is a timeout."""

from __future__ import annotations

import asyncio
import threading

import pytest

from mempo_ray.actors import reward
from mempo_ray.actors.reward import RewardManagerWorker
from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Scored, TrajectoryBatch, Unscored
from mempo_ray.rewards.registry import register_scorer
from tests.fakes.trajectories import trajectory

release = threading.Event()


@register_scorer("test-org/hangs")
def hangs(response, settings):
    if response.answer == "hang":
        release.wait(20)
    return 1.0


def payload(answer: str) -> TrajectoryBatch:
    return TrajectoryBatch.from_trajectories([trajectory(answer)])


@pytest.fixture(autouse=True)
def _release_threads():
    release.clear()
    yield
    release.set()


async def test_a_hanging_scorer_times_out_unscored_and_blocks_nobody():
    worker = RewardManagerWorker(Reward(scorer="test-org/hangs", timeout_s=0.05))
    answers = ["hang", "fine"] * (2 * reward.NUM_THREADS)  # twice as many as there are places
    scores = await asyncio.gather(*(worker.score(payload(answer)) for answer in answers))
    assert all(isinstance(s, Unscored) and s.kind == "timeout" for s in scores[::2])
    assert scores[1::2] == [Scored(1.0)] * (2 * reward.NUM_THREADS)
    await worker.close()


async def test_a_payload_that_is_not_one_trajectory_is_unscored():
    worker = RewardManagerWorker(Reward())
    empty = TrajectoryBatch.from_trajectories([])
    assert (await worker.score(empty)).kind == "data"


def test_an_unknown_plugin_ends_the_start():
    with pytest.raises(ModuleNotFoundError, match="no_such_plugin"):
        RewardManagerWorker(Reward(), plugins=["no_such_plugin"])
