"""Incremental detokenization of a streamed completion."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Tokenizers decode the first bytes of a character to this when its other bytes are in later tokens."""


class Detokenizer:
    """Text of one completion in increments that end at whole characters and contain no part of a stop string.

    New tokens are decoded together with earlier ones, because the text of a token can depend on what precedes it: many
    tokenizers drop the space of the first word.
    """

    def __init__(self, decode: Decode, stop: Sequence[str]) -> None:
        self._decode = decode
        self._stop = stop
        self._tokens: list[int] = []
        self._context, self._decoded = 0, 0
        """Tokens before `_decoded` have been turned into text; those from `_context` on are decoded again."""
        self._pending = ""
        """Decoded text that may be the beginning of a stop string."""
        self._stopped = False
        self.emitted = 0
        """Characters returned so far."""

    def add(self, token_ids: Sequence[int]) -> str:
        """Append tokens and return the text that is final now, possibly empty."""
        self._tokens += token_ids
        before = self._decode(self._tokens[self._context : self._decoded])
        text = self._decode(self._tokens[self._context :])
        if text.endswith(INCOMPLETE) or len(text) <= len(before):
            return ""
        self._context, self._decoded = self._decoded, len(self._tokens)
        return self._emit(text[len(before) :])

    def _emit(self, text: str) -> str:
        self._pending += text
        found = [self._pending.index(stop) for stop in self._stop if stop in self._pending]
        if self._stopped or found:
            end, self._stopped = min(found, default=0), True
        else:
            end = len(self._pending) - max((_overlap(self._pending, stop) for stop in self._stop), default=0)
        emitted, self._pending = self._pending[:end], self._pending[end:]
        self.emitted += len(emitted)
        return emitted


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    return text[: min((text.index(string) for string in stop if string in text), default=len(text))]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
