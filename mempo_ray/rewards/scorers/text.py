"""Comparing an answer with gold answers (algorithm.md §2): objectives × aliases, where any alias may match."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
ARTICLES = re.compile(r"\b(a|an|the)\b")
NUMBER = re.compile(r"[-+]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?|[-+]?\.\d+")
CLOSED_ANSWERS = ("yes", "no", "noanswer")
PUNCTUATION = str.maketrans("", "", string.punctuation)

Match = Callable[[str, Sequence[str]], float]
"""(answer, aliases) → [0, 1]."""


def normalize_answer(text: str) -> str:
    """Lower case → delete ASCII punctuation → drop the words a, an, the → collapse white space (SQuAD's evaluation).

    Example:
        >>> normalize_answer("The  Well-Known U.S.A!")
        'wellknown usa'
    """
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def last_answer(text: str) -> str | None:
    """Content of the last complete `<answer>` block, stripped; None without one."""
    found = ANSWER.findall(text)
    return found[-1].strip() if found else None


def parse_number(text: str) -> Decimal | None:
    """A plain decimal number; thousands separators, a currency sign and '%' or '.' behind it are ignored.

    Example:
        >>> parse_number("$1,000.50"), parse_number("two")
        (Decimal('1000.50'), None)
    """
    plain = re.sub(r"[$€£]", "", text).strip().rstrip(".%").strip()
    return Decimal(plain.replace(",", "")) if NUMBER.fullmatch(plain) else None


def exact_match(answer: str, aliases: Sequence[str]) -> float:
    """1 where the normalised answer equals any normalised alias."""
    return float(normalize_answer(answer) in {normalize_answer(alias) for alias in aliases})


def substring_match(answer: str, aliases: Sequence[str]) -> float:
    """1 where any normalised alias occurs in the normalised answer."""
    normal = normalize_answer(answer)
    return float(any(normalize_answer(alias) in normal for alias in aliases))


def f1(answer: str, aliases: Sequence[str]) -> float:
    """Largest F1 over the aliases between bags of normalised words; two empty bags count as equal.

    'yes', 'no' and 'noanswer' match nothing but themselves (the evaluation scripts of HotpotQA and 2WikiMultihopQA).
    """
    return max((_word_f1(normalize_answer(answer), normalize_answer(alias)) for alias in aliases), default=0.0)


def _word_f1(answer: str, gold: str) -> float:
    answer_words, gold_words = answer.split(), gold.split()
    if not answer_words or not gold_words or answer in CLOSED_ANSWERS or gold in CLOSED_ANSWERS:
        return float(answer_words == gold_words)
    num_shared = sum((Counter(answer_words) & Counter(gold_words)).values())
    return 2 * num_shared / (len(answer_words) + len(gold_words))


@dataclass(frozen=True)
class ObjectiveScores:
    """`score` over all objectives, each objective's own part, and parts of the answer that nobody asked for."""

    score: float
    parts: tuple[float, ...]
    num_surplus: int = 0


def score_objectives(
    answer: str | None, golds: Sequence[Sequence[str]], *, multi_objective: str, match: Match = exact_match
) -> ObjectiveScores:
    """Score an answer against objectives × aliases.

    One objective: the whole answer. Several: the answer is split at ';' and matched by position; a missing part
    scores 0, surplus parts are ignored and counted.

    Args:
        answer: content of the last `<answer>`; None scores 0.
        multi_objective: mean (in [0, 1]) | sum (up to the number of objectives) | all (1 where every part scores 1).

    Example:
        >>> score_objectives("Paris; 1888; x", [["paris"], ["1889"]], multi_objective="mean")
        ObjectiveScores(score=0.5, parts=(1.0, 0.0), num_surplus=1)
    """
    if answer is None:
        given: list[str] = []
    else:
        given = [answer] if len(golds) == 1 else [part.strip() for part in answer.split(";")]
    parts = tuple(match(given[i], aliases) if i < len(given) else 0.0 for i, aliases in enumerate(golds))
    total = {
        "mean": sum(parts) / len(parts),
        "sum": sum(parts),
        "all": float(min(parts) == 1.0),
    }[multi_objective]
    return ObjectiveScores(total, parts, max(len(given) - len(golds), 0))
