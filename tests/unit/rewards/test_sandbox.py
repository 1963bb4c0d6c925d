"""What code in the sandbox cannot do, tried for real; where the machine's level is weak, that it is refused."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time

import psutil
import pytest

from mempo_ray.config.schema import Sandbox
from mempo_ray.errors import ConfigError
from mempo_ray.rewards.sandbox import local
from mempo_ray.rewards.sandbox.levels import Level
from mempo_ray.rewards.sandbox.local import CPU_USED_UP, LocalSandbox, allowed_level, classify, detect_level, run_python
from mempo_ray.rewards.sandbox.outcome import Limits, Outcome, Status

LIMITS = Limits(run_s=20, memory_bytes=512 << 20, output_bytes=10_000, files_bytes=8 << 20, processes=20)
SHORT = Limits(run_s=1, wall_s=1.5)


@pytest.fixture
def strong() -> Level:
    """Skips where this machine's sandbox is weak, after the refusal; no process is left behind either way."""
    level, reasons = detect_level()
    if level < Level.NAMESPACES_UID:
        with pytest.raises(ConfigError, match=r"reward\.sandbox"):
            run_python("print(1)")
        pytest.skip(f"refused, as it must be: level {level} ({reasons})")
    return level


@pytest.fixture(autouse=True)
def _leaves_no_process():
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    _, alive = psutil.wait_procs(left, timeout=5)
    assert alive == []


def run(source: str, stdin: str = "", limits: Limits = LIMITS) -> Outcome:
    return run_python(source, stdin, limits)


def test_a_program_reads_stdin_and_its_exit_code_and_both_outputs_come_back(strong):
    outcome = run("import sys\nprint(input()[::-1])\nprint('so', file=sys.stderr)\nsys.exit(3)", "olleh\n")
    assert (outcome.status, outcome.exit_code, outcome.stdout, outcome.stderr) == (Status.OK, 3, "hello\n", "so\n")
    assert not outcome.succeeded


def test_a_large_stdin_that_the_program_does_not_read_is_no_failure(strong):
    assert run("print(1)", "x" * 1_000_000).stdout == "1\n"


def test_code_is_never_root_and_sees_nothing_but_the_system_and_an_empty_folder(strong):
    outcome = run(
        "import json, os\nprint(json.dumps([os.getuid(), os.listdir('.'), os.listdir('/'), list(os.environ)]))"
    )
    uid, folder, root, environment = json.loads(outcome.stdout)
    assert uid != 0
    assert folder == []
    assert not {"etc", "home", "var"} & set(root)
    assert set(environment) <= {"PATH", "HOME", "TMPDIR", "LANG", "PWD"}


def test_no_file_descriptor_is_inherited(strong):
    with open(os.devnull, "wb") as mine:
        os.set_inheritable(mine.fileno(), True)
        outcome = run(
            "import os\nfor fd in range(3, 1024):\n"
            "  try: print(fd, os.readlink(f'/proc/self/fd/{fd}'))\n"
            "  except OSError: pass"
        )
    assert outcome.stdout == ""


def test_files_of_the_parent_cannot_be_read(strong, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("open to all")
    secret.chmod(0o644)
    outcome = run(f"print(open({str(secret)!r}).read())")
    assert "FileNotFoundError" in outcome.stderr
    assert "open to all" not in outcome.stdout + outcome.stderr


def test_the_environment_of_the_parent_cannot_be_read(strong, monkeypatch):
    monkeypatch.setenv("MEMPO_TEST_SECRET", "hunter2")
    outcome = run(
        "import glob, os\nprint(os.environ.get('MEMPO_TEST_SECRET'))\n"
        "for name in glob.glob('/proc/*/environ'):\n"
        "  try: print(open(name, 'rb').read())\n"
        "  except OSError: pass"
    )
    assert outcome.exit_code == 0
    assert "hunter2" not in outcome.stdout


def test_processes_of_the_machine_cannot_be_seen_or_signalled(strong):
    outcome = run(f"import os\nprint(len([p for p in os.listdir('/proc') if p.isdigit()]))\nos.kill({os.getpid()}, 9)")
    assert int(outcome.stdout) < 6
    assert "ProcessLookupError" in outcome.stderr


@pytest.mark.parametrize("path", ["/x", "/usr/x", "/dev/x", "/dev/shm/x", "/tmp/x", "/proc/sys/kernel/hostname"])
def test_nothing_can_be_written_outside_the_working_folder(strong, path):
    assert run(f"open({path!r}, 'w').write('x')").exit_code == 1


def test_the_working_folder_can_be_written_and_is_empty_again_in_the_next_run(strong):
    write = "open('mine', 'w').write('x'); import os; print(os.listdir('.'))"
    assert [run(write).stdout, run("import os; print(os.listdir('.'))").stdout] == ["['mine']\n", "[]\n"]


def test_the_null_device_can_be_written(strong):
    assert run("open('/dev/null', 'w').write('x')").exit_code == 0


def test_the_working_folder_has_a_size(strong):
    outcome = run("for i in range(40):\n  open(str(i), 'wb').write(bytes(1 << 20))")
    assert outcome.exit_code == 1
    assert "No space left" in outcome.stderr


def test_a_loopback_port_of_the_machine_cannot_be_reached(strong):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        outcome = run(f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)")
        assert "ConnectionRefusedError" in outcome.stderr
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_fork_bomb_stops_at_the_process_limit(strong):
    outcome = run(
        "import os, time\ncount = 0\n"
        "for _ in range(200):\n"
        "  try: pid = os.fork()\n"
        "  except OSError: break\n"
        "  if pid == 0: time.sleep(600); os._exit(0)\n"
        "  count += 1\n"
        "print(count)"
    )
    assert outcome.status is Status.OK
    assert 0 < int(outcome.stdout) < LIMITS.processes


def test_two_runs_do_not_share_one_process_limit(strong):
    """Both hold 12 of 20 at the same time."""
    hold = (
        "import os, time\nfor _ in range(12):\n  if os.fork() == 0: time.sleep(1); os._exit(0)\nos.wait(); print('ok')"
    )
    sandbox = LocalSandbox(Sandbox(concurrency=2, processes=20))

    async def both() -> list[Outcome]:
        return await asyncio.gather(sandbox.run_async(hold), sandbox.run_async(hold))

    assert [outcome.stdout for outcome in asyncio.run(both())] == ["ok\n", "ok\n"]


def test_a_process_that_leaves_its_group_ends_with_the_program(strong):
    outcome = run("import os, time\nif os.fork() == 0:\n  os.setsid(); time.sleep(600)\nprint('done')")
    assert (outcome.stdout, outcome.seconds < 10) == ("done\n", True)


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("sum(range(10**12))", Status.TIMEOUT),
        ("import re; re.match('(a+)+b', 'a' * 60)", Status.TIMEOUT),
        ("while True: pass", Status.TIMEOUT),
        ("import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", Status.KILLED),
    ],
)
def test_an_endless_loop_in_c_or_in_python_ends_at_its_cpu_seconds(strong, source, status):
    outcome = run(source, limits=Limits(run_s=1, wall_s=60))
    assert (outcome.status, outcome.detail) == (status, CPU_USED_UP if status is Status.TIMEOUT else "SIGKILL")


def test_a_program_that_sleeps_ends_by_the_clock(strong):
    outcome = run("import time; time.sleep(600)", limits=SHORT)
    assert (outcome.status, outcome.detail) == (Status.TIMEOUT, "still running after 1.5 s")
    assert outcome.seconds < 10


def test_a_program_that_waits_for_its_processor_is_not_late(strong):
    """More than its seconds by the clock, as on a busy machine."""
    outcome = run("import time; time.sleep(1.2); print('done')", limits=Limits(run_s=1, wall_s=60))
    assert (outcome.stdout, outcome.succeeded, outcome.seconds > 1) == ("done\n", True, True)


def test_an_allocation_of_10_gb_ends_at_the_memory_limit(strong):
    assert run("bytearray(10 << 30)").status is Status.MEMORY


def test_processes_that_are_too_large_together_end_at_the_memory_limit(strong):
    if strong < Level.NAMESPACES_CGROUP:
        pytest.skip(f"needs cgroups: {detect_level()[1]}")
    outcome = run(
        "import os, time\nfor _ in range(4):\n  if os.fork() == 0: x = bytearray(400 << 20); time.sleep(600)\nos.wait()"
    )
    assert outcome.status is Status.MEMORY


def test_a_gigabyte_of_output_ends_at_the_output_limit_and_fills_no_memory(strong):
    outcome = run("import os\nfor _ in range(1024): os.write(1, b'x' * (1 << 20))")
    assert (outcome.status, len(outcome.stdout)) == (Status.OUTPUT_LIMIT, LIMITS.output_bytes)


def test_output_that_is_not_text_is_no_failure(strong):
    assert run("import os; os.write(1, bytes([255, 65]))").stdout == "\ufffdA"


def test_a_segfault_is_the_code_s_own_doing(strong):
    outcome = run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert (outcome.status, outcome.detail) == (Status.KILLED, "SIGSEGV")


def test_code_cannot_pretend_that_the_sandbox_failed(strong):
    outcome = run("import sys; print('bwrap: no such file', file=sys.stderr); sys.exit(1)")
    assert (outcome.status, outcome.exit_code) == (Status.OK, 1)


def test_a_sandbox_that_does_not_start_is_no_result_of_the_code(strong, monkeypatch):
    monkeypatch.setattr(local, "command", lambda *args: ["/bin/sh", "-c", "echo broken >&2; exit 1"])
    outcome = run("print(1)")
    assert (outcome.status, outcome.exit_code) == (Status.SANDBOX_FAILED, None)
    assert "broken" in outcome.detail


def test_no_user_namespace_can_be_made_inside(strong):
    assert "unshare failed" in run("import subprocess; subprocess.run(['unshare', '-Ur', 'true'])").stderr


def test_what_the_code_defines_is_in_main(strong):
    source = (
        "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A, __name__, '_begin' in dir())"
    )
    assert run(source).stdout.startswith("True __main__")


async def test_the_async_form_blocks_no_loop(strong):
    task = asyncio.create_task(LocalSandbox(Sandbox()).run_async("import time; time.sleep(0.3); print(1)"))
    ticks = 0
    while not task.done():
        await asyncio.sleep(0.01)
        ticks += 1
    assert task.result().stdout == "1\n"
    assert ticks > 5


async def test_a_cancelled_run_ends_its_processes_and_gives_its_place_back(strong):
    sandbox = LocalSandbox(Sandbox(concurrency=1, run_s=60))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sandbox.run_async("import os\nos.fork()\nwhile True: pass"), 0.3)
    began = time.monotonic()
    assert (await sandbox.run_async("print(1)")).stdout == "1\n"
    assert time.monotonic() - began < 20


def test_weak_isolation_is_refused_until_it_is_allowed(monkeypatch):
    monkeypatch.setattr(local, "detect_level", lambda: (Level.RLIMITS, {Level.NAMESPACES_UID: "not installed: bwrap"}))
    with pytest.raises(ConfigError, match=r"allow_weak.*not installed: bwrap.*install bubblewrap"):
        LocalSandbox(Sandbox())
    assert allowed_level(allow_weak=True) is Level.RLIMITS


def test_no_isolation_at_all_cannot_be_allowed(monkeypatch):
    monkeypatch.setattr(local, "detect_level", lambda: (Level.NONE, {Level.RLIMITS: "it runs as root"}))
    with pytest.raises(ConfigError, match=r"it runs as root.*url"):
        allowed_level(allow_weak=True)


def test_levels_have_the_names_of_the_documents():
    assert [str(level) for level in Level] == ["none", "rlimits", "namespaces+uid", "namespaces+cgroup"]


@pytest.mark.parametrize(
    ("code", "stderr", "status"),
    [
        (0, "", Status.OK),
        (1, "Traceback\nMemoryError\n", Status.MEMORY),
        (1, "MemoryError was printed\nbut not last\n", Status.OK),
        (-11, "", Status.KILLED),
        (139, "", Status.KILLED),
        (152, "", Status.TIMEOUT),
        (255, "", Status.OK),
    ],
)
def test_exit_codes_are_told_apart(code, stderr, status):
    assert classify(code, stderr)[0] is status
