"""Which gold answers a scorer can use, checked when the rows are loaded.

A check takes `Task.golds` (objectives × aliases, none blank) and returns those that can be matched.
Raises DataError with what is wrong and the remedy; who loads the rows adds file and row.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from mempo_ray.errors import DataError
from mempo_ray.rewards.scorers.program_tests import ASSERT, read_tests
from mempo_ray.rewards.scorers.text import normalize_answer, parse_number

Golds = tuple[tuple[str, ...], ...]
GoldCheck = Callable[[Golds], Golds]

OBJECTIVE_SEPARATOR = ";"


def any_golds(golds: Golds) -> Golds:
    """Any text."""
    return golds


def answer_golds(golds: Golds) -> Golds:
    """Answers that are compared after §2's normalisation.

    Aliases of which it leaves nothing are left out, since an empty answer would match them. An objective without any
    other is refused, and so is a ';' in one of several objectives, since it separates them in the answer.
    """
    kept = tuple(tuple(filter(normalize_answer, aliases)) for aliases in golds)
    for aliases, given in zip(kept, golds, strict=True):
        if not aliases:
            raise DataError(
                f"the answer {list(given)} is empty once case, punctuation and articles are gone, so any empty answer "
                "would match it; give it words or drop the row"
            )
        if len(golds) > 1 and (bad := [alias for alias in aliases if OBJECTIVE_SEPARATOR in alias]):
            raise DataError(
                f"{bad[0]!r} holds {OBJECTIVE_SEPARATOR!r}, which separates objectives; rewrite the answer without it"
            )
    return kept


def single_gold(golds: Golds) -> Golds:
    """One objective: its aliases are other ways to write it."""
    if len(golds) != 1:
        raise DataError(f"{len(golds)} objectives, this scorer compares one answer; give a text or a list of aliases")
    return golds


def number_golds(golds: Golds) -> Golds:
    """One objective whose aliases are numbers, e.g. '1,000' or '-3.5'; of a whole GSM8K solution, what '####' marks."""
    (aliases,) = single_gold(golds)
    numbers = tuple(alias.rpartition("####")[2].strip() for alias in aliases)
    if bad := [alias for alias in numbers if parse_number(alias) is None]:
        raise DataError(f"the answer {bad[0]!r} is not a number; give the number alone, without words or units")
    return (numbers,)


def program_golds(golds: Golds) -> Golds:
    """Tests of a program (scorers/program_tests.py). A list of texts is a list of tests, all of which count."""
    (aliases,) = single_gold(golds)
    if len(aliases) > 1 and not all(map(ASSERT.search, aliases)):
        raise DataError("tests of a program: a list of texts must be one of asserts; give other tests as one JSON")
    tests = aliases[0] if len(aliases) == 1 else json.dumps(aliases)
    read_tests(tests)
    return ((tests,),)
