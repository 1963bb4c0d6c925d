"""One episode for a person, turn by turn, with its memory: what `mempo-ray ask` and the first samples of a run show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mempo_ray.agent.protocol import parse_turn
from mempo_ray.contracts import Score, Scored, Trajectory, Turn


def turn_rows(turn: Turn) -> Iterator[tuple[str, str]]:
    """(label, text) of what a turn remembered, thought, asked and got; raw where it has no block at all.

    Example: ("memory", "mentor Boko Sari"), ("search", "home Vela"), ("passages", "home Vela Kim .")
    """
    blocks = parse_turn([turn.text.encode()]).blocks
    names = {"mem": "memory", "think": "thought", "search": "search", "answer": "answer"}
    yield from ((names[block.name], block.text) for block in blocks)
    if not blocks:
        yield "text", turn.text
    if len(turn.tool_ids):
        yield "passages", turn.tool_text.removeprefix("<tool_response>").removesuffix("</tool_response>")
    yield "tokens", f"{len(turn.prompt_ids)} in, {len(turn.output_ids)} out"


def episode_text(trajectory: Trajectory) -> str:
    """The episode for a pipe: a block of lines a turn, then how it ended."""
    lines = [f"question: {trajectory.task.question}"]
    for number, turn in enumerate(trajectory.turns, start=1):
        lines.append(f"turn {number}")
        for label, text in turn_rows(turn):
            first, *more = text.splitlines() or [""]
            lines += [f"  {label:<8} {first}", *(f"  {'':<8} {line}" for line in more)]
    return "\n".join([*lines, outcome(trajectory)])


def transcript(
    trajectory: Trajectory,
    score: Score | None,
    extra: Mapping[str, object],
    decode: Callable[[Sequence[int]], str],
) -> str:
    """The episode as training sees it: each prompt and what the policy wrote, tags and all; gold, score and rules.

    Args:
        extra: what the scorer reported; one line each, format checks as one.
        decode: of the tokenizer; prompts are stored as ids.
    """
    lines = [f"question: {trajectory.task.question}"]
    for number, turn in enumerate(trajectory.turns, start=1):
        lines += [f"--- turn {number}, prompt ({len(turn.prompt_ids)} tokens)", decode(turn.prompt_ids.tolist())]
        lines += [f"--- turn {number}, response ({len(turn.output_ids)} tokens)", turn.text]
    failed = [name for name, passed in trajectory.format_report.items() if not passed]
    lines += ["---", outcome(trajectory), f"gold: {trajectory.task.gold_text}"]
    if trajectory.detail:
        lines.append(f"detail: {trajectory.detail}")
    lines.append("format: " + ("failed " + ", ".join(failed) if failed else "valid"))
    lines += [f"{key}: {value}" for key, value in extra.items() if not key.startswith("format/")]
    if isinstance(score, Scored):
        lines.append(f"score: {score.score:g}")
    elif score is not None:
        lines.append(f"unscored: {score.kind}: {score.reason}")
    return "\n".join(lines)


def episode_panels(trajectory: Trajectory) -> Group:
    """The episode for a terminal: a panel a turn."""
    styles = {
        "memory": "bold cyan",
        "thought": "dim",
        "search": "yellow",
        "passages": "green",
        "answer": "bold magenta",
    }
    panels = []
    for number, turn in enumerate(trajectory.turns, start=1):
        grid = Table.grid(padding=(0, 2))
        for label, text in turn_rows(turn):
            grid.add_row(Text(label, "bold"), Text(text, styles.get(label, "dim")))
        panels.append(Panel(grid, title=f"turn {number}", title_align="left"))
    question = Panel(Text(trajectory.task.question, "bold"), title="question", title_align="left")
    return Group(question, *panels, Text(outcome(trajectory), "bold"))


def outcome(trajectory: Trajectory) -> str:
    """The last line: the answer, or why there is none."""
    if trajectory.answer is not None:
        return f"answer: {trajectory.answer}"
    return f"no answer: the episode ended as {trajectory.end_reason.value} after {len(trajectory.turns)} turns"
