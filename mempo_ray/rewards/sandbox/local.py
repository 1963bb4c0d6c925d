"""Code in a sandbox on this machine: started, fed, read and ended in one loop over its pipes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import selectors
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor

from mempo_ray.config.schema import Sandbox
from mempo_ray.errors import ConfigError, InfrastructureError
from mempo_ray.rewards.sandbox.levels import (
    ENVIRONMENT,
    NOBODY,
    WORK,
    Level,
    cgroups_of,
    command,
    missing_programs,
    num_memory_kills,
)
from mempo_ray.rewards.sandbox.outcome import Limits, Outcome, Status

CHUNK_BYTES = 1 << 16
START_S = 10.0  # for the programs around the interpreter, before the code's own time counts
END_S = 5.0  # for the pipes to close after SIGKILL
ASKED_S = 0.05  # how soon a cancelled call is noticed
CPU_USED_UP = "CPU seconds used up"


def run_python(
    source: str,
    stdin: str = "",
    limits: Limits = Limits(),  # noqa: B008 - frozen
    *,
    level: Level | None = None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run one Python program (standard library only) and wait for its end, or end it at its limits.

    Args:
        level: None = the best that this machine gives, which must be `namespaces+uid` at least.

    Raises:
        ConfigError: level is None and the machine gives less.
    """
    level = allowed_level(allow_weak=False) if level is None else level
    began = time.monotonic()
    try:
        with contextlib.ExitStack() as stack:
            groups = stack.enter_context(cgroups_of(limits)) if level is Level.NAMESPACES_CGROUP else ()
            folder = stack.enter_context(_folder()) if level is Level.RLIMITS else "/"
            marker, marker_fd = os.pipe()
            stack.callback(os.close, marker)
            source_fd = os.memfd_create("source")
            stack.callback(os.close, source_fd)
            os.write(source_fd, source.encode("utf-8", "replace"))
            os.lseek(source_fd, 0, os.SEEK_SET)
            try:
                process = subprocess.Popen(
                    command(level, marker_fd, source_fd, limits, groups),
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, cwd=folder,
                    env=ENVIRONMENT | ({} if folder == "/" else {"HOME": folder, "TMPDIR": folder}),
                    pass_fds=(marker_fd, source_fd), start_new_session=True,
                )  # fmt: skip
            finally:
                os.close(marker_fd)
            run = _Run(process, marker, limits)
            with process:
                try:
                    run.feed_and_read(stdin.encode("utf-8", "replace"), is_cancelled)
                finally:
                    run.kill()
            return run.outcome(num_memory_kills(groups))
    except (OSError, InfrastructureError) as error:
        seconds = time.monotonic() - began
        return Outcome(Status.SANDBOX_FAILED, seconds=seconds, detail=f"{type(error).__name__}: {error}")


class _Run:
    """One started process and what came out of it."""

    def __init__(self, process: subprocess.Popen[bytes], marker: int, limits: Limits) -> None:
        self._process, self._marker, self._limits = process, marker, limits
        self._output = {"stdout": bytearray(), "stderr": bytearray()}
        self._started_at: float | None = None  # when the code's own time began
        self._ended: tuple[Status, str] | None = None  # why this side ended it
        self._wait_until = time.monotonic() + START_S  # then the code's deadline, then that of its end
        self._seconds = 0.0

    def feed_and_read(self, stdin: bytes, is_cancelled: Callable[[], bool]) -> None:
        """Returns when every process that holds a pipe has ended; ends them at a limit."""
        self._unwritten = memoryview(stdin)
        with selectors.DefaultSelector() as selector:
            selector.register(self._marker, selectors.EVENT_READ, "marker")
            for name in ("stdin", "stdout", "stderr"):
                pipe = getattr(self._process, name)
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, selectors.EVENT_WRITE if name == "stdin" else selectors.EVENT_READ, name)
            while {"stdout", "stderr"} & {key.data for key in selector.get_map().values()}:
                left_s = self._wait_until - time.monotonic()
                if self._ended is None and (reason := self._reason_to_end(left_s < 0, is_cancelled())):
                    self._ended, self._wait_until = reason, time.monotonic() + END_S
                    self.kill()
                elif left_s < 0:  # at level `rlimits`: a process that left the group holds a pipe
                    break
                for key, _ in selector.select(min(max(left_s, 0), ASKED_S)):
                    if self._move(key.fd, key.data):
                        selector.unregister(key.fileobj)
                        if key.data == "stdin":
                            self._process.stdin.close()  # pyrefly: ignore[missing-attribute]
        if self._ended is None:  # at level `rlimits` it may have closed its pipes and run on
            try:
                self._process.wait(max(self._wait_until - time.monotonic(), ASKED_S))
            except subprocess.TimeoutExpired:
                self._ended = self._reason_to_end(is_late=True, is_cancelled=False)
        self._seconds = time.monotonic() - self._started_at if self._started_at else 0.0

    def outcome(self, num_memory_kills: int) -> Outcome:
        """The status, from what is known without trusting the code's output: only `memory` also reads its last line."""
        texts = {name: bytes(data).decode("utf-8", "replace") for name, data in self._output.items()}
        code = self._process.returncode
        if self._started_at is None:
            status, detail = Status.SANDBOX_FAILED, f"did not start, exit code {code}: {texts['stderr'][-500:]}"
        elif self._ended is not None:
            status, detail = self._ended
        elif num_memory_kills:
            status, detail = Status.MEMORY, f"{num_memory_kills} processes killed at {self._limits.memory_bytes} bytes"
        else:
            status, detail = classify(code, texts["stderr"])
        return Outcome(status, **texts, exit_code=code if status is Status.OK else None, seconds=self._seconds,
                       detail=detail)  # fmt: skip

    def _reason_to_end(self, is_late: bool, is_cancelled: bool) -> tuple[Status, str] | None:
        if is_cancelled:
            return Status.SANDBOX_FAILED, "cancelled"
        for name, data in self._output.items():
            if len(data) > self._limits.output_bytes:
                del data[self._limits.output_bytes :]
                return Status.OUTPUT_LIMIT, f"more than {self._limits.output_bytes} bytes on {name}"
        if not is_late:
            return None
        if self._started_at is None:
            return Status.SANDBOX_FAILED, f"no start within {START_S:g} s"
        return Status.TIMEOUT, f"still running after {self._limits.wall_s:g} s"

    def kill(self) -> None:
        """End what still runs: the group of the first process, with which its namespaces end."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _move(self, fd: int, name: str) -> bool:
        """Bytes between a pipe and here; whether that was the last. After a kill the rest is thrown away."""
        if name == "stdin":
            try:
                self._unwritten = self._unwritten[os.write(fd, self._unwritten[:CHUNK_BYTES]) :]
            except BrokenPipeError:  # the code reads no further
                return True
            return not self._unwritten
        data = os.read(fd, CHUNK_BYTES)
        if name == "marker" and data:
            self._started_at = time.monotonic()
            self._wait_until = self._started_at + self._limits.wall_s
        elif name != "marker" and self._ended is None:
            self._output[name] += data
        return not data


def classify(code: int, stderr: str) -> tuple[Status, str]:
    """Status of a program that ended by itself: `code` is −signal, or 128 + signal as shells and bwrap pass it on."""
    number = -code if code < 0 else code - 128 if code > 128 else 0
    if code == 1 and stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
        return Status.MEMORY, "MemoryError"
    if number == signal.SIGXCPU:
        return Status.TIMEOUT, CPU_USED_UP
    if number in set(signal.Signals):
        return Status.KILLED, signal.Signals(number).name
    return Status.OK, ""


@contextlib.contextmanager
def _folder() -> Generator[str, None, None]:
    """A working folder of its own, for the level that has no file system of its own."""
    with tempfile.TemporaryDirectory(prefix="mempo-sandbox-") as folder:
        if os.geteuid() == 0:
            os.chown(folder, int(NOBODY), int(NOBODY))
        yield folder


PROBE = f"""
import json, os  # json: a part of the library that is not frozen into the interpreter
assert os.getuid() != 0 and os.geteuid() != 0, "it runs as root"
print(*(os.readlink("/proc/self/ns/" + name) for name in ("user", "pid", "net", "mnt", "ipc")))
print(os.path.isdir({WORK!r}), os.listdir("."))
"""


@functools.cache
def detect_level() -> tuple[Level, dict[Level, str]]:
    """The best level at which code really ran here, and why each better one did not. Asked once a process."""
    reasons: dict[Level, str] = {}
    for level in (Level.NAMESPACES_CGROUP, Level.NAMESPACES_UID, Level.RLIMITS):
        if missing := missing_programs(level):
            reasons[level] = f"not installed: {', '.join(missing)}"
            continue
        outcome = run_python(PROBE, level=level)
        if not outcome.succeeded:
            reasons[level] = outcome.detail or outcome.stderr[-200:]
        elif level >= Level.NAMESPACES_UID and (shared := _shared_namespaces(outcome.stdout)):
            reasons[level] = f"shares namespaces with this process: {', '.join(shared)}"
        else:
            return level, reasons
    return Level.NONE, reasons


def _shared_namespaces(stdout: str) -> list[str]:
    theirs = stdout.splitlines()[0].split()
    names = ("user", "pid", "net", "mnt", "ipc")
    return [name for name, their in zip(names, theirs, strict=True) if os.readlink(f"/proc/self/ns/{name}") == their]


def allowed_level(*, allow_weak: bool) -> Level:
    """The level at which code may run here.

    Raises:
        ConfigError: it is below `namespaces+uid` and nobody allowed that; or there is none at all.
    """
    level, reasons = detect_level()
    if level >= Level.NAMESPACES_UID or (allow_weak and level is Level.RLIMITS):
        return level
    why = "; ".join(f"{better}: {reason}" for better, reason in reasons.items())
    if level is Level.NONE:
        raise ConfigError(
            f"reward.sandbox: this machine can run no code under another user ({why}); set reward.sandbox.url"
        )
    raise ConfigError(
        f"reward.sandbox.allow_weak: code would run with process limits only, and see files and network ({why}); "
        "install bubblewrap, set reward.sandbox.url, or set allow_weak=true if the code can be trusted"
    )


class LocalSandbox:
    """`CodeRunner` of this machine: `concurrency` runs at once, the rest waits."""

    def __init__(self, settings: Sandbox) -> None:
        """Raises ConfigError as `allowed_level` does."""
        self.level = allowed_level(allow_weak=settings.allow_weak)
        self._limits = Limits.of(settings)
        # Threads that live as long as the process: --die-with-parent watches the thread that started a run.
        self._threads = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="sandbox")

    def run(self, source: str, stdin: str = "", *, at_most_s: float = math.inf) -> Outcome:
        return self._submit(source, stdin, at_most_s, lambda: False).result()

    async def run_async(self, source: str, stdin: str = "", *, at_most_s: float = math.inf) -> Outcome:
        cancelled = threading.Event()
        try:
            return await asyncio.wrap_future(self._submit(source, stdin, at_most_s, cancelled.is_set))
        finally:
            cancelled.set()  # of no effect on a run that has ended

    def _submit(self, source: str, stdin: str, at_most_s: float, is_cancelled: Callable[[], bool]) -> Future[Outcome]:
        limits = self._limits.within(at_most_s)
        return self._threads.submit(run_python, source, stdin, limits, level=self.level, is_cancelled=is_cancelled)
