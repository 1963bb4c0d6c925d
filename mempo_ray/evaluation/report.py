"""What `mempo-ray eval` says: means over questions, by data source."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from mempo_ray.contracts import Trajectory
from mempo_ray.evaluation.metrics import Evaluated, aggregate, evaluated

COLUMNS = {
    "EM": ("eval/em", "{:.3f}"),
    "F1": ("eval/f1", "{:.3f}"),
    "format": ("eval/format_valid_share", "{:.2f}"),
    "TT": ("eval/total_tokens_mean", "{:,.0f}"),
    "PT": ("eval/peak_tokens_mean", "{:,.0f}"),
    "questions": ("eval/num_questions", "{:.0f}"),
}
"""Columns of the evaluation's table → metric and format. TT: tokens of all turns, PT: of the longest one."""


@dataclass(frozen=True)
class EvalReport:
    """Means over questions (M13). `by_source`: data source, and last "all" → metrics of `metrics.aggregate`."""

    checkpoint: str
    data: str
    by_source: Mapping[str, Mapping[str, float]]
    num_excluded: int = 0

    @classmethod
    def of(cls, checkpoint: str, data: str, trajectories: Sequence[Trajectory], num_excluded: int = 0) -> EvalReport:
        by_source: dict[str, list[Evaluated]] = {}
        for trajectory in trajectories:
            by_source.setdefault(trajectory.task.data_source, []).append(evaluated(trajectory))
        means = {source: aggregate(results) for source, results in sorted(by_source.items())}
        means["all"] = aggregate([result for results in by_source.values() for result in results])
        return cls(checkpoint, data, means, num_excluded)

    def to_json(self) -> str:
        rows = {
            source: {name.removeprefix("eval/"): value for name, value in metrics.items()}
            for source, metrics in self.by_source.items()
        }
        return json.dumps(
            {"checkpoint": self.checkpoint, "data": self.data, "num_excluded": self.num_excluded, "results": rows},
            indent=2,
        )

    def table(self) -> Table:
        caption = f"{self.num_excluded} episodes excluded (infrastructure)" if self.num_excluded else None
        table = Table(title=f"{self.checkpoint} on {self.data}", caption=caption, title_justify="left")
        table.add_column("data source")
        for heading in COLUMNS:
            table.add_column(heading, justify="right")
        for source, metrics in self.by_source.items():
            if source == "all":
                table.add_section()
            table.add_row(source, *(form.format(metrics[key]) for key, form in COLUMNS.values() if key in metrics))
        return table
