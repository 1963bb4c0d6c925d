"""A `ports.MetricSink` that keeps everything."""

from __future__ import annotations

from collections.abc import Mapping


class ListSink:
    """`rows` keeps (step, values) of all calls."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, Mapping[str, float]]] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, dict(values)))
