"""What a person watches: a live panel on a terminal, plain lines elsewhere. Both show the time left."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from mempo_ray.observability.bottleneck import bound_by

# metric → (heading, format); the columns of the live table and of a plain line
SHOWN = {
    "reward/outcome_mean": ("reward", "{:.3f}"),
    "eval/em": ("EM", "{:.3f}"),
    "memory/p_mem": ("P_mem", "{:.3f}"),
    "memory/p_base": ("P_full", "{:.3f}"),
    "rollout/format_valid_share": ("format", "{:.2f}"),
    "rollout/output_tokens_per_s": ("tok/s", "{:,.0f}"),
    "policy/grad_norm": ("|grad|", "{:.2f}"),
    "scoring/hidden_share": ("scoring hidden", "{:.0%}"),
    "time/step_s": ("s/step", "{:.1f}"),
}
PLAIN_EVERY_S = 10.0


class Display(Protocol):
    """A MetricSink that also follows the stage within a step."""

    def stage(self, name: str, total: int | None = None) -> None: ...

    def advance(self, count: int = 1) -> None: ...

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def say(self, text: RenderableType) -> None: ...

    def close(self) -> None: ...


def make_display(num_steps: int, console: Console | None = None) -> Display:
    console = console or Console()
    if console.is_terminal:
        return LiveDisplay(num_steps, console)
    return PlainDisplay(num_steps, functools.partial(console.print, markup=False, soft_wrap=True))


def time_left(done: int, total: int | None, elapsed_s: float) -> str:
    """'1:05 left' from the mean pace so far; '' before the first item.

    Example:
        >>> time_left(5, 10, 60)
        '1:00 left'
    """
    if not total or done <= 0:
        return ""
    left = round(max(0, total - done) * elapsed_s / done)
    return f"{left // 60}:{left % 60:02d} left"


def shown(values: Mapping[str, float]) -> list[tuple[str, str]]:
    """The (heading, text) pairs of the metrics that people look at, where present."""
    return [(head, form.format(values[key])) for key, (head, form) in SHOWN.items() if key in values]


class PlainDisplay:
    """Lines for logs and pipes: a line a stage, a line every ten seconds inside one, a line a step."""

    def __init__(
        self, num_steps: int, write: Callable[[RenderableType], object], clock: Callable[[], float] = time.monotonic
    ):
        self._num_steps = num_steps
        self._write = write
        self._clock = clock
        self._stage, self._done = "", 0
        self._total: int | None = None
        self._stage_start = self._last_line = clock()
        self._began: tuple[int, float] | None = None  # steps that were done before, and when the next one began

    def stage(self, name: str, total: int | None = None) -> None:
        now = self._clock()
        if name != self._stage:
            self._write(f"· {name}" + (f" ({total})" if total else ""))
        self._stage, self._total, self._done, self._stage_start, self._last_line = name, total, 0, now, now

    def advance(self, count: int = 1) -> None:
        self._done += count
        now = self._clock()
        if now - self._last_line >= PLAIN_EVERY_S:
            self._last_line = now
            left = time_left(self._done, self._total, now - self._stage_start)
            self._write(f"  {self._stage}: {self._done}/{self._total or '?'} {left}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = self._clock()
        if self._began is None:  # at the end of step 0, or of the first step after a resume
            seconds = values.get("time/step_s", 0.0)
            self._began = (step - (seconds > 0), now - seconds)
        first, start = self._began
        left = time_left(step - first, self._num_steps - first, now - start)
        text = "  ".join(f"{head} {value}" for head, value in shown(values))
        self._write(f"step {step}/{self._num_steps}  {text}  {left}")
        if line := bound_by(values):
            self._write(f"  {line}")
        self._stage = ""

    def say(self, text: RenderableType) -> None:
        self._write(text)

    def close(self) -> None:
        """Nothing to restore."""


class LiveDisplay:
    """A panel that stays in place: steps, the current stage, and the last steps' numbers."""

    ROWS = 12

    def __init__(self, num_steps: int, console: Console):
        columns = (
            TextColumn("{task.description}", table_column=None),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console)
        self._steps = self._progress.add_task("steps", total=num_steps)
        self._stage = self._progress.add_task("starting", total=None)
        self._rows: list[tuple[int, Mapping[str, float]]] = []
        self._console = console
        self._live = Live(self._render(), console=console, refresh_per_second=4)
        self._live.start()

    def stage(self, name: str, total: int | None = None) -> None:
        self._progress.reset(self._stage, description=name, total=total)

    def advance(self, count: int = 1) -> None:
        self._progress.advance(self._stage, count)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._progress.update(self._steps, completed=step)
        self._rows = [*self._rows, (step, values)][-self.ROWS :]
        self._live.update(self._render())

    def say(self, text: RenderableType) -> None:
        self._console.print(text, markup=False)

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> Group:
        table = Table(expand=True)
        heads = {key: head for key, (head, _) in SHOWN.items() if any(key in values for _, values in self._rows)}
        for head in ("step", *heads.values()):
            table.add_column(head, justify="right")
        for step, values in self._rows:
            cells = [SHOWN[key][1].format(values[key]) if key in values else "" for key in heads]
            table.add_row(str(step), *cells)
        parts: list[RenderableType] = [self._progress, table] if self._rows else [self._progress]
        if self._rows and (line := bound_by(self._rows[-1][1])):
            parts.append(line)
        return Group(Panel(Group(*parts), title="mempo_ray"))
