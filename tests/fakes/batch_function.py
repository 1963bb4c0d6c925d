"""A custom reward function for lists, as for verl's batch manager; a file that a test names in the configuration."""

from __future__ import annotations

import os

CALLS: list[int] = []
"""Length of each call in this process."""


def compute_score(data_sources, solution_strs, ground_truths, extra_infos, unit=1.0):
    CALLS.append(len(solution_strs))
    answers = [info["answer"] for info in extra_infos]
    if "raises" in answers:
        raise ZeroDivisionError("no such reference")
    if "exits" in answers:
        os._exit(3)
    if "loops" in answers:
        while True:
            pass
    if "short" in answers:
        return []
    return [
        {"score": unit * (answer in truths), "size": len(answers)}
        for answer, truths in zip(answers, ground_truths, strict=True)
    ]
