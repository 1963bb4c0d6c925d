r"""Geometry3K in the form of `hiyouga/geometry3k`: think first, then a final answer in a box."""

from __future__ import annotations

import re

from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Scored
from mempo_ray.rewards.contract import Response
from mempo_ray.rewards.scorers.mathematics import score_math

FORMAT = re.compile(r"<think>.*</think>.*(?:\\boxed\{.*\}|<answer>.*</answer>)", re.DOTALL)
FORMAT_SHARE = 0.1  # of the score; the rest is the answer's


def score_geometry3k(response: Response, settings: Reward) -> Scored:
    """0.9 × accuracy + 0.1 × format. Format: a `<think>` block, and behind it the box or the `<answer>`.

    extra: accuracy, format, extracted.
    """
    answer = score_math(response, settings)
    format_ = float(FORMAT.search(response.solution) is not None)
    score = (1 - FORMAT_SHARE) * answer.score + FORMAT_SHARE * format_
    return Scored(score, {"accuracy": answer.score, "format": format_, **answer.extra})
