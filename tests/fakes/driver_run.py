"""The driver as a user starts it: a process of its own, watched by what it prints and by what it leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

PR_SET_CHILD_SUBREAPER = 36
GONE_S = 60  # what a closed cluster's last processes get to end; on a busy machine seconds pass before they run

SMALL = (
    "data.tasks_per_step=8",
    "algorithm.group_size=4",
    "eval.tasks=8",
    "eval.probe_ratios=true",
    "cold_start.tasks=128",
    "cold_start.batch_tokens=2048",
    "run.checkpoint_every=1",
)
"""The quickstart, cut down to half a minute."""


@contextmanager
def adopted_orphans() -> Iterator[None]:
    """Inside, a process whose parent has ended becomes ours, so that it is found by parent pid."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class DriverRun:
    """`python -m mempo_ray.driver run.dir=<runs> …`, in its own process group, with environment variables of its own.

    Example:
        with DriverRun(tmp_path, "run.steps=2") as run:
            run.wait_for("step 1: sampling")
            run.process.terminate()
            assert run.finish() == 130
    """

    def __init__(self, runs: Path, *words: str, **variables: str) -> None:
        self.runs = runs
        self.lines: list[str] = []
        self.left_behind: list[str] = []
        self._before = {child.pid for child in psutil.Process().children(recursive=True)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mempo_ray.driver", f"run.dir={runs}", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"PYTHONUNBUFFERED": "1"} | variables,
        )

    def __enter__(self) -> DriverRun:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends whatever is left, by pid."""
        for process in self._descendants():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(GONE_S)
        self.process.stdout.close()

    def says(self, text: str) -> bool:
        """Read lines until one holds `text`; False: the driver ended before. The test's own timeout is the deadline."""
        for line in self.process.stdout:
            self.lines.append(line)
            if text in line:
                return True
        return False

    def wait_for(self, text: str) -> None:
        """As `says`, where it must."""
        assert self.says(text), f"the driver ended without saying {text!r}:\n{self.output}"

    def finish(self) -> int:
        """The exit code; afterwards `left_behind` names the processes that outlived the driver."""
        self.lines += self.process.stdout
        code = self.process.wait()
        _, alive = psutil.wait_procs(self._descendants(), timeout=GONE_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
                if process.status() != psutil.STATUS_ZOMBIE:
                    self.left_behind.append(f"{process.pid} {process.name()}")
        return code

    def find(self, title: str) -> psutil.Process:
        """The one descendant whose command line holds `title`, e.g. `ray::RolloutActor`."""
        (found,) = self.find_all(title)
        return found

    def find_all(self, title: str) -> list[psutil.Process]:
        return [p for p in self._descendants() if title in _command_line(p)]

    @property
    def output(self) -> str:
        return "".join(self.lines)

    @property
    def folder(self) -> Path:
        return (self.runs / "latest").resolve()

    def _descendants(self) -> list[psutil.Process]:
        return [p for p in psutil.Process().children(recursive=True) if p.pid not in self._before]


def _command_line(process: psutil.Process) -> str:
    """'' where it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def drive(runs: Path, *words: str) -> DriverRun:
    """A whole run, from start to exit 0 with nothing left behind."""
    with adopted_orphans(), DriverRun(runs, *words) as run:
        code = run.finish()
        assert code == 0, run.output
        assert run.left_behind == [], run.output
    return run


def read_metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def step_metrics(folder: Path, step: int) -> dict[str, float]:
    """All that was logged for an optimisation step."""
    return next(row for row in read_metrics(folder) if row["step"] == step and "policy/loss" in row)


def read_rows(folder: Path, step: int) -> pa.Table:
    """The trajectory log of a step, one row a turn."""
    return pq.read_table(folder / "trajectories" / f"step_{step:04d}.parquet")
