"""The built-in reward functions, in TRL's signature, and the answers and <tool_call> blocks in completions."""

import json
import logging
import os
import re
import resource
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from importlib.util import find_spec
from typing import Any

from colocated_grpo.environments.rewards.workers import LATE, Answer, Started, WorkerPool
from colocated_grpo.types import JsonObject

OPEN, CLOSE = "<answer>", "</answer>"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?", re.ASCII)


def without_thoughts(text: str) -> str:
    """Return the text after the last </think>, or all of it if there is none."""
    return text.rpartition("</think>")[2]


def final_answer(completion: str) -> str:
    """Return the content of the last <answer>...</answer>, else the completion without its thoughts. Stripped."""
    end = completion.rfind(CLOSE)
    start = completion.rfind(OPEN, 0, end) if end >= 0 else -1
    return completion[start + len(OPEN) : end].strip() if start >= 0 else without_thoughts(completion).strip()


def last_number(text: str) -> str | None:
    """Return the last decimal number in the text, without thousands separators; None if there is none."""
    numbers = NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


def marked_number(text: str) -> Decimal | None:
    """Return the last number, after the last #### if any. Decimal: 72 equals 72.0, and parsing takes linear time."""
    found = last_number(text.rpartition("####")[2])
    return None if found is None else Decimal(found)


OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
PARTIAL_CREDIT = 0.5
"""Upper bound of the credit for an answer, or for tool calls, that are not exactly the expected ones."""

Calls = list[JsonObject]


def read_calls(text: str) -> Calls | None:
    """Return the calls of a completion in order; None if a block is malformed. Thoughts are ignored."""
    try:
        return [as_call(json.loads(block)) for block in _blocks(without_thoughts(text))]
    except (ValueError, RecursionError):
        return None


def expected_calls(value: Any) -> Calls:
    """Return the calls in a cell: one or a list, also as JSON, or text with <tool_call> blocks. Raises ValueError."""
    if isinstance(value, str):
        value = [json.loads(block) for block in _blocks(value)] if OPEN_CALL in value else json.loads(value)
    calls = [as_call(call) for call in ([value] if isinstance(value, dict) else value)]
    if not calls:
        raise ValueError("no expected call")
    return calls


def as_call(value: object) -> JsonObject:
    """Return a call, which may be nested as in OpenAI's form, as {"name", "arguments"}. Raises ValueError."""
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
    """Return 1 for exact calls, else PARTIAL_CREDIT times the fraction of right names and arguments, by position."""
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
    for after in text.split(OPEN_CALL)[1:]:
        block, closed, _ = after.partition(CLOSE_CALL)
        yield block if closed else ""


MATH_SECONDS = 5.0
"""Time limit in seconds for one comparison by math-verify. The import of the package does not count."""
MATH_MEMORY = 4 << 30
Completions = Sequence[str | list[JsonObject]]


def exact_match(completions: Completions, answer: Sequence[object], **columns: object) -> list[float]:
    """Return 1 if the final answer equals the column `answer` exactly."""
    pairs = zip(completion_texts(completions), answer, strict=True)
    return [float(final_answer(text) == str(wanted).strip()) for text, wanted in pairs]


def gsm8k(completions: Completions, answer: Sequence[str], **columns: object) -> list[float | None]:
    """Return 1 if the completion's last number equals the number after #### in the column `answer`, else 0.

    The result is None if `answer` has no number. If the completion has ####, only numbers after its last one count.
    """
    wanted = [marked_number(str(gold)) for gold in answer]
    pairs = zip(completion_texts(completions), wanted, strict=True)
    return [None if number is None else float(marked_number(text) == number) for text, number in pairs]


def math_verify(
    completions: Completions,
    answer: Sequence[str] | None = None,
    solution: Sequence[str] | None = None,
    **columns: object,
) -> list[float | None]:
    """Return 1 if math-verify accepts the completion, else 0; None if the reference cannot be parsed.

    The reference is column `answer`, or `solution` if there is no `answer`.
    """
    gold = answer if answer is not None else solution
    if gold is None:
        raise ValueError(f"needs a column 'answer' or 'solution'; available: {', '.join(columns) or 'none'}")
    verdicts = [equal_math(str(wanted), text) for text, wanted in zip(completion_texts(completions), gold, strict=True)]
    return [None if verdict is None else float(verdict) for verdict in verdicts]


def equal_math(gold: str, answer: str) -> bool | None:
    """Return whether reference and answer are equal; False after MATH_SECONDS; None if `gold` cannot be parsed.

    In a worker process, which can be killed: 9^9^9 keeps math-verify busy for ever, with the interpreter lock held.
    """
    if find_spec("math_verify") is None:
        raise ModuleNotFoundError("math-verify is not installed; install it with: pip install math-verify")
    responses, ended = _math.ask((gold, answer), seconds=MATH_SECONDS)
    if ended not in (None, LATE):
        raise RuntimeError(ended)
    return responses[0] if responses else False


def load_math() -> tuple[Started, Answer]:
    """Load math-verify in a worker process. A request is a pair: reference, answer."""
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MATH_MEMORY, MATH_MEMORY))
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)

    def parsed(text: str) -> list[Any]:
        # None disables the library's own time limit, although the parameter is annotated as int.
        return parse(text, parsing_timeout=None)  # pyrefly: ignore[bad-argument-type]

    def compare(pair: tuple[str, str]) -> list[bool | None]:
        try:
            gold = parsed(pair[0]) or parsed(f"${pair[0]}$")
            return [bool(verify(gold, parsed(pair[1]), timeout_seconds=None)) if gold else None]
        except (MemoryError, RecursionError):
            return [False]

    return Started(), compare


_math = WorkerPool(load_math)


def format_think(completions: Completions, **columns: object) -> list[float]:
    """Return 1 if the completion is one <think>...</think> block followed by an answer."""
    # Plain string searches: a regular expression for this backtracks for minutes on a long run of spaces.
    return [
        float(
            text.count("<think>") == text.count("</think>") == 1
            and text.startswith("<think>")
            and not text.endswith("</think>")
        )
        for text in map(str.strip, completion_texts(completions))
    ]


def tool_call(completions: Completions, tool_calls: Sequence[object], **columns: object) -> list[float]:
    """Return 1 if the <tool_call> blocks are exactly the calls of the column `tool_calls`, in order."""
    pairs = zip(completion_texts(completions), tool_calls, strict=True)
    return [float(is_exact(read_calls(text), expected_calls(wanted))) for text, wanted in pairs]


def tool_call_partial(completions: Completions, tool_calls: Sequence[object], **columns: object) -> list[float]:
    """Return 1 for exact calls as tool_call does, else up to 1/2 for right names and arguments."""
    pairs = zip(completion_texts(completions), tool_calls, strict=True)
    return [credit(read_calls(text), expected_calls(wanted)) for text, wanted in pairs]


def completion_texts(completions: Completions) -> list[str]:
    return [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]


REWARDS: dict[str, Callable[..., Sequence[float | None]]] = {
    function.__name__: function
    for function in (exact_match, format_think, gsm8k, math_verify, tool_call, tool_call_partial)
}
