"""The built-in reward functions, in TRL's signature. Each accepts text and chat completions."""

import logging
import os
import resource
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from colocated_grpo.environments.rewards.answers import final_answer, marked_number
from colocated_grpo.environments.rewards.tool_calls import credit, expected_calls, is_exact, read_calls
from colocated_grpo.environments.rewards.workers import LATE, Answer, Started, WorkerPool
from colocated_grpo.types import JsonObject

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

    The result is None if `answer` has no number. If the completion contains ####, only numbers after its last ####
    count.
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

    The comparison runs in a worker process, which can be killed. Answers such as 9^9^9 keep math-verify busy
    indefinitely. The time limit of math-verify itself works only in the main thread, and one long operation holds the
    interpreter lock.
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
