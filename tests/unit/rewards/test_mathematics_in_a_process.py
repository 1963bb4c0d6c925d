"""An expression on which sympy never ends, in a worker with rows of several data sources."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from mempo_ray.actors.reward import RewardManagerWorker
from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Scored, TrajectoryBatch, Unscored
from tests.fakes.trajectories import TASK, trajectory, turn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ROWS = [
    ("lighteval/MATH", r"\frac42", Scored),
    ("aime24", "9^{9^{9^{9}}}", Unscored),
    ("openai/gsm8k", "2", Scored),
    ("math_dapo", "2", Scored),
]


def payload(data_source: str, answer: str) -> TrajectoryBatch:
    task = dataclasses.replace(TASK, golds=(("2",),), data_source=data_source)
    turns = [turn(text=f"<answer>{answer}</answer>")]
    return TrajectoryBatch.from_trajectories([trajectory(answer, task=task, turns=turns)])


async def test_it_is_a_timeout_of_its_process_and_everybody_else_has_the_right_score():
    worker = RewardManagerWorker(Reward(timeout_s=4, processes=1))
    try:
        scores = await asyncio.gather(*(worker.score(payload(source, answer)) for source, answer, _ in ROWS))
    finally:
        await worker.close()
    assert [type(score) for score in scores] == [kind for _, _, kind in ROWS]
    assert {score.kind for score in scores if isinstance(score, Unscored)} == {"timeout"}
    assert {score.score for score in scores if isinstance(score, Scored)} == {1.0}
