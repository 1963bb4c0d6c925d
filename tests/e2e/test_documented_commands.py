"""Every command in the pages is exercised: as it is where that is cheap, else as the dry run or the help of it.

A command of a kind that this file does not know fails the test: say here how it is exercised.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import pytest
import typer.main
from typer.testing import CliRunner

from mempo_ray.cli import app
from mempo_ray.config.load import load_file, parse_command_line
from mempo_ray.driver import main as driver_main

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
BIN = Path(sys.executable).parent
SHARED = Path(os.environ.get("MEMPO_SHARED", ROOT.parent / "shared"))
MODELS = Path(os.environ.get("MEMPO_MODELS") or Path.home() / ".cache" / "mempo_ray" / "models")

DRY = {"python -m mempo_ray.driver", "mempo-ray train", "mempo-ray sft"}
AS_IT_IS = {"mempo-ray plan", "mempo-ray doctor", "mempo-ray dashboard", "python -m mempo_ray.config.reference"}
HELP = {"mempo-ray fetch", "mempo-ray eval", "mempo-ray ask", "mempo-ray index", "mempo-ray reward-check",
        "python -m retrieval_index", "python -m mempo_ray.tiny_policy"}  # fmt: skip
"""How a command is exercised, by its first words."""
CLOUD = {"docker", "kubectl"}
"""Programs that need a cluster: of such a command only the files of this repository that it names are looked at."""


def commands() -> Iterator[tuple[str, str]]:
    """(page, command) for each line of the pages' bash blocks; a line that ends in a backslash goes on."""
    for page in PAGES:
        for block in re.findall(r"```(?:bash|sh|console)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                command = line.partition(" #")[0].strip()
                if command and not command.startswith("#"):
                    yield page.name, command


def kind_of(words: list[str]) -> str:
    """`.venv/bin/python -m mempo_ray.driver a=b` → `python -m mempo_ray.driver`."""
    name = Path(words[0]).name
    if name == "python" and words[1] == "-m":
        return f"python -m {words[2]}"
    return f"{name} {words[1]}" if name == "mempo-ray" else name


@pytest.fixture
def workplace(tmp_path):
    """A folder where the names that the pages use for a reader's own files exist."""
    for folder in ("configs", "docs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    for name in ("my_questions.jsonl", "my_dev.jsonl"):
        rows = [{"q": f"Who mentors Boko {i}?", "a": "Sari"} for i in range(16)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_passages.jsonl").write_text(json.dumps({"id": "1", "title": "", "text": "mentor Boko Sari ."}))
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    pieces = "\n\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    (tmp_path / "my_pieces.py").write_text(pieces)
    (tmp_path / "my_reward.py").write_text(pieces)
    return tmp_path


@pytest.mark.parametrize(("page", "command"), list(dict.fromkeys(commands())))
def test_documented_command(page: str, command: str, workplace: Path):
    words = shlex.split(command)
    environment = os.environ | {"MEMPO_SHARED": str(SHARED), "PYTHONPATH": f"{workplace}{os.pathsep}{ROOT}"}
    while words and "=" in words[0]:  # VAR=value in front of a command
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    kind = kind_of(words)
    if kind == "make":
        _, *targets = words
        run(["make", "-n", *targets], ROOT, environment)
        return
    if "smollm2_cpu.yaml" in command and not (SHARED.is_dir() and (MODELS / "smollm2").is_dir()):
        pytest.skip(f"needs the shared data at {SHARED} and the models at {MODELS}")
    if kind == "python" and words[1].endswith(".py"):
        assert (ROOT / words[1]).is_file()
        return
    program = [sys.executable] if Path(words[0]).name == "python" else [str(BIN / Path(words[0]).name)]
    if kind in DRY:
        run([*program, *words[1:], "--dry-run"], workplace, environment)
    elif kind in AS_IT_IS:
        run([*program, *words[1:]], workplace, environment)
    elif kind in HELP:
        run([*program, *words[1 : len(kind.split())], "--help"], workplace, environment)
    elif kind == "ray":
        check_ray(words[1:])
    elif kind in CLOUD:
        check_files(words)
    elif kind == "source":
        assert words[1] == ".venv/bin/activate"  # of `make setup`
    elif kind == "export":
        assert all("=" in word for word in words[1:])
    else:
        pytest.fail(f"{page}: no test knows how to exercise {command!r}")


def run(words: list[str], folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Not ready on this machine" not in done.stdout or "7b" in " ".join(words), done.stdout[-500:]


def check_ray(words: list[str]) -> None:
    """Ray's own parser takes the command, whose files exist; a job's entrypoint has a configuration that validates."""
    from ray.scripts.scripts import cli

    command, context = cli, cli.make_context("ray", [], resilient_parsing=True)
    while isinstance(command, click.Group):
        name, command, words = command.resolve_command(context, words)
        assert command is not None, f"ray has no command {name or words[0]}"
        is_group = isinstance(command, click.Group)
        context = command.make_context(name, list(words), parent=context, resilient_parsing=is_group)
    check_files(words)
    entrypoint = context.params.get("entrypoint", ())
    if entrypoint:
        assert entrypoint[:3] == ("python", "-m", "mempo_ray.driver")
        parsed = parse_command_line(entrypoint[3:])
        load_file(parsed.file and ROOT / parsed.file, parsed.overrides)


def check_files(words: Iterable[str]) -> None:
    assert [word for word in words if word.startswith("configs/") and not (ROOT / word).is_file()] == []


@pytest.mark.parametrize("name", sorted(typer.main.get_command(app).commands))
def test_every_command_tells_its_use(name: str):
    told = CliRunner().invoke(app, [name, "--help"])
    assert (told.exit_code, told.output.startswith(f"Usage: root {name} ")) == (0, True)


def test_the_driver_tells_its_use(capsys):
    assert driver_main(["run.steps=1", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m mempo_ray.driver [--config FILE]")


@pytest.mark.parametrize("command", ["up --yess configs/cluster/aws.yaml", "job submitt -- true", "up configs/no.yaml"])
def test_a_mistake_in_a_command_of_ray_is_seen(command: str):
    with pytest.raises((click.UsageError, AssertionError)):
        check_ray(shlex.split(command))


@pytest.mark.parametrize(("made_for", "lock"), [((), "cpu"), ((".gpu",), "gpu")])
def test_what_make_installs_is_the_lock_of_what_the_environment_was_made_for(tmp_path, made_for, lock: str):
    for mark in made_for:
        (tmp_path / mark).touch()
    for target in ("setup", "setup-gpu", "test"):
        told = subprocess.run(
            ["make", "-n", f"VENV={tmp_path}", target], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
        ).stdout
        assert re.findall(r"-r requirements/(\w+)\.txt", told) == [lock], target
        assert ("venv --clear" in told) == (target == "setup-gpu")


def test_every_link_in_the_pages_leads_somewhere():
    links = [
        (page.name, target)
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert links == []
