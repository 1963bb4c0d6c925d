"""The Grafana dashboard, how Prometheus finds a Ray cluster, and the steps between: what `mempo-ray dashboard` gives.

ROWS ──names of the catalogue──▶ PromQL ──▶ configs/grafana/mempo.json

`python -m mempo_ray.observability.dashboard > configs/grafana/mempo.json` writes the dashboard again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mempo_ray.errors import ConfigError
from mempo_ray.observability.bottleneck import STAGES
from mempo_ray.observability.catalogue import find

RAY_DIR = Path("/tmp/ray")
"""Where a Ray cluster's head keeps its files, unless it was started with `--temp-dir`."""

UID = "mempo-ray"
WIDTH, HEIGHT, COLUMNS = 8, 7, 24
"""Of a panel, and of Grafana's grid."""

RETRIES = "turns_asked_again num_reprefills episodes_resampled tool_tries_failed searches_failed num_rescores"

RUN = '{run=~"$run"}'


@dataclass(frozen=True)
class Panel:
    """A chart: legend → PromQL, in which `<group/name>` is a metric of the catalogue, of the runs that are chosen.

    Args:
        unit: Grafana's name of it ("short", "s", "percentunit", "bytes", …).
    """

    title: str
    unit: str
    series: Mapping[str, str]
    stacked: bool = False


def _steps(group: str, names: str) -> dict[str, str]:
    """`names` of a group, with themselves as legends."""
    return {name: f"<{group}/{name}>" for name in names.split()}


def _each(name: str) -> dict[str, str]:
    """A gauge of every replica."""
    return {"{{role}}-{{replica}}": f"<{name}>"}


def _rate(name: str) -> str:
    return f"sum(rate(<{name}>[$__rate_interval]))"


ROWS: Mapping[str, tuple[Panel, ...]] = {
    "Learning": (
        Panel("Outcome reward", "short", {"mean": "<reward/outcome_mean>", "std": "<reward/outcome_std>"}),
        Panel("Held-out questions", "percentunit", {"EM": "<eval/em>", "F1": "<eval/f1>"}),
        Panel(
            "Format, flat groups",
            "percentunit",
            {"format valid": "<rollout/format_valid_share>", "flat groups": "<group/flat_outcome_share>"},
        ),
        Panel("KL and entropy", "short", {"KL to the reference": "<policy/kl_ref>", "entropy": "<policy/entropy>"}),
        Panel("Loss and gradient", "short", {"loss": "<policy/loss>", "gradient norm": "<policy/grad_norm>"}),
        Panel("Tokens of a trajectory", "short", {"output": "<rollout/output_tokens_mean>"}),
    ),
    "Memory": (
        Panel("P_mem and P_full", "percentunit", {"P_mem": "<memory/p_mem>", "P_full": "<memory/p_base>"}),
        Panel("Memory reward: the gap", "short", {"P_mem − P_full": "<memory/reward>"}),
        Panel(
            "Turns",
            "percentunit",
            {"with a memory": "<rollout/memory_turn_share>", "groups with flat rewards": "<group/flat_memory_share>"},
        ),
        Panel("Staleness of the scorer", "short", {"weight versions": "<memory/version_gap>"}),
        Panel(
            "TT and PT",
            "short",
            {"TT: total tokens": "<eval/total_tokens_mean>", "PT: peak": "<eval/peak_tokens_mean>"},
        ),
    ),
    "Throughput": (
        Panel(
            "Sampled tokens a second",
            "short",
            {"of a step": "<rollout/output_tokens_per_s>", "now": _rate("engine/output_tokens")},
        ),
        Panel(
            "Log-prob tokens a second", "short", {"of a step": "<executor/tokens_per_s>", "now": _rate("queue/tokens")}
        ),
        Panel("Seconds of a step", "s", {name: f"<time/{name}_s>" for name in ("step", "rollout", "update", "sync")}),
        Panel("Episodes in flight", "short", _each("agent/episodes_in_flight")),
        Panel("Turns in flight", "short", _each("engine/num_in_flight")),
        Panel("Tokens in flight", "short", _each("engine/in_flight_tokens")),
    ),
    "Bottleneck": (
        Panel(
            "Share of a step", "percentunit", {stage: f"<bottleneck/{stage}_share>" for stage in STAGES}, stacked=True
        ),
        Panel(
            "Waits",
            "s",
            {
                "log-probs, p95": "<executor/wait_p95_s>",
                "log-probs, oldest now": "<queue/oldest_wait_s>",
                "search, mean": "<retrieval/queue_wait_s>",
            },
        ),
        Panel(
            "Queues",
            "short",
            {
                "log-prob requests": "<queue/num_queued>",
                "turns in engines": "sum(<engine/num_queued>)",
                "turns without an engine": "sum(<agent/turns_waiting>)",
                "searches": "sum(<search/num_queued>)",
                "trajectories being scored": "sum(<scorer/num_in_flight>)",
            },
        ),
        Panel("KV cache in use", "percentunit", _each("engine/kv_use")),
        Panel(
            "Prefix cache",
            "percentunit",
            {
                "hits": f"{_rate('engine/prefix_hit_tokens')} / {_rate('engine/prompt_tokens')}",
                "turns with their group": "<rollout/affinity_hit_rate>",
            },
        ),
        Panel("Scoring", "percentunit", {"hidden": "<scoring/hidden_share>", "batch fill": "<executor/batch_fill>"}),
    ),
    "Retrieval": (
        Panel("Queries a second", "short", {"of a step": "<retrieval/queries_per_s>", "now": _rate("search/queries")}),
        Panel(
            "Hit rate",
            "percentunit",
            {"of a step": "<retrieval/hit_rate>", "now": f"{_rate('search/hits')} / {_rate('search/queries')}"},
        ),
        Panel("Latency, p99", "s", _each("search/latency_p99_s")),
        Panel("Batches", "short", {"queries of a batch": "<retrieval/batch_size>"}),
        Panel("Replicas", "short", _steps("retrieval", "num_serving num_joining")),
        Panel("Failures", "short", _steps("retrieval", "rejected failed timeouts overloaded")),
        Panel("Busy", "percentunit", {"{{role}}-{{replica}}": "rate(<search/busy_s>[$__rate_interval])"}),
    ),
    "Health": (
        Panel("Weight versions", "short", {"policy": "max(<rank/version>)", **_each("engine/weight_version")}),
        Panel("Weight sync", "s", {"seconds": "<sync/seconds>"}),
        Panel("Gap of log-probs", "short", {"sync": "<sync/max_gap>", "policy to engines": "<policy/logprob_gap_max>"}),
        Panel("State of engines (2 serves)", "short", _each("engine/state")),
        Panel("Engines", "short", _steps("rollout", "num_serving num_joining")),
        Panel("Retries", "short", _steps("rollout", RETRIES)),
        Panel(
            "Restarts",
            "short",
            {**_steps("rollout", "engine_restarts worker_restarts"), "ranks": "<policy/num_restarts>"},
        ),
        Panel(
            "Unscored and excluded",
            "percentunit",
            {"unscored": "<rollout/unscored_share>", "excluded": "<rollout/excluded_share>"},
        ),
        Panel(
            "Object store",
            "bytes",
            {"payloads of a step": "<rollout/payload_bytes>", "used, all nodes": "sum(ray_object_store_used_memory)"},
        ),
        Panel(
            "Memory",
            "decgbytes",
            {"driver's tree, peak of a step": "<ram/step_gb>", "rank {{replica}}, peak": "<rank/memory_gb>"},
        ),
        Panel(
            "Scores a second", "short", {"scored": _rate("scorer/num_scored"), "unscored": _rate("scorer/num_unscored")}
        ),
    ),
}
"""The dashboard, row by row."""


def promql(expression: str) -> str:
    """With `<group/name>` as Prometheus knows it. Raises KeyError: a name that the catalogue has not.

    Example:
        >>> promql("sum(<engine/num_queued>)")
        'sum(ray_mempo_engine_num_queued{run=~"$run"})'
    """

    def scraped(match: re.Match[str]) -> str:
        metric = find(match[1])
        if metric is None:
            raise KeyError(f"{match[1]} is not in the catalogue of metrics")
        return metric.scraped_as + RUN

    return re.sub("<([^<>]+)>", scraped, expression)


def grafana() -> dict[str, Any]:
    """The dashboard in Grafana's own form. It asks for a Prometheus data source, and which runs to show."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row, charts in ROWS.items():
        panels.append({"id": len(panels) + 1, "type": "row", "title": row, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1}})  # fmt: skip
        y += 1
        per_line = COLUMNS // WIDTH
        for place, chart in enumerate(charts):
            x, line = place % per_line * WIDTH, y + place // per_line * HEIGHT
            panels.append(_chart(chart, len(panels) + 1, {"x": x, "y": line, "w": WIDTH, "h": HEIGHT}))
        y += -(-len(charts) // per_line) * HEIGHT
    return {
        "uid": UID,
        "title": "MemPO on Ray",
        "tags": ["mempo_ray"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_DATASOURCE, _RUN]},
        "panels": panels,
    }


_DATASOURCE = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_RUN = {
    "name": "run",
    "label": "Run",
    "type": "query",
    "datasource": _SOURCE,
    "query": {"query": "label_values(ray_mempo_step, run)", "refId": "runs"},
    "refresh": 2,  # at every change of the time range
    "sort": 2,  # the newest first: run names hold the time
    "multi": True,
    "includeAll": True,
}


def _chart(chart: Panel, number: int, place: Mapping[str, int]) -> dict[str, Any]:
    stacking = {"mode": "normal" if chart.stacked else "none", "group": "A"}
    custom = {"stacking": stacking, "fillOpacity": 40 if chart.stacked else 0, "showPoints": "auto"}
    return {
        "id": number,
        "type": "timeseries",
        "title": chart.title,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": chart.unit, "custom": custom}, "overrides": []},
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}, "legend": {"placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": _SOURCE, "expr": promql(expression), "legendFormat": legend}
            for i, (legend, expression) in enumerate(chart.series.items())
        ],
    }


def grafana_json() -> str:
    return json.dumps(grafana(), indent=1, ensure_ascii=False) + "\n"


def discovery(ray_dir: Path) -> Path:
    """The file in which the head keeps the addresses of all nodes, for Prometheus."""
    return ray_dir / "prom_metrics_service_discovery.json"


def prometheus_config(ray_dir: Path = RAY_DIR) -> str:
    """A Prometheus configuration that scrapes every node of the Ray cluster whose head this machine is."""
    return f"""\
global:
  scrape_interval: 10s
  evaluation_interval: 10s
scrape_configs:
  - job_name: ray
    file_sd_configs:
      - files: ['{discovery(ray_dir)}']
"""


STEPS = """\
On the head of the cluster:

1. Prometheus: start it with the configuration below (file prometheus.yml). Ray keeps the addresses of all nodes in
   {discovery}.
       prometheus --config.file=prometheus.yml
2. Grafana: Ray has written its settings; put mempo.json beside Ray's own dashboards, then start Grafana with them.
       cp mempo.json {grafana}/dashboards/
       grafana-server --homepath /usr/share/grafana --config {grafana}/grafana.ini web
   A Grafana that runs already: Dashboards, New, Import, mempo.json; it asks for its Prometheus data source.
3. Ray's dashboard shows Grafana's panels in its pages if it knows both. Set this before `ray start --head`; on a
   cluster made by `ray up` or KubeRay, in the head's environment:
       export RAY_PROMETHEUS_HOST=http://127.0.0.1:9090
       export RAY_GRAFANA_HOST=http://127.0.0.1:3000
       export RAY_GRAFANA_IFRAME_HOST=http://127.0.0.1:3000   # as the browser sees it, where that differs
4. Look at "MemPO on Ray" (uid {uid}) in Grafana; choose the run, whose name is that of its run folder.
"""


def steps(ray_dir: Path = RAY_DIR) -> str:
    """What a person does to see the dashboard."""
    return STEPS.format(discovery=discovery(ray_dir), grafana=ray_dir / "session_latest/metrics/grafana", uid=UID)


def write(folder: Path, ray_dir: Path = RAY_DIR) -> None:
    """prometheus.yml, mempo.json and README.md in `folder`.

    Raises:
        ConfigError: it cannot be written.
    """
    files = {"prometheus.yml": prometheus_config(ray_dir), "mempo.json": grafana_json(), "README.md": steps(ray_dir)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out: cannot write to {folder} ({error.strerror}); choose a writable folder") from error


if __name__ == "__main__":
    print(grafana_json(), end="")
