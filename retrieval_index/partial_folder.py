"""The temporary folder of a build: locked while it is written, found again after a kill, renamed when it is whole."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from retrieval_index.errors import BuildError, BuildRunning, CorpusError


@contextmanager
def partial_folder(out_dir: Path) -> Generator[Path]:
    """The locked temporary folder of `out_dir`. Bad input removes it, unless an earlier run has left its work there;
    any other failure leaves it for the next run."""
    partial = out_dir.with_name(f".{out_dir.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = os.open(partial, os.O_RDONLY)
        is_new = not any(partial.iterdir())
    except OSError as error:
        raise BuildError(f"cannot write {partial}: {error.strerror}", "out", "choose another folder") from error
    try:
        _lock(lock, partial, out_dir)
        yield partial
    except BuildRunning:
        raise
    except (CorpusError, BuildError):
        if is_new:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _lock(descriptor: int, partial: Path, out_dir: Path) -> None:
    """The kernel's lock on the folder ends with the process that holds it, however that ends."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked = partial.exists() and os.fstat(descriptor).st_ino == partial.stat().st_ino
    except BlockingIOError:
        locked = False
    if not locked:  # or the other build has renamed it since we opened it
        raise BuildRunning(f"another process is building {out_dir}", "out", "wait for it, or choose another folder")


def replace_folder(partial: Path, out_dir: Path) -> None:
    """Put the finished folder in place; an old one steps aside first, since a folder is not renamed over another."""
    old = out_dir.with_name(f".{out_dir.name}.old")
    shutil.rmtree(old, ignore_errors=True)  # of a build that was killed right here
    if out_dir.exists():
        out_dir.rename(old)
    partial.rename(out_dir)
    shutil.rmtree(old, ignore_errors=True)


def sync_tree(folder: Path) -> None:
    """What the rename will show is on disk before it."""
    for path in [*(path for path in folder.rglob("*") if path.is_file()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
