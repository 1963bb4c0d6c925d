"""Mathematical answers (MATH, MATH-500, AIME, DAPO-Math): equal as expressions, by `math-verify` on sympy.

sympy may run for ever on an expression like 9^(9^9), and math-verify's own timeouts are signals, which only a main
thread gets. They are off: the registration asks for a process, and whoever runs it ends it at `reward.timeout_s`.
"""

from __future__ import annotations

import itertools
import logging
import re

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Scored
from mempo_ray.rewards.contract import Response
from mempo_ray.rewards.scorers.text import normalize_answer

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
ANSWER_LINE = re.compile(r"(?:final answer is|answer\s*:)\s*([^\n]+)", re.IGNORECASE)
TEXT = re.compile(r"\\(?:text|textbf|mbox|mathrm|textrm)\s*\{([^{}]*)\}")
WORDS = re.compile(r"[A-Za-z][A-Za-z '-]{3,}|[A-Za-z]+ [A-Za-z ]+")
SHORT_WORD = re.compile(r"[A-Za-z]{2,3}")  # or a product: which of them, the answer's form tells
MAX_ANSWER_CHARS = 300  # the longest gold answer of MATH-500 has 159; what is longer is no answer, and slow to parse
MAX_DEPTH = 12  # of brackets in each other; 300 open ones take 9 s to parse
EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())

logging.getLogger("math_verify").setLevel(logging.ERROR)  # else each call warns that its timeouts are off


def score_math(response: Response, settings: Reward) -> Scored:
    """1 where the final answer equals a gold alias as an expression.

    extra: extracted, the final answer as text; None: there is none (no `<answer>`, no box, no 'Answer:' line).
    """
    answer = final_answer(response)
    equal = answer is not None and any(is_equal(answer, alias) for alias in response.golds[0])
    return Scored(float(equal), {"extracted": answer and answer[:MAX_ANSWER_CHARS]})


def final_answer(response: Response) -> str | None:
    """The last complete box in the `<answer>`, else all of it.

    Without an `<answer>`: the last complete box of the whole text, else the last line 'Answer: …' (DAPO-Math's form).
    """
    if response.answer is not None:
        return last_box(response.answer) or response.answer
    if (box := last_box(response.solution)) is not None:
        return box
    lines = ANSWER_LINE.findall(response.solution)
    return lines[-1].strip() if lines else None


def last_box(text: str) -> str | None:
    r"""Content of the last complete `\boxed{…}`, braces balanced.

    Example:
        >>> last_box(r"\boxed{1} so \boxed{\frac{1}{2}} and \boxed{3")
        '\\frac{1}{2}'
    """
    for start in reversed([match.end() for match in BOX.finditer(text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return text[start:end].strip()
    return None


def is_equal(answer: str, gold: str) -> bool:
    """Equal as words where the gold answer is words, else as expressions: to 6 decimals; units, % and $ are ignored.

    Words must not become expressions: as a product of its letters, 'listen' is 'silent'. A gold answer of 2 or 3
    letters is a word to an answer of letters alone ('on' is not 'no'), else a product ('xy' is 'x \\cdot y').
    """
    answer, gold = _bare(answer), _bare(gold)
    if answer == gold or len(answer) > MAX_ANSWER_CHARS or _depth(answer) > MAX_DEPTH:
        return answer == gold != ""
    words, said = TEXT.sub(r"\1", gold), TEXT.sub(r"\1", answer)
    if WORDS.fullmatch(words) or (SHORT_WORD.fullmatch(words) and said.isalpha()):
        return normalize_answer(said) == normalize_answer(words) != ""
    # what the policy wrote may be no expression at all, which is a wrong answer; a gold answer has to be one
    golds = parse(f"\\boxed{{{gold}}}", EXTRACTION, parsing_timeout=0, raise_on_error=True)
    answers = parse(f"\\boxed{{{answer}}}", EXTRACTION, parsing_timeout=0)
    return verify(golds, answers, timeout_seconds=0, raise_on_error=True)


def _depth(text: str) -> int:
    return max(itertools.accumulate((char in "({[") - (char in ")}]") for char in text), default=0)


def _bare(text: str) -> str:
    """Without the box, dollar signs of math mode and a full stop around it."""
    text = (last_box(text) or text).strip().removesuffix(".").strip()
    return text[1:-1].strip() if len(text) > 1 and text[0] == text[-1] == "$" else text
