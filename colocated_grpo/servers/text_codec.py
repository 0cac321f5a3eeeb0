"""Conversion of request text to tokens, and of completion tokens to text."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

from colocated_grpo.servers.limits import InvalidRequest, Limits
from colocated_grpo.types import JsonObject
from colocated_grpo.web.bodies import off_the_loop

RESERVED_TEMPLATE_ARGUMENTS = frozenset({"conversation", "chat_template", "tokenize", "return_dict", "return_tensors"})


SHORT_CHARACTERS, SHORT_MESSAGES = 1 << 14, 64
"""Texts and conversations up to this length are encoded on the event loop, in a few milliseconds."""


class Tokenizer(Protocol):
    """The methods of transformers' tokenizers that are used here."""

    @property
    def chat_template(self) -> object: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str | list[str]: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **settings: Any) -> object: ...


class TextCodec:
    """The model's tokenizer and chat template. Encoding raises InvalidRequest for text that cannot be served."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits, template_variables: JsonObject) -> None:
        """template_variables: variables of the chat template that hold where a request does not set them."""
        self._tokenizer = tokenizer
        self._limits = limits
        self._template_variables = template_variables

    @cached_property
    def _second(self) -> Tokenizer:
        """A copy for the thread that encodes long texts: tokenizers are not thread-safe."""
        return copy.deepcopy(self._tokenizer)

    async def encode_all(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Return the tokens of each prompt that is a text, and the others as they are."""
        return [await self._encode(one, add_special_tokens=True) if isinstance(one, str) else one for one in prompts]

    async def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self._limits.check_text(text)
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


def _render(tokenizer: Tokenizer, messages: list[JsonObject], settings: JsonObject) -> str:
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **settings)
    except Exception as error:  # a template is a program and runs on unchecked messages: it may raise anything
        raise InvalidRequest(f"the chat template rejects these messages: {error}") from None
    assert isinstance(text, str), "tokenize=False renders text"
    return text
