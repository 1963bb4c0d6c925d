"""The reward worker as a plain class: nothing blocks anything, and what is late, dead or a lie is no score."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from mempo_ray.actors.manager_host import NUM_THREADS
from mempo_ray.actors.reward import RewardManagerWorker
from mempo_ray.config.schema import CustomFunction, Reward, Sandbox
from mempo_ray.contracts import EndReason, Scored, Task, TrajectoryBatch, Unscored
from mempo_ray.errors import ConfigError
from mempo_ray.rewards.registry import MANAGERS, register_scorer
from tests.fakes import batch_function, hostile_scorers
from tests.fakes.trajectories import trajectory

release = threading.Event()

HOSTILE = Reward(scorer="test-org/hostile", timeout_s=2.0, memory_gb=1)
PLUGINS = [hostile_scorers.__name__]
BATCH = Reward(manager="batch", custom_function=CustomFunction(path=str(Path(batch_function.__file__))), timeout_s=2.0)


@register_scorer("test-org/hangs")
def hangs(response, settings):
    if response.answer == "hang":
        release.wait(20)
    return 1.0


places_in_sandbox = threading.Semaphore(2)


@register_scorer("test-org/in-sandbox", isolation="sandbox")
def in_sandbox(response, settings):
    if not places_in_sandbox.acquire(blocking=False):
        return 0.0  # it would wait for a place while its own time runs
    release.wait(0.01)
    places_in_sandbox.release()
    return 1.0


def payload(*answers: str) -> TrajectoryBatch:
    return TrajectoryBatch.from_trajectories([trajectory(answer) for answer in answers])


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(autouse=True)
def _release_threads():
    release.clear()
    yield
    release.set()


async def test_a_hanging_scorer_times_out_unscored_and_blocks_nobody():
    worker = RewardManagerWorker(Reward(scorer="test-org/hangs", timeout_s=0.05))
    answers = ["hang", "fine"] * (2 * NUM_THREADS)  # twice as many as there are places
    scores = await asyncio.gather(*(worker.score(payload(answer)) for answer in answers))
    assert all(isinstance(s, Unscored) and s.kind == "timeout" for s in scores[::2])
    assert scores[1::2] == [Scored(1.0)] * (2 * NUM_THREADS)
    await worker.close()


async def test_programs_wait_for_a_place_in_the_sandbox_before_their_time_counts():
    worker = RewardManagerWorker(Reward(scorer="test-org/in-sandbox", sandbox=Sandbox(concurrency=2)))
    assert await asyncio.gather(*(worker.score(payload("x")) for _ in range(16))) == [Scored(1.0)] * 16
    await worker.close()


async def test_among_hostile_scorers_every_healthy_score_is_right_and_no_process_stays():
    """Done-when 2, in small; benchmarks/rewards.py has the large form."""
    worker = RewardManagerWorker(HOSTILE, PLUGINS)
    kinds = list(hostile_scorers.KINDS)
    answers = [text for i, kind in enumerate(kinds) for text in (f"{i}.25", kind, f"{i}.5", f"{i}.75")]
    scores = dict(zip(answers, await worker.score_batch(payload(*answers)), strict=True))
    assert {a: s for a, s in scores.items() if a not in kinds} == {
        a: Scored(float(a)) for a in answers if a not in kinds
    }
    unscored = {kind: scores[kind] for kind in kinds}
    assert {kind: s.kind for kind, s in unscored.items() if isinstance(s, Unscored)} == {
        kind: expected for kind, (_, expected) in hostile_scorers.KINDS.items()
    }
    pids = await worker.pids()
    assert all(map(lives, pids))
    await worker.close()
    assert not any(map(lives, pids))


async def test_responses_that_wait_are_scored_together():
    worker = RewardManagerWorker(BATCH.model_copy(update={"processes": 1, "batch_size": 4}))
    scores = await asyncio.gather(*(worker.score(payload("Paris")) for _ in range(9)))
    assert [s.extra["size"] for s in scores] == [4, 4, 4, 4, 4, 4, 4, 4, 1]
    await worker.close()


@pytest.mark.parametrize(("bad", "kind"), [("exits", "scorer_error"), ("loops", "timeout"), ("raises", "scorer_error")])
async def test_in_a_batch_that_ends_its_process_the_healthy_are_scored_again(bad, kind):
    worker = RewardManagerWorker(BATCH)
    scores = await worker.score_batch(payload("Paris", "Rome", bad, "Paris"))
    assert [s.score for s in scores if isinstance(s, Scored)] == [1.0, 0.0, 1.0]
    assert isinstance(scores[2], Unscored)
    assert scores[2].kind == kind
    await worker.close()


async def test_a_caller_that_goes_away_takes_nobody_with_it():
    worker = RewardManagerWorker(BATCH.model_copy(update={"processes": 1}))
    calls = [asyncio.create_task(worker.score(payload("Paris"))) for _ in range(4)]
    await asyncio.sleep(0)  # all are queued
    calls[0].cancel()
    others = await asyncio.gather(*calls[1:])
    assert [s.score for s in others] == [1.0] * 3
    await worker.close()


async def test_rows_of_several_sources_each_go_to_their_scorers_place():
    worker = RewardManagerWorker(Reward(), PLUGINS)
    rows = [trajectory("Paris"), trajectory("0.5", task=Task("h", "?", (("a",),), "test-org/hostile"))]
    scores = await worker.score_batch(TrajectoryBatch.from_trajectories(rows))
    assert [s.score for s in scores] == [1.0, 0.5]
    await worker.close()


async def test_a_payload_that_is_not_one_trajectory_is_unscored():
    worker = RewardManagerWorker(Reward())
    empty = TrajectoryBatch.from_trajectories([])
    assert (await worker.score(empty)).kind == "data"


@pytest.mark.parametrize("manager", ["naive", "batch"])
async def test_an_episode_that_infrastructure_broke_is_not_scored_among_others(manager):
    worker = RewardManagerWorker(Reward(manager=manager))
    broken = trajectory(None, end_reason=EndReason.TOOL_FAILED)
    scores = await worker.score_batch(TrajectoryBatch.from_trajectories([trajectory(), broken, trajectory("no")]))
    assert [getattr(s, "score", None) for s in scores] == [1.0, None, 0.0]
    await worker.close()


def test_an_unknown_plugin_ends_the_start():
    with pytest.raises(ModuleNotFoundError, match="no_such_plugin"):
        RewardManagerWorker(Reward(), plugins=["no_such_plugin"])


async def test_a_mistake_in_the_users_file_ends_the_start(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import no_such_module")
    with pytest.raises(ConfigError, match=r"reward\.custom_function\.path: .*no_such_module"):
        RewardManagerWorker(Reward(custom_function=CustomFunction(path=str(path))))


@MANAGERS.register("test-org/careless")
class CarelessManager:
    """As no manager should be."""

    def __init__(self, settings):
        """Nothing to prepare."""

    def score(self, response):
        return {"raises": 1 / 2, "nan": float("nan"), "steps": Scored(1.0, {}, (0.1, 0.2, 0.3))}[response.answer]

    def score_batch(self, responses):
        return [1.0] if any(r.answer == "short" for r in responses) else [self.score(r) for r in responses]


async def test_a_manager_that_raises_or_answers_nonsense_leaves_nobody_waiting():
    worker = RewardManagerWorker(Reward(manager="test-org/careless"))
    scores = await worker.score_batch(payload("raises", "nan", "unknown"))
    assert [getattr(s, "kind", s) for s in scores] == [Scored(0.5), "scorer_error", "scorer_error"]
    (steps,) = await worker.score_batch(payload("steps"))
    assert steps == Unscored("3 process scores for 1 turns", "scorer_error")
    short = await asyncio.gather(*(worker.score(payload(answer)) for answer in ("short", "raises")))
    assert [getattr(s, "kind", s) for s in short] == ["scorer_error", Scored(0.5)]
    await worker.close()


@register_scorer("test-org/program", isolation="sandbox")
def score_alone(response, settings):
    return 1.0


@MANAGERS.register("test-org/sizes")
class SizesManager:
    """A score is the number of responses in its call."""

    def __init__(self, settings):
        """Nothing to prepare."""

    def score(self, response):
        return 1.0

    def score_batch(self, responses):
        return [float(len(responses))] * len(responses)


async def test_programs_are_not_scored_together_whatever_the_manager():
    worker = RewardManagerWorker(Reward(manager="test-org/sizes"))
    program = Task("p", "?", (("a",),), "test-org/program")
    rows = TrajectoryBatch.from_trajectories([trajectory("a", task=program), trajectory("Paris")] * 3)
    assert [s.score for s in await worker.score_batch(rows)] == [1.0, 3.0] * 3
    one = TrajectoryBatch.from_trajectories([trajectory("a", task=program)])
    assert [s.score for s in await asyncio.gather(*(worker.score(one) for _ in range(5)))] == [1.0] * 5
    await worker.close()
