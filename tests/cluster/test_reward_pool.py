"""The reward worker as a Ray actor: payloads arrive by reference, a hanging scorer blocks nobody."""

from __future__ import annotations

import pytest
import ray

from mempo_ray.actors.reward import RewardManagerActor
from mempo_ray.config.schema import CustomFunction, Reward
from mempo_ray.contracts import Scored, TrajectoryBatch, Unscored
from tests.fakes.trajectories import trajectory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

HANGS_ON_REQUEST = """
import threading

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["answer"] == "hang":
        threading.Event().wait()
    return 1.0 if extra_info["answer"] == "right" else 0.0
"""


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=100_000_000)
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(HANGS_ON_REQUEST)
    settings = Reward(custom_function=CustomFunction(path=str(path)), timeout_s=1.0)
    actor = RewardManagerActor.options(num_cpus=0.1).remote(settings)
    yield actor
    ray.shutdown()


def payload(answer: str) -> ray.ObjectRef:
    return ray.put(TrajectoryBatch.from_trajectories([trajectory(answer)]))


def test_a_trajectory_is_scored_from_its_reference(worker):
    assert ray.get(worker.score.remote(payload("right")), timeout=60) == Scored(1.0)


def test_while_some_scorers_hang_the_others_are_answered_and_the_hanging_are_timeouts(worker):
    hanging = [worker.score.remote(payload("hang")) for _ in range(3)]
    fine = [worker.score.remote(payload("right")) for _ in range(20)]
    assert ray.get(fine, timeout=30) == [Scored(1.0)] * 20
    late = ray.get(hanging, timeout=30)
    assert all(isinstance(score, Unscored) and score.kind == "timeout" for score in late)
