"""Who may import what. Layers are import-linter's; heavy libraries, by file, are here."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "mempo_ray").rglob("*.py"), *(ROOT / "retrieval_index").rglob("*.py")])

ALLOWED = {
    "ray": ["mempo_ray/actors/*", "mempo_ray/placement/reserve.py", "mempo_ray/placement/ray_state.py",
            "mempo_ray/placement/elastic.py",
            "retrieval_index/distributed.py", "retrieval_index/serving_pool.py"],
    "vllm": ["mempo_ray/generation/vllm_*.py"],
    "faiss": ["retrieval_index/*"],
    "torch": ["mempo_ray/training/*", "mempo_ray/generation/vllm_*.py", "mempo_ray/algo/policy_loss.py",
              "mempo_ray/algo/kl.py", "mempo_ray/algo/correction.py", "mempo_ray/actors/policy.py",
              "mempo_ray/tiny_policy.py", "mempo_ray/fetch.py", "retrieval_index/encoder.py"],
    "transformers": ["mempo_ray/training/model.py", "mempo_ray/training/export.py",
                     "mempo_ray/training/reward_model.py", "mempo_ray/tiny_policy.py",
                     "mempo_ray/fetch.py", "retrieval_index/encoder.py"],
    "mcp": ["mempo_ray/agent/tools/mcp.py"],
    "accelerate": ["mempo_ray/training/model.py", "mempo_ray/observability/metrics.py"],
}  # fmt: skip
"""Library → the files that may import it. A new entry is a decision, to be made in docs/architecture.md first."""

LIGHT = ("mempo_ray.config.schema", "mempo_ray.placement.plan", "mempo_ray.agent.episode", "mempo_ray.agent.prompt",
         "mempo_ray.batching.scheduler", "mempo_ray.batching.packing", "mempo_ray.rewards.registry",
         "mempo_ray.contracts")  # fmt: skip
PREFLIGHT = ("mempo_ray.preflight", "mempo_ray.driver", "mempo_ray.cli")
HEAVY = {"torch", "ray", "transformers", "vllm"}


def imports_of(file: Path) -> Iterator[str]:
    """Top packages that a file imports anywhere, functions included."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("library", ALLOWED)
def test_a_heavy_library_is_imported_only_where_the_architecture_says(library):
    users = [file.relative_to(ROOT).as_posix() for file in SOURCES if library in imports_of(file)]
    strangers = [user for user in users if not any(fnmatch(user, pattern) for pattern in ALLOWED[library])]
    assert strangers == []


@pytest.mark.parametrize("modules", [LIGHT, PREFLIGHT], ids=["light", "preflight"])
def test_decisions_and_checks_load_no_heavy_library(modules):
    """Done-when 7, and the same for all that runs before a user's mistake is reported."""
    code = f"import sys, {', '.join(modules)}; print(*({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT, check=True
    )
    assert done.stdout.split() == []


def test_the_layers_hold():
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache"], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout


def test_no_file_is_a_drawer():
    names = {"utils.py", "helpers.py", "common.py", "misc.py"}
    assert [file for file in SOURCES if file.name in names] == []


def test_only_reserve_makes_placement_groups():
    users = [file.name for file in SOURCES if "placement_group(" in file.read_text(encoding="utf-8")]
    assert users == ["reserve.py"]


def test_driver_waits_on_no_ray_reference():
    for name in ("driver.py", "session.py", "experience.py", "cold_start.py"):
        assert "ray.get" not in (ROOT / "mempo_ray" / name).read_text(encoding="utf-8")
