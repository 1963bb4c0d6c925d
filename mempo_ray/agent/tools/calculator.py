"""`calculator`: arithmetic by walking a syntax tree. Nothing is evaluated that is not listed here."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from mempo_ray.agent.tools.base import BaseTool, ToolResult, text_parameter

LONGEST_EXPRESSION = 500  # characters
MOST_BITS = 4096  # of a whole number, results on the way included
MOST_FACTORIAL = 500
MOST_DIGITS = 100  # that `round` is asked for

Number = int | float

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_CONSTANTS = {"pi": math.pi, "e": math.e}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs, "ceil": math.ceil, "cos": math.cos, "exp": math.exp, "factorial": math.factorial, "floor": math.floor,
    "gcd": math.gcd, "log": math.log, "log10": math.log10, "log2": math.log2, "max": max, "min": min, "round": round,
    "sin": math.sin, "sqrt": math.sqrt, "tan": math.tan,
}  # fmt: skip


class CalculatorTool(BaseTool):
    """The value of an expression."""

    name = "calculator"
    description = f"Evaluate an arithmetic expression; + - * / // % ** ( ), pi, e, {', '.join(_FUNCTIONS)}."
    parameters = text_parameter("expression", "For example: (1889 - 1848) * 2")

    async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
        try:
            return ToolResult.of_text(shown(calculate(arguments["expression"])))
        except (ValueError, ArithmeticError) as error:
            return ToolResult.error(str(error))


def calculate(expression: str) -> Number:
    """The value of an expression, in bounded time and memory.

    Raises:
        ValueError: it is not arithmetic, or too large; the message is for its author.
        ArithmeticError: division by zero, or overflow.

    Example:
        >>> calculate("2 ^ 10 / 4")
        256.0
    """
    if len(expression) > LONGEST_EXPRESSION:
        raise ValueError(f"more than {LONGEST_EXPRESSION} characters")
    try:
        return _value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError, TypeError):  # the parser's own limits; wrong numbers of arguments
        raise ValueError(f"not an expression: {expression.strip()[:80]!r}") from None


def shown(number: Number) -> str:
    """12 digits of a fraction; whole numbers as they are."""
    return f"{number:.12g}" if isinstance(number, float) else str(number)


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp() if type(node.op) in _UNARY:
            return _UNARY[type(node.op)](_value(node.operand))
        case ast.BinOp() if type(node.op) in _BINARY:
            left, right = _value(node.left), _value(node.right)
            is_whole_power = isinstance(node.op, ast.Pow) and isinstance(left, int) and isinstance(right, int)
            if is_whole_power and left.bit_length() * abs(right) > MOST_BITS:
                raise ValueError("a number too large")
            return _bounded(_BINARY[type(node.op)](left, right))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            values = [_value(arg) for arg in args]
            if name == "factorial" and not (len(values) == 1 and 0 <= values[0] <= MOST_FACTORIAL):
                raise ValueError(f"factorial takes a number from 0 to {MOST_FACTORIAL}")
            if name == "round" and not all(abs(digits) <= MOST_DIGITS for digits in values[1:]):
                raise ValueError(f"round takes at most {MOST_DIGITS} digits")
            return _bounded(_FUNCTIONS[name](*values))
    raise ValueError(f"only arithmetic is allowed, not {ast.unparse(node)[:80]!r}")


def _bounded(number: Any) -> Number:
    if isinstance(number, int) and number.bit_length() > MOST_BITS:
        raise ValueError("a number too large")
    if not isinstance(number, int | float) or (isinstance(number, float) and not math.isfinite(number)):
        raise ValueError("not a real number")
    return number
