"""The end of a run: a picture and a short table."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

CURVES = (
    ("reward and EM", {"reward/outcome_mean": "outcome reward", "eval/em": "EM (held out)"}),
    ("memory", {"memory/p_mem": "P_mem", "memory/p_base": "P_full", "memory/reward": "memory reward"}),
    ("tokens", {"rollout/output_tokens_mean": "output tokens per trajectory"}),
)

ROWS = {
    "steps": "{steps}, in {seconds:.0f} s",
    "exact match before": "{em_cold_start:.1%}, on held-out questions",
    "exact match after": "{em_final:.1%}",
    "gain": "{em_gain:+.1%}, 95 % interval {em_gain_low:+.1%} to {em_gain_high:+.1%} ({num_questions} questions)",
    "word overlap after": "F1 {f1_final:.1%}",
    "memories swapped": "exact match {em_memory_swapped:.1%} with another question's memory",
    "memory at the start": "answer {p_mem_ratio:,.1f} times likelier than by a memory with its fact replaced",
    "history at the start": "answer {p_full_ratio:,.1f} times likelier than by the question alone",
    "tokens of an episode": "{total_tokens_mean:,.0f}, in its longest turn {peak_tokens_mean:,.0f}",
    "scoring hidden": "{scoring_hidden_share:.0%} of its time lay beside generation (hidden_share)",
    "scoring waited for": "{scoring_exposed_s:.1f} s in all (exposed_s)",
    "memory of the machine": "{peak_pss_gb:.1f} GB at most",
}
"""Label → what a person is told of summary.json; a row whose numbers the run has not is left out."""


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
    """`ROWS`, as far as the run has their numbers, and where to look."""
    table = Table(title="run summary", show_header=False, title_justify="left")
    for label, form in ROWS.items():
        if all(field in summary for _, field, _, _ in string.Formatter().parse(form) if field):
            table.add_row(label, form.format_map(summary))
    table.add_section()
    files = "summary.json, learning_curve.png, metrics.jsonl, trajectories/"
    table.add_row("look at", Text(f"{root}/\n{files}", overflow="fold"))
    return table
