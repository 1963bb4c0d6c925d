"""The Grafana dashboard that is shipped, and what `mempo-ray dashboard` writes."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from mempo_ray.cli import app
from mempo_ray.observability.catalogue import SECTIONS
from mempo_ray.observability.dashboard import RAY_DIR, discovery, grafana_json, promql

SHIPPED = Path(__file__).parents[3] / "configs" / "grafana" / "mempo.json"
PANELS = json.loads(SHIPPED.read_text(encoding="utf-8"))["panels"]


def test_the_shipped_file_is_what_the_code_says():
    assert SHIPPED.read_text(encoding="utf-8") == grafana_json()


def test_it_has_six_rows_and_charts_in_each():
    kinds = [(panel["type"], panel["title"]) for panel in PANELS]
    rows = [title for kind, title in kinds if kind == "row"]
    assert rows == ["Learning", "Memory", "Throughput", "Bottleneck", "Retrieval", "Health"]
    assert all(following[0] == "timeseries" for (kind, _), following in itertools.pairwise(kinds) if kind == "row")


def test_no_two_panels_lie_on_each_other():
    places = [panel["gridPos"] for panel in PANELS]
    for a, b in itertools.combinations(places, 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], (a, b)


@pytest.mark.parametrize("role", sorted({metric.role for section in SECTIONS for metric in section.metrics}))
def test_every_role_is_shown(role):
    shown = " ".join(target["expr"] for panel in PANELS for target in panel.get("targets", ()))
    names = [m.scraped_as for section in SECTIONS for m in section.metrics if m.role == role]
    assert any(re.search(rf"\b{name}\b", shown) for name in names if "{" not in name)


def test_a_metric_that_nobody_emits_is_refused():
    with pytest.raises(KeyError, match="rollout/nosuch is not in the catalogue"):
        promql("rate(<rollout/nosuch>[1m])")


def test_the_command_writes_what_prometheus_and_grafana_want(tmp_path):
    done = CliRunner().invoke(app, ["dashboard", "--out", str(tmp_path / "monitoring")])
    assert done.exit_code == 0, done.output
    config = yaml.safe_load((tmp_path / "monitoring" / "prometheus.yml").read_text())
    assert config["scrape_configs"] == [{"job_name": "ray", "file_sd_configs": [{"files": [str(discovery(RAY_DIR))]}]}]
    assert (tmp_path / "monitoring" / "mempo.json").read_text() == SHIPPED.read_text()
    assert "RAY_GRAFANA_HOST" in (tmp_path / "monitoring" / "README.md").read_text()


def test_the_command_prints_configuration_and_steps_for_the_temp_dir_of_the_cluster():
    done = CliRunner().invoke(app, ["dashboard", "--ray-dir", "/scratch/ray"])
    assert done.exit_code == 0, done.output
    for part in ("file_sd_configs", "/scratch/ray/prom_metrics_service_discovery.json", "RAY_PROMETHEUS_HOST"):
        assert part in done.output


def test_the_command_says_what_it_cannot_write(tmp_path):
    (tmp_path / "taken").write_text("a file")
    done = CliRunner().invoke(app, ["dashboard", "--out", str(tmp_path / "taken")])
    assert done.exit_code != 0
    assert "--out" in str(done.exception)
