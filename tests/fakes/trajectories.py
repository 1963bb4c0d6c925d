"""Small trajectories for tests that care about a score and not about tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mempo_ray.contracts import NO_SPAN, SPAN_NAMES, EndReason, Task, Trajectory, Turn

TASK = Task("q1", "Where was X born?", golds=(("Paris", "Paris, France"),), data_source="hotpotqa")


def turn(mask: Sequence[int] = (1, 1), text: str = "<mem>m</mem>", tool_text: str = "") -> Turn:
    num_tokens = len(mask)
    return Turn(
        prompt_ids=np.arange(3, dtype=np.int32),
        output_ids=np.arange(num_tokens, dtype=np.int32),
        output_logprobs=np.zeros(num_tokens, np.float32),
        output_mask=np.array(mask, np.uint8),
        tool_ids=np.empty(0, np.int32),
        memory_ids=np.empty(0, np.int32),
        spans=dict.fromkeys(SPAN_NAMES, NO_SPAN),
        weight_version=0,
        seed=0,
        finish_reason="stop",
        text=text,
        tool_text=tool_text,
    )


def trajectory(
    answer: str | None = "paris!",
    *,
    turns: Sequence[Turn] | None = None,
    task: Task = TASK,
    failed_checks: Sequence[str] = (),
    end_reason: EndReason = EndReason.ANSWERED,
) -> Trajectory:
    return Trajectory(
        task=task,
        sibling=0,
        attempt=0,
        turns=tuple(turns if turns is not None else [turn()]),
        end_reason=end_reason,
        format_report={name: name not in failed_checks for name in ("mem_paired", "answer_present")},
        probes=(),
        answer=answer,
    )
