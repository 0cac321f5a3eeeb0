"""Tool calls in a completion, <tool_call>{"name": ..., "arguments": {...}}</tool_call>, and partial credit for them."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from colocated_grpo.environments.rewards.answers import without_thoughts
from colocated_grpo.types import JsonObject

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PARTIAL_CREDIT = 0.5
"""Upper bound of the credit for calls that are not exactly the expected calls."""

Calls = list[JsonObject]


def render_calls(calls: Sequence[JsonObject]) -> str:
    """Return text that `read_calls` parses back into the same calls."""
    return "\n".join(f"{OPEN}{json.dumps(call)}{CLOSE}" for call in calls)


def read_calls(text: str) -> Calls | None:
    """Return the calls of a completion in order; None if a block is malformed. Thoughts are ignored."""
    try:
        return [as_call(json.loads(block)) for block in _blocks(without_thoughts(text))]
    except (ValueError, RecursionError):
        return None


def expected_calls(value: Any) -> Calls:
    """Return the calls in a cell of a dataset. Raises ValueError.

    The cell holds a list of calls, one call, JSON of either, or text with <tool_call> blocks.
    """
    if isinstance(value, str):
        value = [json.loads(block) for block in _blocks(value)] if OPEN in value else json.loads(value)
    calls = [as_call(call) for call in ([value] if isinstance(value, dict) else value)]
    if not calls:
        raise ValueError("no expected call")
    return calls


def as_call(value: object) -> JsonObject:
    """Return a call as {"name", "arguments"}. Raises ValueError.

    Also accepts OpenAI's form, nested under "function", and arguments as JSON text.
    """
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
    """Return whether the calls match in order. Argument order and the form of numbers (2 or 2.0) are ignored."""
    return given is not None and _canonical(given) == _canonical(expected)


def credit(given: Calls | None, expected: Calls) -> float:
    """Return 1 for exact calls, else PARTIAL_CREDIT times the mean fraction of right names and arguments per call.

    Calls are compared by position. Extra and missing calls and arguments count as wrong.
    """
    if given is None:
        return 0.0
    if is_exact(given, expected):
        return 1.0
    matches = [_match(one, other) for one, other in zip(given, expected, strict=False)]
    return PARTIAL_CREDIT * sum(matches) / max(len(given), len(expected))


def _match(given: JsonObject, expected: JsonObject) -> float:
    """Return the fraction of right values among the name and all arguments; 0 for a wrong name."""
    if given["name"] != expected["name"]:
        return 0.0
    arguments, wanted = given["arguments"], expected["arguments"]
    names = arguments.keys() | wanted.keys()
    right = sum(
        name in arguments and name in wanted and _canonical(arguments[name]) == _canonical(wanted[name])
        for name in names
    )
    return (1 + right) / (1 + len(names))


def _canonical(value: object) -> str:
    """Return the same text for equal JSON values. Python's == would treat true as 1."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: object) -> object:
    """Replace whole floats such as 2.0 by integers, at any depth."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _whole(inner) for name, inner in value.items()}
    return [_whole(inner) for inner in value] if isinstance(value, list) else value


def _blocks(text: str) -> Iterator[str]:
    """Yield the text between opening and closing tags; "", which is no valid call, if a closing tag is missing."""
    for after in text.split(OPEN)[1:]:
        block, closed, _ = after.partition(CLOSE)
        yield block if closed else ""
