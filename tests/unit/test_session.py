"""What a session decides before and after a run; the loop's own clock."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow.parquet as pq
import pytest

from mempo_ray.agent.prompt import Renderer
from mempo_ray.agent.tokenizer import FileTokenizer
from mempo_ray.cold_start import from_other_worlds
from mempo_ray.config.models import model_folder
from mempo_ray.config.schema import Agent, Config
from mempo_ray.contracts import PayloadRef, Scored, StepReport, Task, TrajectoryBatch, Unscored
from mempo_ray.data.oracle import OracleTrajectory
from mempo_ray.data.tasks import TaskSource
from mempo_ray.driver import due
from mempo_ray.errors import ConfigError, GangLost, MempoError, PayloadLost, TrainingError
from mempo_ray.experience import Sample
from mempo_ray.launch import open_run_folder
from mempo_ray.observability.mirror import Mirror, find_checkpoint
from mempo_ray.observability.run_folder import RunFolder
from mempo_ray.session import Session, first_difference
from tests.fakes.rewards import FakeRewards
from tests.fakes.rollouts import VERSION, FakeRollouts, finished
from tests.fakes.trajectories import TASK
from tests.fakes.trajectories import trajectory as an_episode


def config(runs: Path | str, resume: str = "") -> Config:
    return Config.model_validate({"run": {"dir": str(runs), "name": "quick", "resume": resume}})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = RunFolder.create(tmp_path, "quick").checkpoint(3)
    path.mkdir(parents=True)
    (path / "COMPLETE").touch()
    return path


def test_nothing_is_resumed_unless_asked_for(tmp_path, checkpoint):
    assert find_checkpoint(config(tmp_path).run, None) is None


def test_auto_finds_the_newest_checkpoint_and_goes_on_in_its_folder(tmp_path, checkpoint):
    settings = config(tmp_path, "auto")
    assert find_checkpoint(settings.run, None) == str(checkpoint)
    assert open_run_folder(settings, None, str(checkpoint)).root == checkpoint.parents[1]


def test_auto_without_any_checkpoint_is_a_new_run(tmp_path):
    settings = config(tmp_path, "auto")
    assert find_checkpoint(settings.run, None) is None
    assert open_run_folder(settings, None, None).root.parent == tmp_path


def test_a_named_checkpoint_is_continued_in_a_new_folder(tmp_path, checkpoint):
    settings = config(tmp_path / "other", str(checkpoint))
    assert find_checkpoint(settings.run, None) == str(checkpoint)
    assert open_run_folder(settings, None, str(checkpoint)).root.parent == tmp_path / "other"


def test_a_named_folder_that_is_no_complete_checkpoint_is_refused(tmp_path, checkpoint):
    (checkpoint / "COMPLETE").unlink()
    with pytest.raises(ConfigError, match=r"run\.resume: .*step_000003 holds no complete checkpoint"):
        find_checkpoint(config(tmp_path, str(checkpoint)).run, None)


def test_auto_looks_where_the_run_folder_is_a_uri(tmp_path, checkpoint):
    uri = f"file://{tmp_path}"
    found = find_checkpoint(config(uri, "auto").run, Mirror.of(uri))
    assert found == f"{uri}/{checkpoint.parents[1].name}/checkpoints/step_000003"


@pytest.mark.parametrize(
    ("every", "last", "expected"),
    [(0, 5, [5]), (2, 5, [2, 4, 5]), (1, 5, [1, 2, 3, 4, 5]), (10, 5, [5]), (2, 0, [2, 4])],
)
def test_something_is_due_every_so_many_steps_and_at_the_last(every, last, expected):
    assert [step for step in range(1, 6) if due(step, every, last)] == expected


def trajectory(task_id: str, world: int | None = None) -> OracleTrajectory:
    metadata = {} if world is None else {"world": world}
    return OracleTrajectory(Task(task_id, "?", (("a",),), "test", metadata), turns=(), facts=("a",))


@pytest.mark.parametrize(
    ("worlds", "expected"),
    [([1, 1, 2, 2], ["c", "c", "a", "a"]), ([None] * 4, ["b", "c", "d", "a"]), ([1, 1, 1, 1], ["a", "b", "c", "d"])],
    ids=["the next world", "no worlds: the next task", "one world: itself"],
)
def test_a_foreign_fact_is_of_another_world(worlds, expected):
    found = [trajectory(task_id, world) for task_id, world in zip("abcd", worlds, strict=True)]
    assert [other.task.task_id for other in from_other_worlds(found)] == expected


class PayloadsOfNodes:
    """Those of the tasks in `lost` went with their node."""

    def __init__(self, lost: set[str]) -> None:
        self.lost = lost

    async def read(self, ref: PayloadRef) -> TrajectoryBatch:
        if ref.key.partition("/")[0] in self.lost:
            raise PayloadLost(f"payload {ref.key}: its node is gone")
        return TrajectoryBatch.from_trajectories([replace(an_episode(), task=replace(TASK, task_id=ref.key[:2]))])


class Trains:
    def __init__(self, failure: MempoError | None = None) -> None:
        self.failure = failure

    async def train(self, plan: object) -> StepReport:
        await asyncio.sleep(0)  # the log is faster
        if self.failure is not None:
            raise self.failure
        return StepReport(1, 1, {"policy/logprob_gap_max": 0.0})


def session_that_logs(folder: RunFolder, lost: set[str], policy: Trains) -> Session:
    model = model_folder("builtin:tiny")
    nothing = cast("Any", SimpleNamespace(stage=lambda text: None))
    return Session(
        config=Config.model_validate({"run": {"max_excluded_share": 0.25}, "reward": {"log_samples": 0}}),
        folder=folder,
        mirror=None,
        fleet=cast("Any", SimpleNamespace(payloads=PayloadsOfNodes(lost), policy=policy)),
        renderer=Renderer.from_folder(model, FileTokenizer.from_folder(model), Agent()),
        source=nothing,
        train_tasks=(),
        held_out=(),
        display=nothing,
        metrics=nothing,
        memory=nothing,
    )


STEP = cast("Any", SimpleNamespace(plan=SimpleNamespace(step=1), advantages={}, kl_coef=0.0))
SAMPLED = cast("Any", SimpleNamespace(samples=[Sample(finished(f"q{n}", 0), Scored(1.0)) for n in range(4)]))


async def test_a_payload_that_only_the_log_has_lost_is_counted_and_the_others_are_logged(tmp_path):
    folder = RunFolder.create(tmp_path, "quick")
    metrics = await session_that_logs(folder, {"q1"}, Trains()).train(STEP, SAMPLED)
    assert metrics["rollout/num_unlogged"] == 1
    table = pq.read_table(folder.trajectory_file("step_0001"))
    assert table["task_id"].to_pylist() == ["q0", "q2", "q3"]


async def test_more_of_them_than_a_step_may_miss_end_the_run(tmp_path):
    session = session_that_logs(RunFolder.create(tmp_path, "quick"), {"q1", "q2"}, Trains())
    with pytest.raises(PayloadLost, match=r"2 of 4 trajectories .* run\.max_excluded_share is 25%"):
        await session.train(STEP, SAMPLED)


async def test_where_the_ranks_missed_them_too_the_step_is_done_again_though_the_log_knew_first(tmp_path):
    lost = {f"q{n}" for n in range(4)}
    session = session_that_logs(RunFolder.create(tmp_path, "quick"), lost, Trains(GangLost("a payload is lost")))
    with pytest.raises(GangLost):
        await session.train(STEP, SAMPLED)


@pytest.mark.parametrize("evaluates", [False, True])
async def test_a_run_that_ends_for_want_of_scores_leaves_its_trajectories_and_their_reasons(tmp_path, evaluates):
    tasks = tuple(Task(f"q{n}", "?", (("a",),), "own") for n in range(2))
    settings = {
        "data": {"tasks_per_step": 2},
        "algorithm": {"group_size": 1, "kl_coef": 0},
        "memory_reward": {"weight": 0},
    }
    unscored = FakeRewards(q0_0=Unscored("no judge", "infrastructure"), q1_0=Unscored("no judge", "infrastructure"))
    session = session_that_logs(RunFolder.create(tmp_path, "quick"), set(), Trains())
    session.config, session.held_out = Config.model_validate(settings), tasks
    session.source, session.version = TaskSource(tasks, shuffle=False), VERSION
    session.display = cast("Any", SimpleNamespace(stage=lambda *_: None, advance=lambda *_: None))
    session.fleet.rollouts = FakeRollouts([finished("q0", 0), finished("q1", 0)])
    session.fleet.rewards, session.fleet.engine_scorer = unscored, None
    with pytest.raises(TrainingError, match="2 × unscored"):
        await (session.evaluate("step_0000") if evaluates else session.sample_and_score(1))
    name = "eval_step_0000" if evaluates else "step_0001"
    assert pq.read_table(session.folder.trajectory_file(name))["task_id"].to_pylist() == ["q0", "q1"]
    rows = [json.loads(line) for line in (session.folder.root / "excluded.jsonl").read_text().splitlines()]
    assert [(row["file"], row["task_id"]) for row in rows] == [(name, "q0"), (name, "q1")]
    assert "no judge" in rows[0]["reason"]


def test_a_step_that_is_not_the_one_to_come_is_told_by_its_first_difference():
    def step(num_tasks: int, group: int) -> list[list]:
        return [[f"t{task}", sibling, 7 * task + sibling] for task in range(num_tasks) for sibling in range(group)]

    assert first_difference(step(2, 4), step(2, 4)) == ""
    assert first_difference(step(2, 2), step(2, 4)).endswith("= ['t1', 0, 7], saved ['t0', 2, 2]")
    assert first_difference(step(2, 4), step(3, 4)).startswith("8 episodes, 12 when it was saved; ")
