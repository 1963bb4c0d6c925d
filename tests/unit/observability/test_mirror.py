"""`run.dir` as a URI: the run folder over there, and a resumed run that finds it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pyarrow.fs import FileSystem, LocalFileSystem, SubTreeFileSystem

from mempo_ray.errors import ConfigError, InfrastructureError
from mempo_ray.observability.mirror import Mirror, local_runs
from mempo_ray.observability.run_folder import COMPLETE, RunFolder

RUN = "quick-20260101-000000-7"


@pytest.fixture(params=["file URI", "subtree"])
def mirror(request, tmp_path: Path) -> Mirror:
    """A mirror whose other side is `tmp_path/there/bucket`."""
    there = tmp_path / "there" / "bucket"
    if request.param == "subtree":
        (tmp_path / "there").mkdir()
        filesystem = SubTreeFileSystem(str(tmp_path / "there"), LocalFileSystem())
        return Mirror("mock://bucket", filesystem, "bucket", tmp_path / "here")
    filesystem, path = FileSystem.from_uri(there.as_uri())
    return Mirror(there.as_uri(), filesystem, path, tmp_path / "here")


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "there" / "bucket"


def checkpoint(bucket: Path, step: int, *, run: str = RUN, complete: bool = True, at_s: float = 0) -> None:
    """As the ranks write it."""
    path = bucket / run / "checkpoints" / f"step_{step:06d}"
    path.mkdir(parents=True)
    (path / "facts.json").touch()
    if complete:
        (path / COMPLETE).touch()
        os.utime(path / COMPLETE, (1_000_000 + at_s,) * 2)


def test_a_path_needs_no_mirror_and_an_unknown_scheme_names_the_key(tmp_path):
    assert Mirror.of(str(tmp_path)) is None
    assert local_runs(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match=r"run\.dir: 'nowhere://x'"):
        Mirror.of("nowhere://x")


def test_runs_of_a_uri_are_written_locally_and_named_alike_there(tmp_path):
    mirror = Mirror.of(f"{tmp_path.as_uri()}/runs/")
    assert local_runs(mirror.uri) == mirror.runs
    assert mirror.checkpoint(RUN, 3) == f"{tmp_path.as_uri()}/runs/{RUN}/checkpoints/step_000003"


def test_a_pushed_run_comes_back_without_what_can_be_made_again(mirror, bucket):
    folder = RunFolder.open(mirror.runs / RUN)
    folder.append_jsonl("metrics.jsonl", [{"step": 1}])
    folder.trajectory_file("step_0001").write_bytes(b"rows")
    (folder.root / "index").mkdir()
    (folder.root / "index" / "vectors.faiss").touch()
    mirror.push(folder.root)
    assert not (bucket / RUN / "index").exists()

    elsewhere = Mirror(mirror.uri, mirror.filesystem, mirror.path, mirror.runs.with_name("elsewhere"))
    back = RunFolder.open(elsewhere.pull(RUN))
    assert back.read_metrics() == [{"step": 1}]
    assert back.trajectory_file("step_0001").read_bytes() == b"rows"


def test_a_second_push_copies_what_has_changed_only(mirror, bucket):
    folder = RunFolder.open(mirror.runs / RUN)
    folder.write_text("config.yaml", "a: 1")
    folder.append_jsonl("metrics.jsonl", [{"step": 1}])
    mirror.push(folder.root)
    (bucket / RUN / "config.yaml").write_text("as it was copied")
    folder.append_jsonl("metrics.jsonl", [{"step": 2}])
    mirror.push(folder.root)
    assert (bucket / RUN / "config.yaml").read_text() == "as it was copied"
    assert len((bucket / RUN / "metrics.jsonl").read_text().splitlines()) == 2


def test_the_newest_checkpoint_is_the_complete_one_written_last_over_all_runs_of_the_name(mirror, bucket):
    assert mirror.newest_checkpoint("quick") is None
    checkpoint(bucket, 5, at_s=1)
    checkpoint(bucket, 9, complete=False)
    checkpoint(bucket, 2, run="quick-20260102-000000-7", at_s=2)
    checkpoint(bucket, 7, run="quick-other-20260103-000000-7", at_s=3)
    assert mirror.newest_checkpoint("quick") == f"{mirror.uri}/quick-20260102-000000-7/checkpoints/step_000002"


def test_pruning_keeps_the_newest_and_the_best(mirror, bucket):
    for step in (1, 2, 3, 4):
        checkpoint(bucket, step)
    checkpoint(bucket, 5, complete=False)
    mirror.prune(RUN, keep=2, best=1)
    left = sorted(path.name for path in (bucket / RUN / "checkpoints").iterdir())
    assert left == ["step_000001", "step_000003", "step_000004", "step_000005"]


def test_the_writable_check_leaves_nothing_behind_and_names_the_key(mirror, bucket, tmp_path):
    mirror.check_writable()
    assert list(bucket.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run\.dir: cannot write to file://"):
        Mirror.of((tmp_path / "file" / "runs").as_uri()).check_writable()


def test_a_place_that_cannot_be_reached_is_an_infrastructure_failure(mirror):
    with pytest.raises(InfrastructureError, match=r"run\.dir: .* cannot be reached"):
        mirror.pull("never-20260101-000000-1")
