"""Between chat messages and the tokens of a conversation under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]


class ChatCodec:
    """What a conversation needs of the tokenizer. Sampled tokens are decoded for people and never encoded again."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def turn_text(self, token_ids: Sequence[int]) -> str:
        """What the policy said, special tokens left out."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def transcript(self, token_ids: Sequence[int]) -> str:
        """Every token as text: the special ones show where a turn begins and ends."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def observation(self, said: str | Sequence[Message], last_token: int) -> list[int]:
        """Tokens from the end of the policy's turn to the start of its next: its closing, the messages, the opening.

        Text is one user message. last_token: the turn's last sampled token; a turn that ended by itself has closed
        itself, one that was cut has not. A tokenizer without chat template reads the plain text of the messages.
        """
        if self._tokenizer.chat_template is None:
            return self._tokenizer.encode(plain_text(said), add_special_tokens=False)
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else list(said)
        token_ids = self._after_turn(messages)
        return token_ids[1:] if token_ids and token_ids[0] == last_token else token_ids

    def _after_turn(self, messages: list[Message]) -> list[int]:
        """What two conversations that differ in the content of one assistant turn have in common behind it.

        Found on tokens and from the end, so that it does not matter what a template puts in front (a system message,
        the date, empty thoughts) nor whether its special tokens can be spelled as text.
        """
        one, other = (self._render(content, messages) for content in ("a", "b"))
        shared = 0
        while shared < min(len(one), len(other)) and one[-1 - shared] == other[-1 - shared]:
            shared += 1
        return one[len(one) - shared :]

    def _render(self, content: str, messages: list[Message]) -> list[int]:
        before = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
        rendered = self._tokenizer.apply_chat_template(before + messages, add_generation_prompt=True, return_dict=False)
        return list(rendered)


def plain_text(said: str | Sequence[Message]) -> str:
    return said if isinstance(said, str) else "\n".join(str(message["content"]) for message in said)
