"""Text of tokens as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers write for the bytes of a character whose other bytes are in later tokens."""


class Spelling:
    """The text of one completion in parts, none of which ends within a character or holds any of a stop string.

    Tokens are decoded together with some that came before them: what a token says may depend on them, as a space does.
    """

    def __init__(self, decode: Decode, stop: Sequence[str]) -> None:
        self._decode = decode
        self._stop = stop
        self._tokens: list[int] = []
        self._context, self._spelled = 0, 0
        """Tokens before `_spelled` are in `_held` or given out; those from `_context` on are decoded again."""
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self._stopped = False
        self.given = 0
        """Characters given out."""

    def add(self, token_ids: Sequence[int]) -> str:
        """What can be given out now."""
        self._tokens += token_ids
        before = self._decode(self._tokens[self._context : self._spelled])
        text = self._decode(self._tokens[self._context :])
        if text.endswith(UNFINISHED) or len(text) <= len(before):
            return ""
        self._context, self._spelled = self._spelled, len(self._tokens)
        return self._give(text[len(before) :])

    def _give(self, text: str) -> str:
        self._held += text
        found = [self._held.index(stop) for stop in self._stop if stop in self._held]
        if self._stopped or found:
            end, self._stopped = min(found, default=0), True
        else:
            end = len(self._held) - max((_overlap(self._held, stop) for stop in self._stop), default=0)
        given, self._held = self._held[:end], self._held[end:]
        self.given += len(given)
        return given


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Up to the first stop string."""
    return text[: min((text.index(string) for string in stop if string in text), default=len(text))]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of the text that a stop string begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
