"""Text and tokens of HTTP requests: limits, encoding, decoding, and incremental decoding of streams."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from colocated_grpo.environments.chat import ChatCodec
from colocated_grpo.policy.model_files import ModelFiles
from colocated_grpo.types import JsonObject
from colocated_grpo.web.bodies import off_the_loop

LENGTH_KEYS = "rollout.max_prompt_tokens + rollout.max_completion_tokens"
"""The settings that determine `Limits.max_tokens` in a run."""


class InvalidRequest(Exception):
    """A request that is well-formed but cannot be served. The error's message is returned with status 400."""


class TooLong(InvalidRequest):
    """A prompt that does not fit. Clients search for vLLM's words in the message, "maximum context length"."""

    def __init__(self, message: str, text: str = "") -> None:
        """text: the text of the prompt, if the prompt was rejected before encoding."""
        super().__init__(message)
        self.text = text


@dataclass(frozen=True)
class Limits:
    """Limits of the engine and its model, and the seed of unseeded requests. Checks raise InvalidRequest."""

    max_tokens: int
    """Maximum sequence length: prompt plus completion."""
    longest_token: int
    """Maximum characters in the text of a single token."""
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    """The model's own end-of-sequence tokens."""
    seed: int
    max_tokens_setting: str = LENGTH_KEYS
    """Name of the setting that determines `max_tokens`, for error messages."""

    def check_text(self, text: str) -> None:
        """Reject text that cannot fit before tokenizing it: megabytes would block the event loop for seconds."""
        if len(text) > self.max_tokens * self.longest_token:
            limit = f"{self.max_tokens} tokens, the maximum context length ({self.max_tokens_setting})"
            raise TooLong(f"a prompt of {len(text)} characters cannot fit into {limit}", text)

    def check_prompt(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise InvalidRequest("the prompt is empty")
        if len(token_ids) >= self.max_tokens:
            rule = f"it must fit into the maximum context length of {self.max_tokens} ({self.max_tokens_setting})"
            raise TooLong(f"the prompt has {len(token_ids)} tokens; with at least one sampled token {rule}")
        self.check_vocabulary(token_ids)

    def check_vocabulary(self, token_ids: Sequence[int], field: str = "") -> None:
        """Reject ids outside the vocabulary: some versions of vLLM index their tables without a check."""
        if token_ids and max(token_ids) >= self.vocab_size:
            raise InvalidRequest(f"{field}token {max(token_ids)} is not in the vocabulary of {self.vocab_size}")


def limits_of(model: ModelFiles, max_tokens: int, seed: int, max_tokens_setting: str = LENGTH_KEYS) -> Limits:
    """Return the limits of requests to an engine of this model."""
    return Limits(
        max_tokens=max_tokens,
        longest_token=ChatCodec(model.tokenizer).longest_token,
        vocab_size=model.hf_config.get_text_config().vocab_size,
        stop_token_ids=model.stop_token_ids,
        seed=seed,
        max_tokens_setting=max_tokens_setting,
    )


RESERVED_TEMPLATE_ARGUMENTS = frozenset({"conversation", "chat_template", "tokenize", "return_dict", "return_tensors"})
SHORT_CHARACTERS, SHORT_MESSAGES = 1 << 14, 64
"""Texts and conversations up to this length are encoded on the event loop, in a few milliseconds."""


class TextCodec:
    """The model's tokenizer and chat template. Encoding raises InvalidRequest for text that cannot be served."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, limits: Limits, template_variables: JsonObject) -> None:
        """template_variables: defaults for chat template variables that a request does not set."""
        self._tokenizer = tokenizer
        self.limits = limits
        self._template_variables = template_variables

    @cached_property
    def _second(self) -> PreTrainedTokenizerBase:
        """A copy for the thread that encodes long texts, because tokenizers are not thread-safe."""
        return copy.deepcopy(self._tokenizer)

    async def encode_all(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Encode the prompts that are text; return token prompts unchanged."""
        return [await self._encode(one, add_special_tokens=True) if isinstance(one, str) else one for one in prompts]

    async def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.limits.check_text(text)
        if len(text) <= SHORT_CHARACTERS:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await off_the_loop(lambda: self._second.encode(text, add_special_tokens=add_special_tokens))

    async def encode_chat(self, messages: list[JsonObject], settings: JsonObject) -> list[int]:
        """Return the tokens of the rendered chat template. settings: arguments of `apply_chat_template`."""
        if not self._tokenizer.chat_template:
            raise InvalidRequest("this model has no chat template; use /v1/completions or set model.chat_template")
        if reserved := RESERVED_TEMPLATE_ARGUMENTS & settings.keys():
            raise InvalidRequest(f"chat_template_kwargs: {', '.join(sorted(reserved))} cannot be set")
        settings = {**self._template_variables, **settings}
        length = sum(len(message.get("content") or "") for message in messages)
        if length <= SHORT_CHARACTERS and len(messages) <= SHORT_MESSAGES:
            text = _render(self._tokenizer, messages, settings)
        else:
            text = await off_the_loop(lambda: _render(self._second, messages, settings))
        return await self._encode(text, add_special_tokens=False)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        assert isinstance(text, str), "one sequence decodes to one text"
        return text

    def detokenize(self, token_ids: list[int]) -> str:
        """Return the text of tokens for log-probability entries, special tokens included."""
        return self.decode(token_ids, skip_special_tokens=False)


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[JsonObject], settings: JsonObject) -> str:
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **settings)
    except Exception as error:  # a template is a program that runs on unchecked messages and may raise anything
        raise InvalidRequest(f"the chat template rejects these messages: {error}") from None
    assert isinstance(text, str), "tokenize=False renders text"
    return text


Decode = Callable[[list[int]], str]

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Symbol to which tokenizers decode a character if some of its bytes are in later tokens."""


class Detokenizer:
    """Text of one completion in increments that end at whole characters and contain no part of a stop string.

    New tokens are decoded together with earlier ones: many tokenizers drop the space of the first word.
    """

    def __init__(self, decode: Decode, stop: Sequence[str]) -> None:
        self._decode = decode
        self._stop = stop
        self._context, self._decoded = 0, 0
        """Tokens before `_decoded` have been converted to text. Tokens from `_context` on are decoded again."""
        self._pending = ""
        """Decoded text from a stop string on, or from what may be the start of one."""
        self.emitted = 0
        """Characters returned so far."""

    def increment(self, token_ids: list[int]) -> str:
        """Return the text that has become final, possibly empty. token_ids: all tokens so far."""
        before = self._decode(token_ids[self._context : self._decoded])
        text = self._decode(token_ids[self._context :])
        if text.endswith(INCOMPLETE) or len(text) <= len(before):
            return ""
        self._context, self._decoded = self._decoded, len(token_ids)
        self._pending += text[len(before) :]
        end = len(before_stop(self._pending, self._stop))
        if end == len(self._pending):  # no stop string, but possibly the start of one
            end -= max((_overlap(self._pending, stop) for stop in self._stop), default=0)
        final, self._pending = self._pending[:end], self._pending[end:]
        self.emitted += len(final)
        return final


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    return text[: min((text.index(string) for string in stop if string in text), default=len(text))]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
