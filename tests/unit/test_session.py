"""What a session decides before and after a run; the loop's own clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from mempo_ray.cold_start import from_other_worlds
from mempo_ray.config.schema import Config
from mempo_ray.contracts import Task
from mempo_ray.data.oracle import OracleTrajectory
from mempo_ray.driver import due
from mempo_ray.errors import ConfigError
from mempo_ray.launch import open_run_folder
from mempo_ray.observability.mirror import Mirror, find_checkpoint
from mempo_ray.observability.run_folder import RunFolder


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
