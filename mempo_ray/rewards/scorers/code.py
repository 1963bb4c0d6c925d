"""Programs against the tests of their task: codecontests, apps, codeforces, taco.

    policy's text ──▶ last python block ──▶ one sandboxed run a test ──▶ share of tests passed

Expected outputs never enter the sandbox, so a program can only print an answer that it knows. Asserts must, and it has
to reach their end: to leave before is no way to pass. A test that the sandbox failed leaves the response unscored.
"""

from __future__ import annotations

import functools
import json
import math
import re
import secrets

from mempo_ray.config.schema import Reward, Sandbox
from mempo_ray.contracts import Score, Scored, Unscored
from mempo_ray.rewards.contract import Response
from mempo_ray.rewards.sandbox import open_sandbox
from mempo_ray.rewards.sandbox.outcome import CodeRunner, Outcome, Status
from mempo_ray.rewards.scorers.program_tests import CodeTest, read_tests

FENCE = re.compile(r"```([\w+#.-]*)[ \t]*\r?\n(.*?)```", re.DOTALL)
PYTHON_NAMES = {"python", "python3", "py"}
TOLERANCE = 1e-6  # of an expected number with a decimal point, absolute and relative
RESULT = "result:"
PASSED = secrets.token_hex(16)  # what the code of a test says at its end


def score_code(response: Response, settings: Reward) -> Score:
    """The share of tests that the program passes, or 1 only for all of them (`reward.code_tests`).

    extra: `code` (is there a program), num_tests, num_passed, and `code/<status>`, how many runs ended so.
    """
    return score_program(response, settings, _sandbox(settings.sandbox))


@functools.cache
def _sandbox(settings: Sandbox) -> CodeRunner:
    """One for all scorers of a process: its limit of concurrent runs holds over all of them."""
    return open_sandbox(settings)


def score_program(response: Response, settings: Reward, sandbox: CodeRunner) -> Score:
    """`score_code` with the sandbox given. Raises DataError: the row's tests are not in their form."""
    tests = read_tests(response.golds[0][0])
    program = extract_program(response)
    if program is None:
        return Scored(0.0, {"code": False, "num_tests": len(tests.tests), "num_passed": 0})
    num_passed, statuses, left_s = 0, dict.fromkeys(Status, 0), settings.code_s
    for test in tests.tests:
        if left_s <= 0:
            break
        outcome = sandbox.run(*runnable(program, tests.fn_name, test), at_most_s=left_s)
        if outcome.status is Status.SANDBOX_FAILED:
            return Unscored(f"sandbox: {outcome.detail}", "infrastructure")
        left_s -= outcome.seconds  # the code's own: waiting for a place is nobody's fault
        statuses[outcome.status] += 1
        passed = passes(outcome, test)
        num_passed += passed
        if settings.code_tests == "all" and not passed:
            break
    share = num_passed / len(tests.tests)
    counts = {f"code/{status}": count for status, count in statuses.items() if status is not Status.SANDBOX_FAILED}
    return Scored(
        share if settings.code_tests == "share" else float(share == 1.0),
        {"code": True, "num_tests": len(tests.tests), "num_passed": num_passed, **counts},
    )


def extract_program(response: Response) -> str | None:
    """The policy's program: the last python block (else the last one without a language) of its answer.

    An answer without any block is taken as a program; without an answer, the text of all turns is searched.

    Example: "```json\\n{}\\n``` then ```python\\nprint(1)\\n```" gives "print(1)\\n".
    """
    text = response.answer if response.answer is not None else response.solution
    blocks = [(language.lower(), body) for language, body in FENCE.findall(text)]
    for languages in (PYTHON_NAMES, {""}):
        if found := [body for language, body in blocks if language in languages]:
            return found[-1]
    return response.answer if response.answer and not blocks else None


IMPORTS = """
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string
from collections import *
from typing import *
"""
"""What solutions of function-call tasks take for granted, since their sites import it."""

PROGRAM = """
import json as _json, os as _os, sys as _sys
_out, _sys.stdout = _sys.stdout, open(_os.devnull, "w")
_names = {{"__name__": "solution"}}
exec({imports!r}, _names)
exec(compile({program!r}, "solution.py", "exec"), _names)
"""
CALL = """
_owner = _names["Solution"]() if {name!r} not in _names and "Solution" in _names else None
_function = getattr(_owner, {name!r}) if _owner is not None else _names[{name!r}]
_out.write({result!r} + _json.dumps(_function(*_json.loads({arguments!r}))) + "\\n")
_out.flush()
"""
CODE = """
exec(compile({code!r}, "tests.py", "exec"), _names)
_out.write({result!r} + "\\n")
_out.flush()
"""


def runnable(program: str, fn_name: str, test: CodeTest) -> tuple[str, str]:
    """(source, stdin) that runs `program` on `test`; a function is found by name, or as a method of `Solution`."""
    source = PROGRAM.format(imports=IMPORTS, program=program)
    if test.code:
        return source + CODE.format(code=test.code, result=RESULT + PASSED), ""
    if test.arguments is None:
        return program, test.stdin
    return source + CALL.format(name=fn_name, result=RESULT, arguments=json.dumps(test.arguments)), ""


def passes(outcome: Outcome, test: CodeTest) -> bool:
    """Whether a run ended well (exit code 0) and said what the test expects."""
    if not outcome.succeeded:
        return False
    last = outcome.stdout.rstrip().rpartition("\n")[2]
    if test.code:
        return last == RESULT + PASSED
    if test.arguments is None:
        return same_output(outcome.stdout, test.expected)
    if not last.startswith(RESULT):
        return False
    try:
        result = json.loads(last.removeprefix(RESULT))
    except (ValueError, RecursionError):  # the program wrote this line itself
        return False
    return result == test.expected or [result] == test.expected  # APPS wraps results in a list


def same_output(printed: str, expected: str) -> bool:
    """Equal word for word, white space aside; an expected decimal number may be off by 1e-6.

    Example:
        >>> same_output("1 2.5000001\\n", "1\\n2.5"), same_output("yes", "YES")
        (True, False)
    """
    words, wanted = printed.split(), expected.split()
    return len(words) == len(wanted) and all(map(_same_word, words, wanted))


def _same_word(word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    if "." not in wanted:
        return False
    try:
        return math.isclose(float(word), float(wanted), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except ValueError:
        return False
