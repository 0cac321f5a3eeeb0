"""Child process of math_judge: reads [gold, answer] lines, writes true, false or null. Run as a file, not imported.

The argument is the time limit of one comparison in seconds. SIGALRM kills the process at that limit, even inside a long
operation of the interpreter. The process exits when its input closes: it outlives the trainer by at most the limit.
"""

import json
import logging
import os
import resource
import signal
import sys

from math_verify import parse, verify

MEMORY_LIMIT = 4 << 30


def judge(gold_text: str, answer_text: str) -> bool | None:
    """Return whether the results are equal; None if the gold text contains nothing to compare."""
    gold = _parse(gold_text) or _parse(f"${gold_text}$")
    if not gold:
        return None
    return bool(verify(gold, _parse(answer_text), timeout_seconds=None))


def _parse(text: str) -> list:
    # None disables the library's own time limit, although the parameter is annotated as int.
    return parse(text, parsing_timeout=None)  # pyrefly: ignore[bad-argument-type]


def main(seconds: float) -> None:
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    # Verdicts go to a duplicate of stdout. stdout itself is redirected to stderr, so that print() cannot corrupt them.
    verdicts = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            verdict = judge(*json.loads(line))
        except (MemoryError, RecursionError):
            verdict = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        verdicts.write(json.dumps(verdict) + "\n")
        verdicts.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
