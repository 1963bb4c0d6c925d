"""A run on a real Ray cluster, scraped as Prometheus would scrape it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from mempo_ray.observability.catalogue import SECTIONS
from tests.fakes.driver_run import DriverRun, adopted_orphans
from tests.fakes.ray_head import POLL_S, RayHead

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DASHBOARD = Path(__file__).parents[2] / "configs" / "grafana" / "mempo.json"
METRICS = [metric for section in SECTIONS for metric in section.metrics]
LIVE = {metric.scraped_as for metric in METRICS if metric.role != "driver"}
QUICK = (
    "run.steps=1000",
    "cold_start=null",
    "data.tasks_per_step=4",
    "algorithm.group_size=4",
    "eval.tasks=4",
    "eval.probe_ratios=false",
    "reward.log_samples=0",
)
"""The quickstart from its shipped checkpoint, in small steps, for as long as it takes."""


def asked_for() -> set[str]:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    text = " ".join(target["expr"] for panel in panels for target in panel.get("targets", ()))
    return set(re.findall(r"\bray_\w+", text))


def samples(head: RayHead) -> dict[str, list[str]]:
    """Name → the tags of each of its samples, as text. None while the node's agent does not listen yet."""
    found: dict[str, list[str]] = {}
    try:
        text = head.scrape()
    except httpx.TransportError:
        return found
    for name, tags in re.findall(r"^(\w+)\{(.*)\} ", text, re.MULTILINE):
        found.setdefault(name, []).append(tags)
    return found


@pytest.fixture(scope="module")
def scraped(tmp_path_factory) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """(run, samples) as soon as all is there that the dashboard asks for and that actors emit; then the run stops."""
    folder = tmp_path_factory.mktemp("metrics")
    with (
        adopted_orphans(),
        RayHead(folder / "head", token=False) as head,
        DriverRun(folder / "runs", f"placement.address={head.address}", *QUICK) as run,
    ):
        found: dict[str, list[str]] = {}
        while missing := (asked_for() | LIVE) - found.keys():
            assert run.process.poll() is None, f"never scraped: {sorted(missing)}\n{run.process.stdout.read()}"
            time.sleep(POLL_S)
            found |= samples(head)
        run.process.terminate()
        assert run.finish() == 130, run.output
        yield run.folder.name, found


def test_everything_that_the_dashboard_asks_for_is_in_a_scrape(scraped):
    _, found = scraped
    assert asked_for() - found.keys() == set()


def test_every_actor_s_numbers_have_its_run_role_and_replica(scraped):
    run, found = scraped
    for metric in METRICS:
        for tags in found.get(metric.scraped_as, ()):
            assert f'run="{run}"' in tags, metric
            assert f'role="{metric.role}"' in tags, metric
            assert re.search(r'replica="\d+"', tags), metric


def test_nothing_is_scraped_that_is_not_in_the_catalogue(scraped):
    _, found = scraped
    known = [re.compile(re.sub(r"\{\w+\}", r"\\w+", metric.scraped_as)) for metric in METRICS]
    ours = [name for name in found if name.startswith("ray_mempo_")]
    assert [name for name in ours if not any(pattern.fullmatch(name) for pattern in known)] == []
