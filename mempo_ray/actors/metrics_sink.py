"""Ray's form of a MetricSink: gauges that the Ray dashboard and any Prometheus scrape find as `ray_mempo_<name>`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ray.util.metrics import Gauge


class RaySink:
    """One gauge a metric name, made at its first value; the run is a tag. Lives in the driver's process."""

    def __init__(self, run: str):
        self._tags = {"run": run}
        self._gauges: dict[str, Gauge] = {}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in {"step": step, **values}.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge(f"mempo_{re.sub('[^a-zA-Z0-9_]', '_', name)}", name, tag_keys=("run",))
            self._gauges[name].set(float(value), tags=self._tags)
