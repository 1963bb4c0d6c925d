"""Judges and reward models over real Ray: one limiter for all workers, a model behind its own actor."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

import pytest
import ray

from mempo_ray.actors.limiter import JudgeLimiterActor, RayLimiter
from mempo_ray.actors.reward import RewardManagerActor
from mempo_ray.actors.reward_model import RewardModelActor
from mempo_ray.config.schema import Judge, Reward, RewardModel, Style
from mempo_ray.contracts import Scored, TrajectoryBatch
from mempo_ray.errors import DeadlineExceeded, WorkerFailed
from tests.fakes.judge_server import JudgeServer
from tests.fakes.reward_model import save_process_model
from tests.fakes.trajectories import trajectory, turn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

EXPECTED = {
    "score 5": "Scored",
    "busy 5": "Scored",
    "500": "infrastructure",
    "garbage": "scorer_error",
    "silence": "timeout",
}


@pytest.fixture(scope="module", autouse=True)
def _cluster():
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
    yield
    ray.shutdown()


def test_four_workers_together_keep_a_judges_limits_and_each_answer_has_its_kind(tmp_path):
    """Done-when 3."""
    template = tmp_path / "judge.jinja"
    template.write_text("{{ solution }}")
    with JudgeServer() as server:
        judge = Judge(
            url=server.url,
            template=str(template),
            highest=10,
            requests_per_s=20,
            concurrency=3,
            retries=1,
            timeout_s=20,
        )
        silent = judge.model_copy(update={"timeout_s": 2.0, "concurrency": 1})
        styles = {
            "judge": Style(style="api", data_sources=("hotpotqa",), judge=judge),
            "silent": Style(style="api", data_sources=("silent",), judge=silent),
        }
        settings = Reward(manager="hybrid", styles=styles)
        limiter = JudgeLimiterActor.remote(styles)
        workers = [RewardManagerActor.options(num_cpus=0.1).remote(settings, [], limiter) for _ in range(4)]
        prompts = ["score 5", "busy 5", "500", "garbage"] * 3
        rows = [trajectory(turns=[turn(text=prompt)]) for prompt in prompts]
        payload = ray.put(TrajectoryBatch.from_trajectories(rows))
        scores = ray.get([worker.score_batch.remote(payload) for worker in workers], timeout=120)
        kinds = [getattr(score, "kind", type(score).__name__) for part in scores for score in part]
        assert kinds == [EXPECTED[prompt] for prompt in prompts] * 4
        assert server.most_in_flight == 3
        span_s = max(server.starts_s) - min(server.starts_s)
        assert len(server.starts_s) <= 20 * span_s + 2  # no more than 20 a second over the whole stretch
        windows = Counter(int((start - server.starts_s[0]) / 1.0) for start in server.starts_s)
        assert max(windows.values()) <= 20 + 5  # those that a network held up come closer together
        assert ray.get(workers[0].score.remote(silence()), timeout=60).kind == EXPECTED["silence"]


def silence() -> ray.ObjectRef:
    silent = trajectory(turns=[turn(text="silence")])
    task = type(silent.task)("s", "?", (("a",),), "silent")
    return ray.put(TrajectoryBatch.from_trajectories([trajectory(turns=[turn(text="silence")], task=task)]))


def test_a_reward_model_scores_through_its_own_actor(tmp_path):
    save_process_model(tmp_path)
    section = RewardModel(folder=str(tmp_path), process=True, aggregate="mean")
    styles = {
        "em": Style(scorer="exact_match", weight=0.5),
        "prm": Style(style="model", weight=0.5, reward_model=section),
    }
    model = RewardModelActor.options(num_cpus=0.5).remote("prm", section)
    worker = RewardManagerActor.options(num_cpus=0.1).remote(
        Reward(manager="hybrid", styles=styles), [], None, {"prm": model}
    )
    rows = [trajectory("Paris", turns=[turn(text="mentor Boko ."), turn(text="Sari .")]) for _ in range(3)]
    scores = ray.get(worker.score_batch.remote(ray.put(TrajectoryBatch.from_trajectories(rows))), timeout=120)
    for score in scores:
        assert isinstance(score, Scored)
        assert score.score == pytest.approx(0.5 + 0.5 * score.parts["prm"])
        assert score.process_scores is not None
        assert len(score.process_scores) == 2
        assert sum(score.process_scores) / 2 == pytest.approx(0.5 * score.parts["prm"])
    assert all(a.score == pytest.approx(b.score) for a, b in itertools.pairwise(scores))


async def test_a_caller_that_goes_away_takes_no_permit_and_a_limiter_started_again_waits():
    judge = Judge(url="http://x", template="t", concurrency=1, requests_per_s=1000, timeout_s=30)
    handle = JudgeLimiterActor.options(max_restarts=1).remote({"judge": Style(style="api", judge=judge)})
    limiter = RayLimiter(handle)
    permit = await limiter.acquire("judge", 30)
    waiting = asyncio.create_task(limiter.acquire("judge", 30))
    with pytest.raises(DeadlineExceeded):  # so the first one waits there, too
        await limiter.acquire("judge", 0.5)
    waiting.cancel()
    await asyncio.wait([waiting])
    await limiter.release("judge", permit)
    await limiter.acquire("judge", 10)  # a permit that nobody uses would lapse after 30 s only

    ray.kill(handle, no_restart=False)
    with pytest.raises(DeadlineExceeded):
        await ask_again(limiter)


async def ask_again(limiter: RayLimiter) -> int:
    """As soon as it is back."""
    while True:
        try:
            return await limiter.acquire("judge", 1)
        except WorkerFailed:
            await asyncio.sleep(0.2)
