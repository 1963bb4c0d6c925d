"""The catalogue of metrics: one entry a name, one name a scrape, and the page that is made from it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from mempo_ray.observability.catalogue import SECTIONS, find, live, markdown
from mempo_ray.observability.progress import SHOWN
from mempo_ray.observability.report import CURVES

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
METRICS = [metric for section in SECTIONS for metric in section.metrics]


def test_the_page_is_what_the_catalogue_says():
    assert PAGE.read_text(encoding="utf-8") == markdown()


@pytest.mark.parametrize("key", ["name", "scraped_as"])
def test_no_two_entries_share_a_name(key):
    times = Counter(getattr(metric, key) for metric in METRICS)
    assert [name for name, count in times.items() if count > 1] == []


def test_a_name_in_a_scrape_is_one_that_prometheus_takes():
    names = [re.sub(r"\{\w+\}", "x", metric.scraped_as) for metric in METRICS]
    assert [name for name in names if not re.fullmatch(r"ray_mempo_[a-z0-9_]+", name)] == []


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("memory/p_mem_turn_12", "memory/p_mem_turn_{n}"),
        ("reward/extra/format/answer_present", "reward/extra/{key}"),
        ("eval/em", "eval/em"),
        ("eval/retrieval_hit_rate", "eval/{name}"),
    ],
)
def test_a_name_is_found_by_itself_before_any_placeholder(name, entry):
    assert find(name).name == entry


@pytest.mark.parametrize("name", ["memory/p_mem_turn_x", "rollout/nosuch", "eval/sub/em"])
def test_a_name_that_is_not_in_it_is_not_found(name):
    assert find(name) is None


def test_what_the_display_and_the_picture_show_is_in_it():
    names = [*SHOWN, *(name for _, curves in CURVES for name in curves)]
    assert [name for name in names if find(name) is None] == []


@pytest.mark.parametrize("role", ["rollout", "agent_loop", "retrieval", "batch_executor", "policy", "reward"])
def test_every_kind_of_actor_has_live_numbers(role):
    assert live(role)
