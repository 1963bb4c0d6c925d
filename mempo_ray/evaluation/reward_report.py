"""What `mempo-ray reward-check` says: how the scores of many responses look, before anybody trains on them (R9)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mempo_ray.contracts import Score, Scored, Unscored

NUM_BINS = 10
NUM_EXAMPLES = 3
BAR_CHARS = 40
EXAMPLE_CHARS = 1_000


@dataclass(frozen=True)
class Checked:
    """One response with what became of it. `failed_rules`: names of the format checks that it fails."""

    task_id: str
    data_source: str
    text: str  # the policy's own words, tags and all
    gold: str
    score: Score
    seconds: float  # that scoring took
    failed_rules: tuple[str, ...] = ()


@dataclass(frozen=True)
class RewardReport:
    """Scores of all responses. Unscored ones are in no mean: they are counted by kind."""

    checked: tuple[Checked, ...]

    @property
    def scores(self) -> np.ndarray:
        """float64, of the scored responses."""
        return np.array([c.score.score for c in self.checked if isinstance(c.score, Scored)], np.float64)

    @property
    def mean(self) -> float:
        return float(self.scores.mean()) if len(self.scores) else float("nan")

    @property
    def margin(self) -> float:
        """Half of the 95 % interval of the mean (normal approximation); infinite for fewer than two scores."""
        num = len(self.scores)
        return float(1.96 * self.scores.std(ddof=1) / num**0.5) if num > 1 else float("inf")

    def histogram(self) -> tuple[np.ndarray, np.ndarray]:
        """Counts [NUM_BINS] and borders [NUM_BINS + 1]; over [0, 1] unless a score lies outside."""
        low, high = min(0.0, self.scores.min(initial=0.0)), max(1.0, self.scores.max(initial=1.0))
        return np.histogram(self.scores, NUM_BINS, (low, high))

    def failures(self) -> Counter[str]:
        """Format rule → responses that fail it."""
        return Counter(rule for c in self.checked for rule in c.failed_rules)

    def unscored(self) -> Counter[str]:
        """'kind: reason' → responses."""
        return Counter(f"{c.score.kind}: {c.score.reason}" for c in self.checked if isinstance(c.score, Unscored))

    def latency_s(self) -> dict[str, float]:
        """p50, p95, p99 and max of the seconds that a score took."""
        seconds = [c.seconds for c in self.checked] or [0.0]
        return {f"p{q}": float(np.percentile(seconds, q)) for q in (50, 95, 99)} | {"max": float(max(seconds))}

    def best_and_worst(self) -> tuple[list[Checked], list[Checked]]:
        """NUM_EXAMPLES of each at most, one a task, best first and worst first; none stands in both."""
        scored = [(c.score.score, c) for c in self.checked if isinstance(c.score, Scored)]
        ordered = [c for _, c in sorted(scored, key=lambda pair: -pair[0])]
        num = min(NUM_EXAMPLES, len(ordered) // 2) or len(ordered)
        best = _one_a_task(ordered)[:num]
        worst = [c for c in _one_a_task(ordered[::-1]) if all(c is not other for other in best)]
        return best, worst[: min(num, len(ordered) - num)]

    def disagrees_with(self, expected: float) -> str | None:
        """In words, if the baseline expected by the user lies outside of what was measured."""
        if len(self.scores) and abs(self.mean - expected) <= self.margin:
            return None
        return (
            f"mean score {self.mean:.3f} ± {self.margin:.3f}, expected {expected:.3f}: the scorer, the gold answers "
            "or the prompt is not what you think it is; look at the examples"
        )

    # -- shown ----------------------------------------------------------------------------------------

    def show(self) -> RenderableType:
        """For a terminal or a pipe."""
        parts: list[RenderableType] = [Text(self._headline(), "bold")]
        if len(self.scores):
            parts.append(self._histogram_table())
        for title, counts in (("failed format rules", self.failures()), ("unscored", self.unscored())):
            if counts:
                table = Table(title=title, title_justify="left", show_header=False)
                for name, count in counts.most_common():
                    table.add_row(Text(name), f"{count}", f"{count / len(self.checked):.0%}")
                parts.append(table)
        best, worst = self.best_and_worst()
        parts += [_example("best", c) for c in best] + [_example("worst", c) for c in worst]
        return Group(*parts)

    def _headline(self) -> str:
        latency = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in self.latency_s().items())
        mean = f"mean {self.mean:.3f} ± {self.margin:.3f}; " if len(self.scores) else ""
        return f"{len(self.scores)} of {len(self.checked)} responses scored, {mean}latency {latency}"

    def _histogram_table(self) -> Table:
        counts, borders = self.histogram()
        table = Table(title="scores", title_justify="left", show_header=False)
        for count, low, high in zip(counts, borders, borders[1:], strict=False):
            table.add_row(f"{low:.2f} – {high:.2f}", f"{count}", "█" * round(BAR_CHARS * count / max(counts.max(), 1)))
        return table

    def draw(self, path: Path) -> None:
        """The histogram as a PNG."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        counts, borders = self.histogram()
        figure, axis = pyplot.subplots(figsize=(6, 3.6), constrained_layout=True)
        axis.stairs(counts, borders, fill=True, alpha=0.7)
        if len(self.scores):
            axis.axvline(self.mean, color="black", linestyle="--", label=f"mean {self.mean:.3f} ± {self.margin:.3f}")
            axis.legend()
        axis.set(xlabel="score", ylabel="responses", title=f"{len(self.scores)} of {len(self.checked)} scored")
        figure.savefig(path, dpi=110)
        pyplot.close(figure)

    def to_json(self) -> str:
        """`mean` and `margin` are null where too few responses are scored to have one."""
        counts, borders = self.histogram()
        return json.dumps(
            {
                "num_responses": len(self.checked),
                "num_scored": len(self.scores),
                "mean": self.mean if np.isfinite(self.mean) else None,
                "margin": self.margin if np.isfinite(self.margin) else None,
                "histogram": {"counts": counts.tolist(), "borders": borders.tolist()},
                "failures": dict(self.failures()),
                "unscored": dict(self.unscored()),
                "latency_s": self.latency_s(),
            },
            indent=2,
        )


def _one_a_task(ordered: Sequence[Checked]) -> list[Checked]:
    """The first of each task: siblings say the same thing again."""
    firsts: dict[str, Checked] = {}
    for checked in ordered:
        firsts.setdefault(checked.task_id, checked)
    return list(firsts.values())


def _example(label: str, checked: Checked) -> Panel:
    assert isinstance(checked.score, Scored)
    text = checked.text if len(checked.text) <= EXAMPLE_CHARS else checked.text[:EXAMPLE_CHARS] + " …"
    rules = f"\nfails: {', '.join(checked.failed_rules)}" if checked.failed_rules else ""
    title = f"{label}: {checked.score.score:g} · {checked.data_source} · {checked.task_id}"
    return Panel(Text(f"{text}\ngold: {checked.gold}{rules}"), title=Text(title), title_align="left")
