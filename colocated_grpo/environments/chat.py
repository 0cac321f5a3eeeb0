"""Conversion between chat messages and the tokens of a running conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from colocated_grpo.types import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = JsonObject
"""A chat message. Example: {"role": "user", "content": "3+4="}"""


NOTHING: Mapping[str, Any] = MappingProxyType({})


class ChatCodec:
    """Decodes sampled messages and encodes the observations between them. Sampled text is never encoded again."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def message_text(self, token_ids: Sequence[int]) -> str:
        """Decode an assistant message without its special tokens."""
        return self._decode(token_ids, skip_special_tokens=True)

    def transcript(self, token_ids: Sequence[int]) -> str:
        """Decode every token. Special tokens show where a message begins and ends."""
        return self._decode(token_ids, skip_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of text that a template has rendered."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def observation(
        self, messages: str | Sequence[Message], last_token: int, template: Mapping[str, Any] = NOTHING
    ) -> list[int]:
        """Return the tokens between two assistant messages: the end of the first, `messages`, the start of the second.

        Text stands for one user message. If `last_token`, the last sampled token, already closed the first message, the
        closing token is omitted. Without a chat template, the plain text of the messages is encoded. template: further
        arguments of the chat template, those of the conversation's prompt.
        """
        if self._tokenizer.chat_template is None:
            return self._tokenizer.encode(plain_text(messages), add_special_tokens=False)
        chat = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        token_ids = self._after_assistant_message(chat, template)
        return token_ids[1:] if token_ids and token_ids[0] == last_token else token_ids

    def _after_assistant_message(self, messages: list[Message], template: Mapping[str, Any]) -> list[int]:
        """Return the common suffix of two conversations that differ in one assistant message only.

        Comparing tokens from the end ignores what a template inserts earlier (a system message, the date, empty
        thoughts). Comparing tokens, not text, covers special tokens without a text form.
        """
        one, other = (self._render(content, messages, template) for content in ("a", "b"))
        length = 0
        while length < min(len(one), len(other)) and one[-1 - length] == other[-1 - length]:
            length += 1
        return one[len(one) - length :]

    def _render(self, content: str, messages: list[Message], template: Mapping[str, Any]) -> list[int]:
        start = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
        return render_tokens(self._tokenizer, start + messages, template)

    def _decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return cast(str, text)  # decode() returns a list only for a batch


def render_tokens(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], template: Mapping[str, Any]
) -> list[int]:
    """Return the tokens of a chat, ending with the opening of the next assistant message.

    template: further arguments of the chat template, such as tools.
    """
    token_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **template)
    return list(cast("list[int]", token_ids))  # annotated as a union of all its return types


def plain_text(messages: str | Sequence[Message]) -> str:
    """Join the contents of the messages by newlines."""
    return messages if isinstance(messages, str) else "\n".join(str(message["content"]) for message in messages)
