"""From the user's form of a prompt to the tokens that the model reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.user_code.loading import one_line
from colocated_grpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PATTERN = "colocated_grpo:reply_pattern"
"""Key of an item under which a turn with structured output has the regular expression of its replies. No dataset has a
column of this name."""
BY_OPPONENT = "colocated_grpo:by_opponent"
"""Key of an item that is true where the frozen opponent answers."""


class PromptEncoder:
    """Text becomes one user message where the tokenizer has a chat template, else it is read as it stands.

    Text that a template has rendered already, as its special tokens show, is read as it stands too. Chat messages
    always go through the template, with the assistant's turn opened.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int) -> None:
        self.tokenizer = tokenizer
        self.max_prompt_tokens = max_prompt_tokens
        # Some tokenizers pad with an exclamation mark.
        self._marks = [token for token in tokenizer.all_special_tokens if token[0] in "<[" and len(token) > 2]
        self._most_letters = max_prompt_tokens * longest_token(tokenizer)

    def encode(self, item: dict[str, Any], *, index: int, source: str) -> Prompt | None:
        """None: longer than max_prompt_tokens, or empty."""
        prompt = checked_prompt(item, source)
        if sum(map(len, texts_of(prompt))) > self._most_letters:
            return None  # megabytes would take seconds to tokenize, each time one is met
        text, token_ids = self._render(prompt, source)
        if not 1 <= len(token_ids) <= self.max_prompt_tokens:
            return None
        return Prompt(
            index=index,
            token_ids=token_ids,
            text=text,
            item=item,
            source=source,
            pattern=item.get(PATTERN),
            by_opponent=item.get(BY_OPPONENT, False),
        )

    def too_long(self, source: str, dropped: int) -> EnvironmentSetupError:
        return EnvironmentSetupError(
            f"environments {source!r}: {dropped} prompts in a row are empty or longer than "
            f"rollout.max_prompt_tokens={self.max_prompt_tokens}; nothing is left to train on"
        )

    def _render(self, prompt: str | list[dict[str, Any]], source: str) -> tuple[str, list[int]]:
        if isinstance(prompt, str):
            if self.tokenizer.chat_template is None:
                return prompt, list(self.tokenizer.encode(prompt))
            if any(mark in prompt for mark in self._marks):
                return prompt, list(self.tokenizer.encode(prompt, add_special_tokens=False))
            prompt = [{"role": "user", "content": prompt}]
        elif self.tokenizer.chat_template is None:
            raise EnvironmentSetupError(
                f"environments {source!r}: prompts are chat messages and the tokenizer has no chat template; "
                "set model.chat_template or give prompts as text"
            )
        try:
            text = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
            # Not encode(text): some tokenizers build the template's special tokens from ids and not from their text.
            token_ids = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # the template is the model's or the user's code, run on the user's messages
            raise EnvironmentSetupError(
                f"environments {source!r}: the chat template refuses a prompt that ends with "
                f"{repr(prompt[-1])[:80]}: {one_line(error)}"
            ) from error
        return text, list(token_ids)


def longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Characters that one token stands for at most."""
    return max(map(len, tokenizer.get_vocab()))


def texts_of(prompt: str | list[dict[str, Any]]) -> list[str]:
    """The prompt itself, or what its messages say."""
    texts = [prompt] if isinstance(prompt, str) else [message.get("content") for message in prompt]
    return [text for text in texts if isinstance(text, str)]


def checked_prompt(item: Any, source: str) -> str | list[dict[str, Any]]:
    """The item's prompt; one clear line where an item or its prompt has another form."""
    if not isinstance(item, dict) or "prompt" not in item:
        shape = f"the keys {', '.join(map(str, item))}" if isinstance(item, dict) else f"a {type(item).__name__}"
        raise EnvironmentSetupError(f"environments {source!r}: an item must be a dict with 'prompt', got {shape}")
    prompt = item["prompt"]
    if isinstance(prompt, str) or (
        isinstance(prompt, list) and prompt and all(isinstance(m, dict) and "role" in m for m in prompt)
    ):
        for text in texts_of(prompt):
            _check_letters(text, source)
        return prompt
    raise EnvironmentSetupError(
        f"environments {source!r}: a prompt must be text or a list of messages with a role, got {repr(prompt)[:80]}"
    )


def _check_letters(text: str, source: str) -> None:
    """No tokenizer takes halves of surrogate pairs, which JSON may hold where a text was cut within an emoji."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        part = text[max(0, error.start - 20) : error.start + 20]
        raise EnvironmentSetupError(
            f"environments {source!r}: a prompt holds half of a surrogate pair, which is no text: {part!r}"
        ) from None
