"""Limits that the engine and its model set for a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from colocated_grpo.environments.prompts import longest_token
from colocated_grpo.policy.model_files import ModelFiles

LENGTH_KEYS = "rollout.max_prompt_tokens + rollout.max_completion_tokens"
"""The settings that decide `Limits.max_tokens` in a run."""


class InvalidRequest(Exception):
    """A request that is well-formed but cannot be served. The message is returned with status 400."""


class TooLong(InvalidRequest):
    """A prompt that does not fit the context.

    The message contains "maximum context length", as vLLM's does: clients look for it.
    """

    def __init__(self, message: str, text: str = "") -> None:
        """text: the prompt, if it was not encoded."""
        super().__init__(message)
        self.text = text


@dataclass(frozen=True)
class Limits:
    """Limits of the engine and its model, and the seed of unseeded requests. Checks raise InvalidRequest."""

    max_tokens: int
    """Longest sequence, prompt and completion together."""
    longest_token: int
    """Characters in the longest text of a single token."""
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    """The model's own end-of-sequence tokens."""
    seed: int
    max_tokens_setting: str = LENGTH_KEYS
    """Name of the setting that decides `max_tokens`, for error messages."""

    def check_text(self, text: str) -> None:
        """Reject a text that cannot fit, before tokenizing: megabytes would block the event loop for seconds."""
        if len(text) > self.max_tokens * self.longest_token:
            raise TooLong(
                f"a prompt of {len(text)} characters cannot fit into {self.max_tokens} tokens, the maximum context "
                f"length ({self.max_tokens_setting})",
                text,
            )

    def check_prompt(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise InvalidRequest("the prompt is empty")
        if len(token_ids) >= self.max_tokens:
            raise TooLong(
                f"the prompt has {len(token_ids)} tokens; with at least one sampled token it must fit into the "
                f"maximum context length of {self.max_tokens} ({self.max_tokens_setting})"
            )
        self.check_vocabulary(token_ids)

    def check_vocabulary(self, token_ids: Sequence[int], field: str = "") -> None:
        """Reject ids outside the vocabulary: some versions of vLLM index their tables without a check."""
        if token_ids and max(token_ids) >= self.vocab_size:
            raise InvalidRequest(f"{field}token {max(token_ids)} is not in the vocabulary of {self.vocab_size}")


def limits_of(model: ModelFiles, max_tokens: int, seed: int, max_tokens_setting: str = LENGTH_KEYS) -> Limits:
    """Return the limits of requests to an engine of this model."""
    return Limits(
        max_tokens=max_tokens,
        longest_token=longest_token(model.tokenizer),
        vocab_size=model.hf_config.get_text_config().vocab_size,
        stop_token_ids=model.stop_token_ids,
        seed=seed,
        max_tokens_setting=max_tokens_setting,
    )
