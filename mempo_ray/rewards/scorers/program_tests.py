"""The tests of a program, as a data row holds them.

JSON as in verl's files: {"inputs": [...], "outputs": [...]}, one pair a test. With {"fn_name": ...} beside them, as
APPS and TACO have it, a test calls that function: its input is the list of arguments.

Or code that runs after the program, in its names, and raises where the program is wrong: {"assert_case": [...]}, as
verl has it (whatever stands beside it), {"functional": "..."} of LeetCode rows, a JSON list of texts, or asserts as
they are. A HumanEval row is {"assert_case": test + "\\ncheck(" + entry_point + ")"}.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from dataclasses import dataclass
from typing import Any

from mempo_ray.errors import DataError

ASSERT = re.compile(r"^[ \t]*assert\b", re.MULTILINE)


@dataclass(frozen=True)
class CodeTest:
    """One test: what the program reads and shall print, the arguments and result of a call, or code to run after it."""

    stdin: str = ""
    expected: Any = ""
    arguments: tuple[Any, ...] | None = None  # None: over stdin and stdout
    code: str = ""  # '' = none


@dataclass(frozen=True)
class CodeTests:
    """All tests of a task; `fn_name` is '' where they call no function by name."""

    tests: tuple[CodeTest, ...]
    fn_name: str = ""


@functools.lru_cache(maxsize=1024)
def read_tests(text: str) -> CodeTests:
    """A row's ground truth.

    Raises:
        DataError: none of the forms above, no tests, code that does not compile, or inputs and outputs of different
            number.

    Examples:
        >>> read_tests('{"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}').tests[0].arguments
        (1, 2)
        >>> len(read_tests('["assert add(1, 2) == 3", "assert add(0, 0) == 0"]').tests)
        2
    """
    try:
        row: Any = text if ASSERT.search(text) and text.lstrip()[0] not in "{[" else json.loads(text)
        row = {"assert_case": row} if isinstance(row, str | list) else row
        codes = row.get("assert_case") or row.get("functional") or ()
        if any(codes):  # verl writes '' where a row has none
            return CodeTests(tuple(map(_code, [codes] if isinstance(codes, str) else codes)))
        inputs, outputs, fn_name = list(row["inputs"]), list(row["outputs"]), str(row.get("fn_name") or "")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            "tests of a program must be JSON {'inputs': [...], 'outputs': [...], 'fn_name'?: ...}, or code with "
            f"asserts, not {text[:80]!r} ({type(error).__name__}: {error})"
        ) from None
    if not inputs or len(inputs) != len(outputs):
        raise DataError(f"tests of a program: {len(inputs)} inputs and {len(outputs)} outputs; give as many, and some")
    if fn_name:
        calls = [CodeTest(arguments=_arguments(i), expected=_parsed(o)) for i, o in zip(inputs, outputs, strict=True)]
        return CodeTests(tuple(calls), fn_name)
    pairs = zip(map(_lines, inputs), map(_lines, outputs), strict=True)
    return CodeTests(tuple(CodeTest(stdin=stdin, expected=expected) for stdin, expected in pairs))


def _code(text: str) -> CodeTest:
    """Raises DataError: it does not compile, or any program would pass it."""
    try:
        body = ast.parse(text).body
        run = [node for part in body if not isinstance(part, ast.FunctionDef | ast.ClassDef) for node in ast.walk(part)]
        if not any(isinstance(node, ast.Assert | ast.Call) for node in run):
            raise ValueError("it asserts nothing; is the call of its function missing?")
    except (SyntaxError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"tests of a program: {text!r:.80} cannot be used: {error}") from None
    return CodeTest(code=text)


def _lines(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _arguments(value: object) -> tuple[Any, ...]:
    """A list of arguments, or their JSON, one a line."""
    if isinstance(value, str):
        return tuple(_parsed(line) for line in value.splitlines())
    return tuple(value) if isinstance(value, list) else (value,)


def _parsed(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value  # a text that is not JSON stands for itself
