"""The tests of a program, as a data row holds them.

JSON as in verl's files: {"inputs": [...], "outputs": [...]}, one pair a test. With {"fn_name": ...} beside them, as
APPS and TACO have it, a test calls that function: its input is the list of arguments.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

from mempo_ray.errors import DataError


@dataclass(frozen=True)
class CodeTest:
    """One test: what the program reads, what it shall print, or the arguments and result of a call."""

    stdin: str = ""
    expected: Any = ""
    arguments: tuple[Any, ...] | None = None  # None: over stdin and stdout


@dataclass(frozen=True)
class CodeTests:
    """All tests of a task; `fn_name` is '' where they go over stdin and stdout."""

    tests: tuple[CodeTest, ...]
    fn_name: str = ""


@functools.lru_cache(maxsize=1024)
def read_tests(text: str) -> CodeTests:
    """A row's ground truth.

    Raises:
        DataError: not JSON, no tests, or inputs and outputs of different number.

    Example:
        >>> read_tests('{"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}').tests[0].arguments
        (1, 2)
    """
    try:
        row = json.loads(text)
        inputs, outputs, fn_name = list(row["inputs"]), list(row["outputs"]), row.get("fn_name") or ""
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"tests of a program must be JSON {{'inputs': [...], 'outputs': [...], 'fn_name'?: ...}}, "
            f"not {text[:80]!r} ({type(error).__name__}: {error})"
        ) from None
    if not inputs or len(inputs) != len(outputs):
        raise DataError(f"tests of a program: {len(inputs)} inputs and {len(outputs)} outputs; give as many, and some")
    if fn_name:
        calls = [CodeTest(arguments=_arguments(i), expected=_parsed(o)) for i, o in zip(inputs, outputs, strict=True)]
        return CodeTests(tuple(calls), fn_name)
    pairs = zip(map(_lines, inputs), map(_lines, outputs), strict=True)
    return CodeTests(tuple(CodeTest(stdin=stdin, expected=expected) for stdin, expected in pairs))


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
