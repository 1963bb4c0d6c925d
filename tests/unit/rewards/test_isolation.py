"""The killable pool: whatever a call does, every other call is answered, and no process stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, wait
from pathlib import Path

import pytest

from mempo_ray.errors import CallFailed
from mempo_ray.rewards.isolation import MAX_RESULT_BYTES, KillablePool, Setup
from tests.fakes import hostile_scorers as hostile

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 2.0  # of a call, under a loaded machine


def nothing() -> None:
    """An initializer."""


def square(number: int) -> int:
    return number * number


def die_once(marker: str) -> str:
    """Ends its process the first time it is called with this marker."""
    if not os.path.exists(marker):
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


def print_much() -> str:
    for _ in range(64):
        print("y" * 2**20)
    os.write(1, b"z" * 2**20)
    return "printed"


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


def comes_to_be_gone(pid: int) -> bool:
    """The kernel needs a moment to end a process."""
    deadline_s = time.monotonic() + 30
    while not is_gone(pid) and time.monotonic() < deadline_s:
        os.sched_yield()
    return is_gone(pid)


def failure(future: Future) -> CallFailed:
    error = future.exception(timeout=60)
    assert isinstance(error, CallFailed), error
    return error


@pytest.fixture
def pool():
    pool = KillablePool(2, TIMEOUT_S, Setup(nothing, memory_bytes=10**9))
    yield pool
    pids = pool.pids
    pool.shutdown(cancel_futures=True)
    assert all(map(comes_to_be_gone, pids))


def test_calls_side_by_side_each_get_their_own_result(pool):
    futures = [pool.submit(square, i) for i in range(200)]
    assert [future.result(60) for future in futures] == [i * i for i in range(200)]


@pytest.mark.parametrize("name", ["loops", "backtracks", "sleeps", "exits", "segfaults", "raises", "floods"])
def test_a_hostile_call_fails_alone_with_the_right_kind(pool, name):
    function, kind = hostile.KINDS[name]
    healthy = [pool.submit(square, i) for i in range(20)]
    culprit = pool.submit(function)
    healthy += [pool.submit(square, i) for i in range(20, 40)]
    assert [future.result(60) for future in healthy] == [i * i for i in range(40)]
    assert failure(culprit).kind == kind


def test_the_reason_says_how_the_process_ended(pool):
    assert "SIGSEGV" in str(failure(pool.submit(hostile.segfaults)))
    assert "exit code 0" in str(failure(pool.submit(hostile.exits)))
    assert "reward.memory_gb" in str(failure(pool.submit(hostile.floods)))
    assert f"{MAX_RESULT_BYTES:,} bytes" in str(failure(pool.submit(bytes, MAX_RESULT_BYTES)))
    assert "ZeroDivisionError: no such reference" in str(failure(pool.submit(hostile.raises)))


def test_a_call_whose_process_somebody_else_killed_runs_again(pool, tmp_path):
    assert pool.submit(die_once, str(tmp_path / "marker")).result(60) == "survived"


def test_what_a_scorer_prints_is_bounded(pool):
    assert pool.submit(print_much).result(60) == "printed"


def test_a_result_that_only_its_process_knows_is_a_failure_and_not_an_end(pool):
    assert failure(pool.submit(unreadable)).kind == "scorer_error"
    assert pool.submit(square, 3).result(60) == 9


def unreadable():
    return lambda: None


def test_what_a_scorer_starts_ends_with_it(pool):
    pid = pool.submit(start_a_child).result(60)
    assert not is_gone(pid)
    failure(pool.submit(hostile.exits))
    failure(pool.submit(hostile.exits))
    pool.shutdown(cancel_futures=True)
    assert comes_to_be_gone(pid)


def start_a_child() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def refuse() -> None:
    raise ValueError("no such table")


def test_a_process_that_cannot_start_is_infrastructure_and_says_why():
    pool = KillablePool(1, TIMEOUT_S, Setup(refuse))
    error = failure(pool.submit(square, 1))
    assert (error.kind, "ValueError: no such table" in str(error)) == ("infrastructure", True)
    pool.shutdown()


def test_closing_ends_running_and_waiting_calls():
    pool = KillablePool(1, 600.0, Setup(nothing))
    pool.submit(square, 1).result(60)
    calls = [pool.submit(hostile.loops) for _ in range(3)]
    pool.shutdown(cancel_futures=True)
    assert not wait(calls, timeout=10).not_done
    assert pool.pids == []
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(square, 1)


ORPHAN = """
import sys
from mempo_ray.rewards.isolation import KillablePool, Setup
from tests.fakes import hostile_scorers as hostile
from tests.unit.rewards.test_isolation import nothing, square
pool = KillablePool(1, 600.0, Setup(nothing))
pool.submit(square, 1).result(60)
pool.submit(hostile.loops)
print(*pool.pids, flush=True)
sys.stdin.read()
"""


def test_an_endless_loop_ends_when_the_process_of_its_pool_is_killed():
    owner = subprocess.Popen(
        [sys.executable, "-c", ORPHAN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait(30)
    assert comes_to_be_gone(pid)
