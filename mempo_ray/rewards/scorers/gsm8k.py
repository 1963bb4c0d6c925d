"""GSM8K (Cobbe et al. 2021): one number, which the data set marks as '#### 72' at the end of a solution."""

from __future__ import annotations

import re
from decimal import Decimal

from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Scored
from mempo_ray.rewards.contract import Response
from mempo_ray.rewards.scorers.text import parse_number

MARKED = re.compile(r"####\s*(\S+)")
ANY_NUMBER = re.compile(r"[-+]?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def score_gsm8k(response: Response, settings: Reward) -> Scored:
    """1 where the number behind the last '####' is the gold one; an `<answer>` may be that number alone.

    extra: extracted, the number as text; None: the form was missed.
    """
    return _score(response, _marked(response))


def score_gsm8k_flexible(response: Response, settings: Reward) -> Scored:
    """1 where the last number of the answer (of the whole text without an `<answer>`) is the gold one."""
    text = response.solution if response.answer is None else response.answer
    numbers = [number for found in ANY_NUMBER.findall(text) if (number := parse_number(found)) is not None]
    return _score(response, numbers[-1] if numbers else None)


def _marked(response: Response) -> Decimal | None:
    marked = MARKED.findall(response.solution if response.answer is None else response.answer)
    if marked:
        return parse_number(marked[-1])
    return None if response.answer is None else parse_number(response.answer)


def _score(response: Response, number: Decimal | None) -> Scored:
    golds = {parse_number(alias) for alias in response.golds[0]}
    return Scored(float(number is not None and number in golds), {"extracted": None if number is None else str(number)})
