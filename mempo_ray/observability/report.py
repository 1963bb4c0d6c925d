"""The end of a run: a picture and a short table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

CURVES = (
    ("reward and EM", {"reward/outcome_mean": "outcome reward", "eval/em": "EM (held out)"}),
    ("memory", {"memory/p_mem": "P_mem", "memory/p_base": "P_full", "memory/reward": "memory reward"}),
    ("tokens", {"rollout/output_tokens_mean": "output tokens per trajectory"}),
)


def draw_learning_curve(metrics: Sequence[Mapping[str, float]], path: Path) -> None:
    """learning_curve.png: reward, EM, memory probabilities and lengths by step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(CURVES), figsize=(5 * len(CURVES), 3.6), constrained_layout=True)
    for axis, (title, curves) in zip(axes, CURVES, strict=True):
        for key, label in curves.items():
            points = [(row["step"], row[key]) for row in metrics if key in row]
            if points:
                axis.plot(*zip(*points, strict=True), label=label, marker="o" if len(points) < 12 else None)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def summary_table(summary: Mapping[str, object], root: Path) -> Table:
    """The few numbers that say how the run went, and where to look."""
    table = Table(title="run summary", show_header=False, title_justify="left")
    for key, value in summary.items():
        if isinstance(value, (str, int, float, bool)):
            table.add_row(key, f"{value:.4g}" if isinstance(value, float) else f"{value}")
    table.add_section()
    table.add_row("look at", Text(f"{root}/\nlearning_curve.png, metrics.jsonl, trajectories/", overflow="fold"))
    return table
