"""What every `ports.Rewards` does: the fake, and a RewardManagerWorker's plain class with its scorers in threads, in
processes, and in processes that score lists."""

from __future__ import annotations

import asyncio

import pytest

from mempo_ray.actors.reward import RewardManagerWorker
from mempo_ray.config.schema import Reward
from mempo_ray.contracts import PayloadRef, Score, Scored, TrajectoryBatch, Unscored
from tests.fakes import hostile_scorers
from tests.fakes.rewards import FakeRewards
from tests.fakes.trajectories import trajectory

ANSWERS = {"q/0": "1", "q/1": "0", "q/2": "raises"}
"""What the trajectory behind each payload answered: its score, or that its scorer raises."""

SETTINGS = {
    "thread": Reward(scorer="test-org/trusted"),
    "process": Reward(scorer="test-org/hostile"),
    "batch": Reward(scorer="test-org/hostile", manager="batch"),
}


class WorkerRewards:
    """The worker under the port's name, as `RayRewards` has it over Ray: a payload is its own handle."""

    def __init__(self, worker: RewardManagerWorker) -> None:
        self._worker = worker

    async def score(self, payload: PayloadRef) -> Score:
        return await self._worker.score(payload.handle)


def payload(key: str) -> PayloadRef:
    return PayloadRef(key, TrajectoryBatch.from_trajectories([trajectory(ANSWERS[key])]))


@pytest.fixture(params=["fake", *SETTINGS])
async def rewards(request):
    if request.param == "fake":
        yield FakeRewards(q_0=1.0, q_1=0.0, q_2=Unscored("no such reference", "scorer_error"))
        return
    worker = RewardManagerWorker(SETTINGS[request.param], [hostile_scorers.__name__])
    yield WorkerRewards(worker)
    await worker.close()


async def test_a_trajectory_has_a_score_of_its_own(rewards):
    right, wrong = [await rewards.score(payload(key)) for key in ("q/0", "q/1")]
    assert isinstance(right, Scored)
    assert isinstance(wrong, Scored)
    assert (right.score, wrong.score) == (1.0, 0.0)


async def test_a_scorer_that_fails_is_a_value_with_its_reason_and_no_zero(rewards):
    broken = await rewards.score(payload("q/2"))
    assert isinstance(broken, Unscored)
    assert broken.kind == "scorer_error"
    assert "no such reference" in broken.reason


async def test_scores_side_by_side_do_not_mix(rewards):
    scores = await asyncio.gather(*(rewards.score(payload(key)) for key in list(ANSWERS) * 10))
    assert [type(score) for score in scores] == [Scored, Scored, Unscored] * 10
    assert [score.score for score in scores if isinstance(score, Scored)] == [1.0, 0.0] * 10
