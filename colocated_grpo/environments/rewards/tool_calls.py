"""Tool calls in a completion's text, <tool_call>{"name": ..., "arguments": {...}}</tool_call>, and their credit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from colocated_grpo.environments.rewards.answers import without_thoughts

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PARTIAL_CREDIT = 0.5
"""Upper bound of the credit for calls that are not exactly the expected ones."""

Calls = list[dict[str, Any]]


def render_calls(calls: Sequence[dict[str, Any]]) -> str:
    """The text that `read_calls` reads back."""
    return "\n".join(f"{OPEN}{json.dumps(call)}{CLOSE}" for call in calls)


def read_calls(text: str) -> Calls | None:
    """The calls of a completion in order, thoughts left out; None where a block is no call."""
    try:
        return [as_call(json.loads(block)) for block in _blocks(without_thoughts(text))]
    except (ValueError, RecursionError):
        return None


def expected_calls(value: Any) -> Calls:
    """From a dataset's column: calls, one call, their JSON, or text with <tool_call> blocks. Raises ValueError."""
    if isinstance(value, str):
        value = [json.loads(block) for block in _blocks(value)] if OPEN in value else json.loads(value)
    calls = [as_call(call) for call in ([value] if isinstance(value, dict) else value)]
    if not calls:
        raise ValueError("no expected call")
    return calls


def as_call(value: Any) -> dict[str, Any]:
    """Name and arguments; undoes OpenAI's nesting under "function" and its arguments as text. Raises ValueError."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("a call is an object with a name")
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("arguments are an object")
    return {"name": value["name"], "arguments": arguments}


def is_exact(given: Calls | None, expected: Calls) -> bool:
    """The same calls in the same order, up to the order of arguments and the spelling of numbers."""
    return given is not None and _canonical(given) == _canonical(expected)


def credit(given: Calls | None, expected: Calls) -> float:
    """1 for exact calls; otherwise up to PARTIAL_CREDIT: call by call in order, the share of right names and arguments.

    Calls too many or too few and arguments too many or too few count as wrong ones.
    """
    if given is None:
        return 0.0
    if is_exact(given, expected):
        return 1.0
    shares = [_share(one, other) for one, other in zip(given, expected, strict=False)]
    return PARTIAL_CREDIT * sum(shares) / max(len(given), len(expected))


def _share(given: dict[str, Any], expected: dict[str, Any]) -> float:
    if given["name"] != expected["name"]:
        return 0.0
    arguments, wanted = given["arguments"], expected["arguments"]
    names = arguments.keys() | wanted.keys()
    right = sum(
        name in arguments and name in wanted and _canonical(arguments[name]) == _canonical(wanted[name])
        for name in names
    )
    return (1 + right) / (1 + len(names))


def _canonical(value: Any) -> str:
    """Equal text for equal JSON values. Python's own == takes true for 1."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    """The value with 2.0 written as 2."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _whole(inner) for name, inner in value.items()}
    return [_whole(inner) for inner in value] if isinstance(value, list) else value


def _blocks(text: str) -> Iterator[str]:
    """What stands between the tags; nothing, which is no call, where the closing one is missing."""
    for after in text.split(OPEN)[1:]:
        block, closed, _ = after.partition(CLOSE)
        yield block if closed else ""
