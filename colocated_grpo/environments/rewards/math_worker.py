"""Child process of math_judge: reads [gold, answer] lines, writes true, false or null. Run as a file, not imported.

The kernel ends the process when one comparison outlasts the limit given as the argument, whatever it is doing; it
also ends by itself when its input closes, so it never outlives the trainer by more than that limit.
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
    """None: the gold text holds nothing that can be compared."""
    gold = parse(gold_text, parsing_timeout=None) or parse(f"${gold_text}$", parsing_timeout=None)
    if not gold:
        return None
    return bool(verify(gold, parse(answer_text, parsing_timeout=None), timeout_seconds=None))


def main(seconds: float) -> None:
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    # Replies leave through a private handle: whatever a library prints would otherwise be read as a verdict.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            verdict = judge(*json.loads(line))
        except (MemoryError, RecursionError):
            verdict = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(verdict) + "\n")
        replies.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
