"""The reward worker as a Ray actor: payloads arrive by reference, a hostile scorer blocks nobody and leaves nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import ray

from mempo_ray.actors.reward import RewardManagerActor
from mempo_ray.config.schema import CustomFunction, Reward
from mempo_ray.contracts import Scored, TrajectoryBatch, Unscored
from tests.fakes import hostile_scorers
from tests.fakes.trajectories import trajectory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

HOSTILE_ON_REQUEST = """
import os, threading

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["answer"] == "hang":
        threading.Event().wait()
    if extra_info["answer"] == "exit":
        os._exit(1)
    return 1.0 if extra_info["answer"] == "right" else 0.0
"""


@pytest.fixture(scope="module")
def _cluster():
    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=100_000_000)
    yield
    ray.shutdown()


@pytest.fixture(scope="module", params=["naive", "remote"])
def worker(request, _cluster, tmp_path_factory) -> Iterator:
    """Its scorers in processes of its own, and as Ray actors."""
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(HOSTILE_ON_REQUEST)
    settings = Reward(manager=request.param, custom_function=CustomFunction(path=str(path)), timeout_s=1.0)
    actor = RewardManagerActor.options(num_cpus=0.1).remote(settings)
    yield actor
    ray.get(actor.close.remote(), timeout=30)
    ray.kill(actor)


def payload(*answers: str) -> ray.ObjectRef:
    return ray.put(TrajectoryBatch.from_trajectories([trajectory(answer) for answer in answers]))


def test_a_trajectory_is_scored_from_its_reference(worker):
    assert ray.get(worker.score.remote(payload("right")), timeout=60) == Scored(1.0)


def test_while_some_scorers_hang_the_others_are_answered_and_the_hanging_are_timeouts(worker):
    hanging = [worker.score.remote(payload("hang")) for _ in range(3)]
    fine = [worker.score.remote(payload("right")) for _ in range(20)]
    assert ray.get(fine, timeout=60) == [Scored(1.0)] * 20
    late = ray.get(hanging, timeout=60)
    assert all(isinstance(score, Unscored) and score.kind == "timeout" for score in late)


def test_a_scorer_that_ends_its_process_fails_alone(worker):
    scores = ray.get(worker.score_batch.remote(payload("right", "exit", "wrong", "right")), timeout=60)
    assert [getattr(score, "score", None) for score in scores] == [1.0, None, 0.0, 1.0]
    assert scores[1].kind == "scorer_error"


@pytest.mark.usefixtures("_cluster")
def test_a_worker_that_is_killed_leaves_no_scorer_behind():
    settings = Reward(scorer="test-org/hostile", processes=1, timeout_s=600)
    actor = RewardManagerActor.options(num_cpus=0.1).remote(settings, [hostile_scorers.__name__])
    pid = ray.get(actor.score.remote(payload("tells_pid")), timeout=60).extra["pid"]
    actor.score.remote(payload("loops"))
    ray.get(actor.ping.remote(), timeout=60)
    ray.kill(actor)
    deadline_s = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline_s:
        os.sched_yield()
    assert not os.path.exists(f"/proc/{pid}")
