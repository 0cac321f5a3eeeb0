"""Tests of a row, in the forms that data sets of programs use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypedDict


class Case(TypedDict):
    """One test: statements that follow the program, or a standard input and the expected standard output."""

    check: str | None
    stdin: str
    stdout: str


def cases_of(tests: Any) -> list[Case]:
    """Return the tests of a cell. Raises ValueError for another form.

    Python statements as text or a list of texts; {"input", "output"} pairs in a list; {"inputs": [...], "outputs":
    [...]}; and each of these as JSON.
    """
    if isinstance(tests, str):
        if tests.lstrip()[:1] not in ("[", "{"):
            return [_check(tests)] if tests.strip() else []
        tests = json.loads(tests)
    if isinstance(tests, Mapping) and {"inputs", "outputs"} <= tests.keys():
        return [_pair(*pair) for pair in zip(tests["inputs"], tests["outputs"], strict=True)]
    if isinstance(tests, list | tuple):
        return [_case(test) for test in tests]
    raise ValueError(f"tests must be statements, a list of them or of input and output pairs, got {tests!r:.80}")


def _case(test: Any) -> Case:
    if isinstance(test, str):
        return _check(test)
    if isinstance(test, Mapping) and {"input", "output"} <= test.keys():
        return _pair(test["input"], test["output"])
    raise ValueError(f'a test must be statements, or have "input" and "output", got {test!r:.80}')


def _check(statements: str) -> Case:
    return Case(check=statements, stdin="", stdout="")


def _pair(given: Any, expected: Any) -> Case:
    return Case(check=None, stdin=_lines(given), stdout=_lines(expected))


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
