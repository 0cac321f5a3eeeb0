"""Tools that are safe to expose to a model: no code is executed, no state is touched, and their cost is bounded."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

MAX_EXPRESSION_LENGTH = 200
MAX_BITS = 256
"""Bits of the largest numerator or denominator. Bounds the digits of results and the cost of operations."""
MAX_EXPONENT = 64
MAX_RESULTS = 3
"""Lines that a search returns."""
WORD = re.compile(r"\w+")

OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
}


class ToolError(ValueError):
    """A bad call. The message is shown to the model."""


def calculate(expression: str) -> str:
    """Evaluate numbers, + - * / // % ** and parentheses exactly. Non-integer results have six significant digits."""
    if len(expression) > MAX_EXPRESSION_LENGTH:
        raise ToolError(f"more than {MAX_EXPRESSION_LENGTH} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except ToolError:
        raise
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError("not an expression") from None
    return str(value) if value.denominator == 1 else f"{float(value):.6g}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=number) if type(number) in (int, float):
            value = Fraction(repr(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            value = _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            value = _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            value = OPERATORS[type(op)](_value(left), _value(right))
        case _:
            raise ToolError("only numbers, + - * / // % ** and parentheses")
    return _bounded(value)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise ToolError(f"an exponent must be a whole number of at most {MAX_EXPONENT}")
    return base ** int(exponent)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ToolError("the number is too large")
    return value


def search(text: str, query: str) -> str:
    """Return up to MAX_RESULTS lines, those with most query words first, ties in text order. Case is ignored."""
    wanted = set(WORD.findall(query.lower()))
    lines = text.splitlines()
    hits = {number: len(wanted & set(WORD.findall(line.lower()))) for number, line in enumerate(lines)}
    found = sorted((number for number in hits if hits[number]), key=lambda number: -hits[number])
    if not found:
        raise ToolError("nothing found")
    return "\n".join(lines[number] for number in found[:MAX_RESULTS])
