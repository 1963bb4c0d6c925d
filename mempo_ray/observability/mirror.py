"""`run.dir` as a URI: runs are written in a local folder and copied to any pyarrow file system (s3://, gs://, hdfs://).

    what               written by                     to
    checkpoints/       the ranks themselves           the URI at once (training/checkpoint.py); nothing local to lose
    all else           the driver, locally            copied by `push` after each checkpoint and at the end
    run.resume=auto    `newest_checkpoint`, `pull`    the URI's run comes back without its checkpoints

`index/` and `weights/` are not copied: a run makes them again. The local folder is $MEMPO_LOCAL_RUNS, or one in /tmp;
on several nodes it must be one that all of them mount, since ranks, engines and retrieval replicas use it too.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pyarrow as pa
from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType, LocalFileSystem, copy_files

from mempo_ray.config.schema import Run
from mempo_ray.errors import ConfigError, InfrastructureError
from mempo_ray.observability.run_folder import COMPLETE, is_run_of, newest_checkpoint

NOT_COPIED = ("checkpoints", "index", "weights")


def local_runs(run_dir: str) -> Path:
    """The local folder of all runs: `run.dir` itself, or where runs are written before they are copied to it."""
    mirror = Mirror.of(run_dir)
    return Path(run_dir) if mirror is None else mirror.runs


@dataclass(frozen=True)
class Mirror:
    """Runs at a URI. `path` is the place of `uri` in `filesystem`."""

    uri: str
    filesystem: FileSystem
    path: str
    runs: Path  # local folder in which runs are written before they are copied
    is_shareable: bool = False  # that folder is the user's choice, not this machine's /tmp
    _pushed: dict[str, int] = field(default_factory=dict)  # remote file → mtime (ns) of what was copied

    @classmethod
    def of(cls, run_dir: str) -> Self | None:
        """None where `run.dir` is a local path.

        Raises:
            ConfigError: no file system for this URI.
        """
        if "://" not in run_dir:
            return None
        try:
            filesystem, path = FileSystem.from_uri(run_dir)
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(
                f"run.dir: {run_dir!r} is no path and no URI that pyarrow knows (file, s3, gs, hdfs, abfs): {error}"
            ) from None
        given = os.environ.get("MEMPO_LOCAL_RUNS")
        runs = Path(given or Path(tempfile.gettempdir()) / f"mempo-runs-{os.getuid()}")
        return cls(run_dir.rstrip("/"), filesystem, path.rstrip("/"), runs, is_shareable=bool(given))

    def check_writable(self) -> None:
        """Write a file and delete it. Raises ConfigError."""
        probe = f"{self.path}/.writable"
        try:
            self.filesystem.create_dir(self.path, recursive=True)
            with self.filesystem.open_output_stream(probe):
                pass
            self.filesystem.delete_file(probe)
        except OSError as error:
            raise ConfigError(f"run.dir: cannot write to {self.uri} ({error}); choose another place.") from None

    # -- checkpoints ------------------------------------------------------------------------------------

    def checkpoint(self, run: str, step: int) -> str:
        """URI of a checkpoint of a run (the run folder's name)."""
        return f"{self.uri}/{run}/checkpoints/step_{step:06d}"

    def newest_checkpoint(self, name: str) -> str | None:
        """URI of the newest complete checkpoint over all runs of this name, by time of completion."""
        with self._reached():
            runs = [info.base_name for info in self._list(self.path) if is_run_of(info.base_name, name)]
            found = [marker for run in runs for marker in self._markers(run)]
        newest = max(found, key=lambda marker: marker.mtime_ns, default=None)
        return newest and f"{self.uri}{newest.path.removeprefix(self.path).removesuffix(f'/{COMPLETE}')}"

    def prune(self, run: str, keep: int, best: int | None) -> None:
        """Delete all complete checkpoints of a run but the newest `keep` and the one of step `best`."""
        with self._reached():
            for marker in self._markers(run)[:-keep]:
                folder = marker.path.removesuffix(f"/{COMPLETE}")
                if folder != f"{self.path}/{run}/checkpoints/step_{best:06d}":
                    self.filesystem.delete_file(marker.path)  # first: a half-deleted folder must not look complete
                    self.filesystem.delete_dir(folder)

    def _markers(self, run: str) -> list[FileInfo]:
        """Marker files of the complete checkpoints of a run, oldest step first."""
        folders = sorted(info.path for info in self._list(f"{self.path}/{run}/checkpoints"))
        markers = self.filesystem.get_file_info([f"{folder}/{COMPLETE}" for folder in folders])
        return [marker for marker in markers if marker.type == FileType.File]

    # -- all else ---------------------------------------------------------------------------------------

    def push(self, root: Path) -> None:
        """Copy what is new or changed in a run folder. Raises InfrastructureError."""
        with self._reached():
            for file in sorted(path for path in root.rglob("*") if path.is_file()):
                inside = file.relative_to(root)
                target, changed = f"{self.path}/{root.name}/{inside.as_posix()}", file.stat().st_mtime_ns
                if inside.parts[0] not in NOT_COPIED and self._pushed.get(target) != changed:
                    self.filesystem.create_dir(target.rpartition("/")[0], recursive=True)
                    copy_files(str(file), target, LocalFileSystem(), self.filesystem)
                    self._pushed[target] = changed

    def pull(self, run: str) -> Path:
        """Bring a run folder back, without its checkpoints; returns the local one. Raises InfrastructureError."""
        root, place = self.runs / run, f"{self.path}/{run}"
        with self._reached():
            for info in self.filesystem.get_file_info(FileSelector(place, recursive=True)):
                inside = Path(info.path.removeprefix(place).lstrip("/"))
                if info.type == FileType.File and inside.parts[0] not in NOT_COPIED:
                    (root / inside).parent.mkdir(parents=True, exist_ok=True)
                    copy_files(info.path, str(root / inside), self.filesystem, LocalFileSystem())
        return root

    def _list(self, path: str) -> list[FileInfo]:
        return self.filesystem.get_file_info(FileSelector(path, allow_not_found=True))

    @contextmanager
    def _reached(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise InfrastructureError(f"run.dir: {self.uri} cannot be reached: {error}") from error


def find_checkpoint(run: Run, mirror: Mirror | None) -> str | None:
    """What `run.resume` means, as a path or URI: 'auto' = the newest complete checkpoint of this run's name, if any.

    Raises:
        ConfigError: a path that is no complete checkpoint. (Of a URI the ranks say so when they load it.)
    """
    if run.resume == "auto":
        found = mirror.newest_checkpoint(run.name) if mirror else newest_checkpoint(Path(run.dir).absolute(), run.name)
        return str(found) if found else None
    if run.resume and "://" not in run.resume and not (Path(run.resume) / COMPLETE).is_file():
        raise ConfigError(
            f"run.resume: {run.resume} holds no complete checkpoint (no file {COMPLETE}); give a folder "
            "checkpoints/step_… of a run, 'auto', or ''."
        )
    if run.resume and "://" not in run.resume:
        return str(Path(run.resume).absolute())
    return run.resume or None
