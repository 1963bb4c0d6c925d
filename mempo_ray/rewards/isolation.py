"""Calls that may hang, crash or flood, in processes that can be killed: an `Executor` with a deadline a call.

    submit(f, x) ──▶ queue ──▶ one thread a process ── a chunk of calls ──▶ process: one reply a call, in order
                       ▲            │
                       └────────────┴─ no reply in time, or the process ended: it is killed, and the first call without
                                       a reply is the culprit. The calls behind it had not begun: they go back.

consumes   functions and arguments that pickle, by the rules of `multiprocessing`'s spawn: importable by name
waits      `timeout_s` for each call from its beginning, `START_S` for a process to be ready
on failure the call's future raises `CallFailed`, whose kind says whose fault it was. A call whose process ended by
           itself runs again, once, in a new process: somebody else may have ended it.

A thread cannot survive `os._exit`, a segfault or an endless loop in C, and it cannot be stopped. Processes are new
interpreters (never forks of this one, which may be a Ray actor full of threads and locks), each the head of a session,
so that what a scorer starts ends with it; if this process dies, the kernel kills them.
"""

from __future__ import annotations

import ctypes
import io
import json
import math
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol

from mempo_ray.errors import CallFailed

MAX_CHUNK = 32  # calls in one message: 20 µs of passing on against calls of 5 ms
MAX_ENDS = 2  # of processes, by themselves, while they run one call: then it is the culprit
MAX_RESULT_BYTES = 1_000_000
MAX_PRINTED_CHARS = 65_536  # of a process's life; the rest of what its scorers print is dropped
START_S = 60.0  # for a new interpreter to import the scorers
MESSAGE_S = 30.0  # for one message to pass, once it has begun
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from mempo_ray.rewards.isolation import serve; serve(int(sys.argv[1]), int(sys.argv[2]))"
)


@dataclass(frozen=True)
class Setup:
    """What a process does before its first call: `initializer(*initargs)`, then no more than `memory_bytes` of data."""

    initializer: Callable[..., object]
    initargs: tuple[Any, ...] = ()
    memory_bytes: int = 2 * 10**9


@dataclass(eq=False)
class _Call:
    payload: bytes
    future: Future = field(default_factory=Future)
    num_ends: int = 0


class ProcessEnded(Exception):
    """The process is gone, or has written something that is no reply."""


class ScorerProcess(Protocol):
    """A process that calls functions for one thread of the pool; any thread may kill it."""

    pid: int

    def prepare(self, setup: Setup) -> None:
        """Raises CallFailed (infrastructure): it does not start, or the initializer raises."""
        ...

    def run(self, payloads: Sequence[bytes], timeout_s: float) -> Iterator[bytes]:
        """The replies to calls, in order.

        Raises:
            CallFailed: no reply to the next call within `timeout_s`.
            ProcessEnded: no reply will come.
        """
        ...

    def kill(self) -> None: ...

    def wait(self) -> None:
        """Returns when it is gone, after `kill`."""
        ...


class KillablePool(Executor):
    """`submit` as of any executor; the future's result, or `CallFailed`."""

    def __init__(
        self,
        num_processes: int,
        timeout_s: float,
        setup: Setup,
        new_process: Callable[[], ScorerProcess] | None = None,
    ) -> None:
        self._new_process = new_process or LocalProcess
        self._num_processes = num_processes
        self._timeout_s = timeout_s
        self._setup = setup
        self._calls: deque[_Call] = deque()
        self._changed = threading.Condition()
        self._processes: set[ScorerProcess] = set()
        self._closed = self._cancelled = False
        self._threads = [
            threading.Thread(target=self._supervise, name=f"scorer-process-{i}", daemon=True)
            for i in range(num_processes)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """Raises RuntimeError: the pool is closed. Whatever pickling raises, it raises here."""
        call = _Call(pickle.dumps((fn, args, kwargs), protocol=5))
        with self._changed:
            if self._closed:
                raise RuntimeError("the pool of scorer processes is closed")
            self._calls.append(call)
            self._changed.notify()
        return call.future

    @property
    def pids(self) -> list[int]:
        """Of the processes that live now."""
        with self._changed:
            return [process.pid for process in self._processes]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """With `cancel_futures` the queue is cancelled and running calls are killed; else they finish first."""
        with self._changed:
            self._closed = True
            if cancel_futures:
                self._cancelled = True
                while self._calls:
                    _close(self._calls.popleft().future)
                for process in self._processes:
                    process.kill()
            self._changed.notify_all()
        if wait:
            for thread in self._threads:
                thread.join()

    # -- one thread a process -------------------------------------------------------------------------

    def _supervise(self) -> None:
        """Take a chunk, have it run, settle each call; the process is replaced when it has to be killed."""
        process: ScorerProcess | None = None
        while chunk := self._take():
            waiting = deque(chunk)
            try:
                if process is None:
                    process = self._start()
                for reply in process.run([call.payload for call in chunk], self._timeout_s):
                    _settle(waiting.popleft(), reply)
                continue
            except CallFailed as error:
                if error.kind == "infrastructure":  # no process, so nobody behind is better off
                    while waiting:
                        waiting.popleft().future.set_exception(error)
                else:
                    waiting.popleft().future.set_exception(error)
            except ProcessEnded as error:
                waiting[0].num_ends += not self._cancelled
                if waiting[0].num_ends == MAX_ENDS:
                    waiting.popleft().future.set_exception(CallFailed(str(error), "scorer_error"))
            self._end(process)
            process = None
            self._give_back(waiting)
        self._end(process)

    def _take(self) -> list[_Call]:
        """The next calls for one process: its share of the queue, at most MAX_CHUNK. Empty: the pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._closed)
            size = min(MAX_CHUNK, math.ceil(len(self._calls) / self._num_processes))
            chunk = [self._calls.popleft() for _ in range(size)]
        live = [call for call in chunk if call.future.running() or call.future.set_running_or_notify_cancel()]
        return live or (self._take() if chunk else [])

    def _give_back(self, calls: Sequence[_Call]) -> None:
        """To the head of the queue."""
        with self._changed:
            if not self._cancelled:
                self._calls.extendleft(reversed(calls))
                self._changed.notify_all()
                return
        for call in calls:
            _close(call.future)

    def _start(self) -> ScorerProcess:
        try:
            process = self._new_process()
        except OSError as error:  # no memory, descriptors or processes left
            raise CallFailed(f"a scorer process did not start: {error}", "infrastructure") from None
        with self._changed:
            self._processes.add(process)
            if self._cancelled:
                process.kill()
        try:
            process.prepare(self._setup)
        except CallFailed:
            self._end(process)
            raise
        return process

    def _end(self, process: ScorerProcess | None) -> None:
        if process is not None:
            process.kill()
            process.wait()
            with self._changed:
                self._processes.discard(process)


def _settle(call: _Call, reply: bytes) -> None:
    try:
        succeeded, value = pickle.loads(reply)
    except Exception as error:  # noqa: BLE001 - its types may be known in its process only
        succeeded, value = False, f"the result cannot be read here: {type(error).__name__}: {error}"
    if succeeded:
        call.future.set_result(value)
    else:
        call.future.set_exception(CallFailed(value, "scorer_error"))


def _close(future: Future) -> None:
    """Nobody will run it any more."""
    if future.cancel():
        future.set_running_or_notify_cancel()
    elif not future.cancelled():
        future.set_exception(CallFailed("the pool of scorer processes was closed", "infrastructure"))


class LocalProcess:
    """One interpreter at the other end of a socket. Used by one thread; `kill` by any."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        for side in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, side, struct.pack("ll", int(MESSAGE_S), 0))
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", _CHILD, str(theirs.fileno()), str(os.getpid()), json.dumps(sys.path)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self.pid = self._popen.pid

    def prepare(self, setup: Setup) -> None:
        try:
            self._send(pickle.dumps(setup))
            ready, text = pickle.loads(self._receive(START_S))
        except (ProcessEnded, CallFailed) as error:
            raise CallFailed(f"a scorer process did not start: {error}", "infrastructure") from None
        if not ready:
            raise CallFailed(f"a scorer process did not start: {text}", "infrastructure")

    def run(self, payloads: Sequence[bytes], timeout_s: float) -> Iterator[bytes]:
        self._send(pickle.dumps(payloads, protocol=5))
        for _ in payloads:
            yield self._receive(timeout_s)

    def kill(self) -> None:
        """With all that it started. It is not reaped yet, so its number is still its own."""
        if self._popen.returncode is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has not come to be the head of a session
                self._popen.kill()

    def wait(self) -> None:
        self._popen.wait()
        self._connection.close()

    def _send(self, message: bytes) -> None:
        try:
            self._connection.send_bytes(message)
        except OSError as error:
            raise ProcessEnded(self._how_it_ended(error)) from None

    def _receive(self, timeout_s: float) -> bytes:
        try:
            if self._connection.poll(timeout_s):
                return self._connection.recv_bytes(2 * MAX_RESULT_BYTES)
        except (EOFError, OSError) as error:
            raise ProcessEnded(self._how_it_ended(error)) from None
        raise no_answer(timeout_s)

    def _exit_code(self, patience_s: float = 1.0) -> int | None:
        """-n: ended by signal n. It is not reaped: until `kill` its number must stay its own, and its group's."""
        deadline_s = time.monotonic() + patience_s
        while True:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            if time.monotonic() > deadline_s:
                return None
            time.sleep(0.01)

    def _how_it_ended(self, error: Exception) -> str:
        code = self._exit_code()
        if code is None:
            return f"the scorer's process does not answer any more: {type(error).__name__}"
        if code < 0:
            return f"the scorer's process was ended by {signal.Signals(-code).name}"
        return f"the scorer ended its process with exit code {code}"


def no_answer(timeout_s: float) -> CallFailed:
    return CallFailed(f"no answer within {timeout_s:g} s (reward.timeout_s); its process was killed", "timeout")


# -- in the process -----------------------------------------------------------------------------------------


def serve(fd: int, parent: int) -> None:
    """Obey the pool of process `parent` at the other end of `fd` until it closes."""
    _die_with(parent)
    connection = Connection(fd)
    sys.stdout = sys.stderr = _Printed()
    setup: Setup = pickle.loads(connection.recv_bytes())
    connection.send_bytes(reply_of(setup.initializer, *setup.initargs))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (setup.memory_bytes, setup.memory_bytes))
    while True:
        try:
            payloads = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        for payload in payloads:
            connection.send_bytes(reply_of(run_call, payload))


def run_call(payload: bytes) -> Any:
    function, args, kwargs = pickle.loads(payload)
    return function(*args, **kwargs)


def reply_of(function: Callable[..., Any], *args: Any) -> bytes:
    """(True, result) or (False, what went wrong), pickled; never more than MAX_RESULT_BYTES and a little."""
    try:
        file = _Bounded()
        pickle.Pickler(file, protocol=5).dump((True, function(*args)))
        return file.getvalue()
    except MemoryError:
        return pickle.dumps((False, "MemoryError: it wants more than reward.memory_gb"))
    except BaseException as error:  # noqa: BLE001 - sys.exit and KeyboardInterrupt are no answers either
        return pickle.dumps((False, f"{type(error).__name__}: {error}"[:2000]))


class _Bounded(io.BytesIO):
    """Refuses to grow above MAX_RESULT_BYTES: a result of 1 GB is neither copied nor sent."""

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > MAX_RESULT_BYTES:
            raise ValueError(f"the result has more than {MAX_RESULT_BYTES:,} bytes")
        return super().write(data)


class _Printed(io.TextIOBase):
    """What scorers print, up to a limit; what they write to the descriptors behind Python's back is dropped."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(2), "w", buffering=1)
        self._left = MAX_PRINTED_CHARS
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)

    def write(self, text: str) -> int:
        if self._left > 0:
            self._out.write(text[: self._left])
            self._left -= len(text)
            if self._left <= 0:
                self._out.write("\n[a scorer process prints too much: the rest is dropped]\n")
        return len(text)

    def flush(self) -> None:
        self._out.flush()


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it is gone: an endless loop reads no EOF."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before we asked
            os._exit(1)
