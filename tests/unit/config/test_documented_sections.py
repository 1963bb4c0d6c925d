"""Sections of a configuration that the pages show are ones that load; their Python runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from mempo_ray.config.load import build
from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Scored
from mempo_ray.rewards.contract import Response
from mempo_ray.rewards.registry import load_manager
from mempo_ray.rewards.styles.api import load_template

DOCS = Path(__file__).parents[3] / "docs"
SECTIONS = [
    (page.name, block)
    for page in (DOCS / "rewards.md", DOCS / "migrating-from-verl.md")
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
]


@pytest.mark.parametrize(("page", "block"), SECTIONS)
def test_a_shown_section_loads(page, block):
    assert build(yaml.safe_load(block)).reward


def test_the_shown_judge_template_renders(tmp_path):
    (block,) = re.findall(r"```jinja\n(.*?)```", (DOCS / "rewards.md").read_text(encoding="utf-8"), re.DOTALL)
    path = tmp_path / "judge.jinja"
    path.write_text(block)
    text = load_template("judge.template", str(path)).render(question="Where?", golds=[["Paris"]], answer=None)
    assert "Right answers: Paris\nAnswer: none" in text


def test_the_shown_manager_scores():
    page = (DOCS / "migrating-from-verl.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(block, "migrating-from-verl.md", "exec"), {})
    score = load_manager(Reward(manager="mine")).score(Response("nq", (("Paris",),), ("t",), "Paris", num_tokens=3))
    assert score == Scored(1.0, {"length": 3})
