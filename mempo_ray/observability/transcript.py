"""An episode as text that a person reads: turn by turn, with its memory."""

from __future__ import annotations

from mempo_ray.contracts import Score, Scored, Trajectory


def transcript(trajectory: Trajectory, score: Score | None = None) -> str:
    """Question, every turn as the policy wrote it, tool responses, and the verdict with its failed checks."""
    task = trajectory.task
    lines = [f"question   {task.question}", f"gold       {task.gold_text}"]
    for index, turn in enumerate(trajectory.turns, 1):
        lines.append(f"turn {index}     {turn.text.strip()}")
        if turn.tool_text:
            lines.append(f"           {turn.tool_text.strip()}")
    failed = [name for name, passed in trajectory.format_report.items() if not passed]
    lines.append(f"end        {trajectory.end_reason}" + (f" ({trajectory.detail})" if trajectory.detail else ""))
    lines.append("format     " + ("valid" if not failed else "failed: " + ", ".join(failed)))
    if isinstance(score, Scored):
        lines.append(f"score      {score.score:g}")
    elif score is not None:
        lines.append(f"unscored   {score.kind}: {score.reason}")
    return "\n".join(lines)
