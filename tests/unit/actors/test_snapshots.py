"""Published weights leave memory with their run, also where it was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mempo_ray.actors.fleet import kept_while_alive

KILLED = """
import os, sys, pathlib
from mempo_ray.actors.fleet import kept_while_alive
with kept_while_alive(pathlib.Path(sys.argv[1])):
    os.kill(os.getpid(), 9)
"""


def folder(path: Path) -> Path:
    path.mkdir()
    (path / "weights").write_bytes(b"1")
    return path


def test_a_folder_goes_with_its_run(tmp_path: Path) -> None:
    def interrupted() -> None:
        with kept_while_alive(folder(tmp_path / "mempo-a")) as kept:
            assert (kept / "weights").exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_that_of_a_killed_run_goes_with_the_next_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    killed = folder(tmp_path / "mempo-killed")
    subprocess.run([sys.executable, "-c", KILLED, str(killed)], check=False, timeout=120)
    assert killed.exists()
    with kept_while_alive(folder(tmp_path / "mempo-alive")) as alive, kept_while_alive(folder(tmp_path / "mempo-next")):
        assert alive.exists()
        assert not killed.exists()
    assert list(tmp_path.iterdir()) == []
