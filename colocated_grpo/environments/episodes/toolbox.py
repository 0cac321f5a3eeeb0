"""Tools that are safe in the hands of a model: they run no code, touch nothing outside, and their cost is bounded."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

LONGEST_EXPRESSION = 200
MOST_BITS = 256
"""Of a numerator or denominator; bounds the digits of every result and the cost of every step."""
LARGEST_EXPONENT = 64
RESULTS = 3
"""Lines that a search gives."""
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
    """The call is wrong; the message is for the model."""


def calculate(expression: str) -> str:
    """Exact value of numbers, + - * / // % ** and parentheses; six digits where it is no whole number."""
    if len(expression) > LONGEST_EXPRESSION:
        raise ToolError(f"more than {LONGEST_EXPRESSION} characters")
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
    if exponent.denominator != 1 or abs(exponent) > LARGEST_EXPONENT:
        raise ToolError(f"an exponent must be a whole number of at most {LARGEST_EXPONENT}")
    return base ** int(exponent)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise ToolError("the number is too large")
    return value


def search(text: str, query: str) -> str:
    """Lines of the text with most of the query's words, in the text's order where equal; case does not matter."""
    wanted = set(WORD.findall(query.lower()))
    lines = text.splitlines()
    hits = {number: len(wanted & set(WORD.findall(line.lower()))) for number, line in enumerate(lines)}
    found = sorted((number for number in hits if hits[number]), key=lambda number: -hits[number])
    if not found:
        raise ToolError("nothing found")
    return "\n".join(lines[number] for number in found[:RESULTS])
