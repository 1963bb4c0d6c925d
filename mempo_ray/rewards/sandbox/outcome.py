"""What one run of code came to, and within which limits it ran."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from mempo_ray.config.schema import WALL_FACTOR, Sandbox


class Status(StrEnum):
    """How a run ended. All but the last are the code's own doing."""

    OK = "ok"  # it ended by itself, with any exit code
    TIMEOUT = "timeout"  # its CPU seconds, or the clock's
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    KILLED = "killed"  # by a signal, such as SIGSEGV
    SANDBOX_FAILED = "sandbox_failed"  # infrastructure: the code did not run, or nobody knows what it did


@dataclass(frozen=True)
class Limits:
    """Of one run. Memory is address space of a process, and real memory of all of them where cgroups are there."""

    run_s: float = 8.0  # CPU seconds of each process, rounded up to whole ones
    memory_bytes: int = 1 << 30
    output_bytes: int = 1 << 20  # of stdout, and again of stderr
    files_bytes: int = 64 << 20  # of the working folder
    processes: int = 32
    wall_s: float = WALL_FACTOR * run_s  # by the clock: ends what sleeps, and leaves time to what shares its processor

    @classmethod
    def of(cls, settings: Sandbox) -> Limits:
        return cls(
            settings.run_s,
            settings.memory_mb << 20,
            settings.output_kb << 10,
            settings.files_mb << 20,
            settings.processes,
            WALL_FACTOR * settings.run_s,
        )

    def within(self, at_most_s: float) -> Limits:
        return replace(self, wall_s=min(self.wall_s, at_most_s))


@dataclass(frozen=True)
class Outcome:
    """One run. `exit_code` is None unless the status is `ok`; `detail` says why it is another one."""

    status: Status
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    seconds: float = 0.0  # by the clock
    detail: str = ""

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0


class CodeRunner(Protocol):
    """Runs a Python program within its `Limits`, and for no longer than `at_most_s` by the clock.

    Both forms wait for a free place, and neither raises for what the code or the sandbox does.
    """

    def run(self, source: str, stdin: str = "", *, at_most_s: float = math.inf) -> Outcome: ...

    async def run_async(self, source: str, stdin: str = "", *, at_most_s: float = math.inf) -> Outcome:
        """Blocks no loop. A cancelled call ends the code, with all its processes."""
        ...
