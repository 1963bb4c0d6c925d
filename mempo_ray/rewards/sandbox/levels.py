"""How code is shut in: command lines, cgroups, and the level that this machine really gives.

    level               the code sees                                        a process limit binds
    namespaces+cgroup   its own user, processes, network, files, IPC         by cgroup, and by user
    namespaces+uid      the same                                             by user (never 0)
    rlimits             the machine's files, network and processes           where it does not run as root

Each level starts one more program around the interpreter:

    sh (enter cgroups) → bwrap → [as root: setpriv → bwrap] → python PRELUDE → the code

Root makes the outer namespaces, where it may mount an interpreter that lies in its own folder; setpriv then leaves uid
0, and a second bwrap makes the user namespace, in which no further one can be made. A plain user gets all from one
bwrap. Inside a user namespace of its own, RLIMIT_NPROC counts this run's processes alone (Linux ≥ 5.14).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Generator, Sequence
from enum import IntEnum
from pathlib import Path

from mempo_ray.errors import InfrastructureError
from mempo_ray.rewards.sandbox.outcome import Limits

NOBODY = "65534"
WORK = "/box"
PYTHON = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))  # of a venv: the one behind it
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": WORK, "TMPDIR": WORK, "LANG": "C.UTF-8"}

CGROUPS = Path("/sys/fs/cgroup")
REMOVE_S = 2.0  # how long the kernel may take to empty a cgroup whose processes were killed
SPARE_PROCESSES = 8  # of a cgroup: the programs around the interpreter


class Level(IntEnum):
    """How far code is shut in. NONE: it cannot be run at all."""

    NONE = 0
    RLIMITS = 1
    NAMESPACES_UID = 2
    NAMESPACES_CGROUP = 3

    def __str__(self) -> str:
        return self.name.lower().replace("_", "+")


PRELUDE = """
def _begin(marker, code, run_s, memory, processes, files):
    import os, resource, sys
    with open(code, encoding="utf-8") as file:
        source = file.read()
    for name, limit in dict(CORE=0, CPU=run_s, FSIZE=files, NOFILE=64, AS=memory, NPROC=processes).items():
        kind = getattr(resource, "RLIMIT_" + name)
        given = resource.getrlimit(kind)[1]
        limit = limit if given == resource.RLIM_INFINITY else min(limit, given)
        spare = name == "CPU" and limit != given  # SIGXCPU tells why; then comes SIGKILL
        resource.setrlimit(kind, (limit, limit + spare))
    sys.argv = ["main.py"]
    os.write(marker, b"started")
    os.close(marker)
    return source

exec(compile(_begin(*map(int, __import__("sys").argv[1:])), "main.py", "exec"))
"""
"""Runs in the sandbox's interpreter before the code: reads it, limits itself for good, and says that it got so far.
Whoever sees no 'started' knows that the sandbox failed, whatever the code would like to print."""


def command(level: Level, marker_fd: int, source_fd: int, limits: Limits, cgroups: Sequence[Path] = ()) -> list[str]:
    """The command line that runs the source behind `source_fd` at `level`."""
    numbers = (marker_fd, source_fd, math.ceil(limits.run_s), limits.memory_bytes, limits.processes,
               limits.files_bytes)  # fmt: skip
    python = [str(PYTHON), "-I", "-S", "-B", "-c", PRELUDE, *map(str, numbers)]
    root = os.geteuid() == 0
    if level is Level.RLIMITS:
        return [*(_leave_root() if root else ()), *python]
    inner = [*_leave_root(), "bwrap", *_USER, "--dev-bind", "/", "/", "--"] if root else []
    around = _namespaces(root, limits)
    return [*_enter(cgroups), *around, *inner, *python]


_USER = ("--unshare-user", "--disable-userns", "--uid", NOBODY, "--gid", NOBODY)
_ROOT = ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP")


def _leave_root() -> list[str]:
    return ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", "--no-new-privs",
            "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all"]  # fmt: skip


def _enter(cgroups: Sequence[Path]) -> list[str]:
    """A shell that moves itself into each cgroup and becomes the rest of the command line."""
    script = "; ".join(f'echo 0 > "${i}/cgroup.procs" || exit 97' for i in range(1, len(cgroups) + 1))
    shift = f"shift {len(cgroups)}"
    return ["/bin/sh", "-c", f'{script}; {shift}; exec "$@"', "sh", *map(str, cgroups)] if cgroups else []


def _namespaces(root: bool, limits: Limits) -> list[str]:
    """bubblewrap: namespaces, and a file system of /usr, the interpreter, and an empty working folder."""
    mounts = ["--ro-bind", "/usr", "/usr"]
    for folder in ("/bin", "/lib", "/lib64"):
        if os.path.islink(folder):
            mounts += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            mounts += ["--ro-bind", folder, folder]
    prefix = Path(os.path.realpath(sys.base_prefix))
    if not prefix.is_relative_to("/usr"):
        for parent in reversed(prefix.parents[:-1]):  # by hand: bwrap's own would be closed to other users
            mounts += ["--perms", "0755", "--dir", str(parent)]
        mounts += ["--ro-bind", str(prefix), str(prefix)]
    mounts += ["--proc", "/proc", "--dev", "/dev", "--dir", "/tmp"]
    mounts += ["--perms", "0777", "--size", str(limits.files_bytes), "--tmpfs", WORK, "--chdir", WORK]
    mounts += ["--remount-ro", "/dev", "--remount-ro", "/"]
    variables = itertools.chain.from_iterable(("--setenv", name, value) for name, value in ENVIRONMENT.items())
    return ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
            "--die-with-parent", "--new-session", *(_ROOT if root else _USER), "--clearenv", *variables, *mounts,
            "--"]  # fmt: skip


@contextlib.contextmanager
def cgroups_of(limits: Limits) -> Generator[tuple[Path, ...], None, None]:
    """A cgroup for one run (version 2), or one each for its processes and its memory (version 1).

    At the end whatever is left in it is killed, and it is removed.

    Raises:
        InfrastructureError: none can be made here, with the reason; or one could not be emptied.
    """
    name = f"mempo-sandbox-{secrets.token_hex(8)}"
    made: list[Path] = []
    try:
        try:
            for parent, files in _cgroup_parents(limits):
                group = parent / name
                group.mkdir()
                made.append(group)
                for file, value in files.items():
                    (group / file).write_text(str(value))
        except OSError as error:
            raise InfrastructureError(f"no cgroup can be made: {error}") from error
        yield tuple(made)
    finally:
        for group in made:
            _remove(group)


def _cgroup_parents(limits: Limits) -> list[tuple[Path, dict[str, int]]]:
    """Where this process may make cgroups, and which limits go in which."""
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    processes = {"pids.max": limits.processes + SPARE_PROCESSES}
    if (CGROUPS / "cgroup.controllers").exists():
        return [(_existing(CGROUPS, own.get("", "/")), processes | {"memory.max": limits.memory_bytes})]
    memory = {"memory.limit_in_bytes": limits.memory_bytes}
    parts = (("pids", processes), ("memory", memory))
    return [(_existing(CGROUPS / part, own.get(part, "/")), files) for part, files in parts]


def _existing(mount: Path, path: str) -> Path:
    """In a container the path may be the host's, and the mount show this container's own part."""
    return mount / path.lstrip("/") if (mount / path.lstrip("/")).is_dir() else mount


def num_memory_kills(cgroups: Sequence[Path]) -> int:
    """Processes that the kernel killed in these cgroups for want of memory."""
    for group, file in itertools.product(cgroups, ("memory.events", "memory.oom_control")):
        if (group / file).exists():
            fields = dict(line.split() for line in (group / file).read_text().splitlines())
            return int(fields.get("oom_kill", 0))
    return 0


def _remove(group: Path) -> None:
    deadline = time.monotonic() + REMOVE_S
    while True:
        for pid in (group / "cgroup.procs").read_text().split():
            _kill(int(pid))
        try:
            return group.rmdir()
        except OSError as error:
            if time.monotonic() > deadline:
                raise InfrastructureError(f"{group} cannot be emptied: {error}") from error
            time.sleep(0.005)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        os.kill(pid, signal.SIGKILL)


def missing_programs(level: Level) -> list[str]:
    """Programs of `level` that are not installed."""
    needed = (["bwrap"] if level >= Level.NAMESPACES_UID else []) + (["setpriv"] if os.geteuid() == 0 else [])
    return [program for program in needed if shutil.which(program) is None]
