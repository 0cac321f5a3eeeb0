"""Conversion of request text to tokens, and of completion tokens to text."""

from __future__ import annotations

from typing import Any, Protocol

from colocated_grpo.serving.limits import InvalidRequest, Limits
from colocated_grpo.types import JsonObject

RESERVED_TEMPLATE_ARGUMENTS = frozenset({"conversation", "chat_template", "tokenize", "return_dict", "return_tensors"})


class Tokenizer(Protocol):
    """The methods of transformers' tokenizers that are used here."""

    @property
    def chat_template(self) -> object: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str | list[str]: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **settings: Any) -> object: ...


class TextCodec:
    """The model's tokenizer and chat template. Encoding raises InvalidRequest for text that cannot be served."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self._limits.check_text(text)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_chat(self, messages: list[JsonObject], settings: JsonObject) -> list[int]:
        """Return the tokens of the rendered chat template. settings: arguments of `apply_chat_template`."""
        if not self._tokenizer.chat_template:
            raise InvalidRequest("this model has no chat template; use /v1/completions or set model.chat_template")
        if reserved := RESERVED_TEMPLATE_ARGUMENTS & settings.keys():
            raise InvalidRequest(f"chat_template_kwargs: {', '.join(sorted(reserved))} cannot be set")
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, **settings)
        except Exception as error:  # a template is a program and runs on unchecked messages: it may raise anything
            raise InvalidRequest(f"the chat template rejects these messages: {error}") from None
        assert isinstance(text, str), "tokenize=False renders text"
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        assert isinstance(text, str), "one sequence decodes to one text"
        return text

    def detokenize(self, token_ids: list[int]) -> str:
        """Return the text of tokens for log-probability entries, special tokens included."""
        return self.decode(token_ids, skip_special_tokens=False)
