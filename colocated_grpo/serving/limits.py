"""Limits that the engine and its model set to a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LENGTH_KEYS = "(rollout.max_prompt_tokens + rollout.max_completion_tokens)"
"""The settings that decide `Limits.max_tokens`."""


class InvalidRequest(Exception):
    """A request that is well-formed but cannot be served. The message is returned with status 400."""


@dataclass(frozen=True)
class Limits:
    """Limits of the engine and its model, and the seed of unseeded requests. Checks raise InvalidRequest."""

    max_tokens: int
    """Longest sequence, prompt and completion together."""
    longest_token: int
    """Most characters that one token stands for."""
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    """The model's own end-of-sequence tokens."""
    seed: int

    def check_text(self, text: str) -> None:
        """Reject a text too long for any tokenization, since tokenizing megabytes blocks the event loop for seconds."""
        if len(text) > self.max_tokens * self.longest_token:
            raise InvalidRequest(
                f"a prompt of {len(text)} characters cannot fit into {self.max_tokens} tokens {LENGTH_KEYS}"
            )

    def check_prompt(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise InvalidRequest("the prompt is empty")
        if len(token_ids) >= self.max_tokens:
            raise InvalidRequest(
                f"the prompt has {len(token_ids)} tokens; prompt and completion together have at most "
                f"{self.max_tokens} {LENGTH_KEYS}"
            )
        self.check_vocabulary(token_ids)

    def check_vocabulary(self, token_ids: Sequence[int], field: str = "") -> None:
        """Reject unknown tokens: not every version of vLLM does so before it indexes its tables."""
        if token_ids and max(token_ids) >= self.vocab_size:
            raise InvalidRequest(f"{field}token {max(token_ids)} is not in the vocabulary of {self.vocab_size}")
