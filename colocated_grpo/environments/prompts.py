"""Conversion of an item's prompt into the tokens that the model reads."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from colocated_grpo.environments.base import EnvironmentSetupError, Item
from colocated_grpo.environments.chat import Message, render_tokens
from colocated_grpo.environments.templates import PLAIN, TOOLS, PromptTemplate, with_system_prompt
from colocated_grpo.environments.user_code.loading import one_line
from colocated_grpo.types import JsonObject, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The prefix avoids collisions with dataset columns.
PATTERN_KEY = "colocated_grpo:reply_pattern"
"""Item key for the regular expression that constrains the completions."""
BY_OPPONENT_KEY = "colocated_grpo:by_opponent"
"""Item key that is true if the frozen opponent samples the completion."""


class PromptEncoder:
    """Encodes prompts.

    The chat template renders chat messages, with its generation prompt. Text becomes one user message if the tokenizer
    has a chat template. Text with special tokens such as <|im_start|> counts as already rendered: no chat template is
    applied to it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int,
        templates: Mapping[str, PromptTemplate] = MappingProxyType({}),
    ) -> None:
        """templates: additions to the chat template, by `Prompt.source`."""
        self.tokenizer = tokenizer
        self._templates = templates
        self.max_prompt_tokens = max_prompt_tokens
        # Only tokens such as <|im_start|> or [INST] prove that a template was applied. Other special tokens may be
        # plain text: some tokenizers pad with "!".
        self._markers = [token for token in tokenizer.all_special_tokens if token[0] in "<[" and len(token) > 2]
        self._max_characters = max_prompt_tokens * longest_token(tokenizer)

    def encode(self, item: Item, *, index: int, source: str) -> Prompt | None:
        """Return the encoded prompt; None if it has no text or is longer than max_prompt_tokens."""
        prompt = checked_prompt(item, source)
        # These prompts are dropped before they are rendered. A chat template would turn empty text into a prompt that
        # trains, and tokenizing megabytes of text takes seconds each time.
        texts = _texts(prompt)
        # System messages count only if the prompt has no other messages.
        others = [each for each in prompt if each["role"] != "system"] if isinstance(prompt, list) else []
        if not any(map(str.strip, _texts(others) or texts)) or sum(map(len, texts)) > self._max_characters:
            return None
        template = self._templates.get(source, PLAIN)
        arguments = template.arguments(item, source)
        text, token_ids = self._render(prompt, template, arguments, source)
        if not 1 <= len(token_ids) <= self.max_prompt_tokens:
            return None
        return Prompt(
            index=index,
            token_ids=token_ids,
            text=text,
            item=item,
            source=source,
            pattern=item.get(PATTERN_KEY),
            by_opponent=item.get(BY_OPPONENT_KEY, False),
            template=arguments,
        )

    def no_usable_prompt(self, source: str, attempts: int) -> EnvironmentSetupError:
        """Return the error for a source with `attempts` consecutive prompts that encode() dropped."""
        return EnvironmentSetupError(
            f"environments {source!r}: {attempts} consecutive prompts are empty or longer than "
            f"rollout.max_prompt_tokens={self.max_prompt_tokens}; raise the limit or shorten the prompts"
        )

    def _render(
        self, prompt: str | list[Message], template: PromptTemplate, arguments: JsonObject, source: str
    ) -> tuple[str, list[int]]:
        if isinstance(prompt, str):
            if self.tokenizer.chat_template is None:
                bos = self.tokenizer.bos_token
                rendered = bool(bos) and prompt.startswith(bos)  # the tokenizer would add a second BOS token
                return prompt, list(self.tokenizer.encode(prompt, add_special_tokens=not rendered))
            if any(marker in prompt for marker in self._markers):
                for name, unused in ((TOOLS, template.tools), ("system_prompt", template.system_prompt)):
                    if unused:
                        raise EnvironmentSetupError(
                            f"environments {source!r}: {name}: a prompt contains special tokens, so no chat template "
                            f"is applied to it; write them into the prompts and remove {name}"
                        )
                return prompt, list(self.tokenizer.encode(prompt, add_special_tokens=False))
            prompt = [{"role": "user", "content": prompt}]
        elif self.tokenizer.chat_template is None:
            raise EnvironmentSetupError(
                f"environments {source!r}: prompts are chat messages and the tokenizer has no chat template; "
                "set model.chat_template or use text prompts"
            )
        if template.system_prompt is not None:
            prompt = with_system_prompt(prompt, template.system_prompt)
        try:
            text = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **arguments)
            # Not encode(text): with some tokenizers, special tokens of the template have ids but no text form.
            token_ids = render_tokens(self.tokenizer, prompt, arguments)
        except Exception as error:  # a template is third-party code and may raise anything
            raise EnvironmentSetupError(
                f"environments {source!r}: the chat template rejects a prompt that ends with "
                f"{repr(prompt[-1])[:80]}: {one_line(error)}"
            ) from error
        return cast(str, text), token_ids


def longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of characters of the longest token."""
    return max(map(len, tokenizer.get_vocab()))


def _texts(prompt: str | list[Message]) -> list[str]:
    """Return the prompt itself, or all texts of its messages."""
    if isinstance(prompt, str):
        return [prompt]
    contents = [message.get("content") or "" for message in prompt]
    parts = [[content] if isinstance(content, str) else [part["text"] for part in content] for content in contents]
    return [text for texts in parts for text in texts]


def checked_prompt(item: object, source: str) -> str | list[Message]:
    """Return the item's prompt. Raises EnvironmentSetupError if the item or its prompt is malformed."""
    if not isinstance(item, dict) or "prompt" not in item:
        shape = f"the keys {', '.join(map(str, item))}" if isinstance(item, dict) else f"a {type(item).__name__}"
        raise EnvironmentSetupError(f"environments {source!r}: an item must be a dict with 'prompt', got {shape}")
    if (problem := _problem_of(item["prompt"])) is not None:
        raise EnvironmentSetupError(f"environments {source!r}: {problem}")
    return item["prompt"]


def _problem_of(prompt: object) -> str | None:
    messages = [] if isinstance(prompt, str) else prompt
    if (
        not isinstance(messages, list)
        or not all(isinstance(each, dict) and "role" in each for each in messages)
        or prompt == []
    ):
        return f"a prompt must be text or a list of messages with a role, got {prompt!r:.80}"
    for message in messages:
        # A chat template would render a message without text empty. A message with tool calls needs no text.
        content = message.get("content")
        if isinstance(content, str) or (content is None and message.get("tool_calls")):
            continue
        if content is None:
            return f"a message of the prompt has no 'content': {message!r:.80}"
        parts = content if isinstance(content, list) and content else [content]
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
            return (
                "the content of a message must be text or parts with text, because models are trained on text only: "
                f"{message!r:.80}"
            )
    for text in _texts(prompt if isinstance(prompt, str) else messages):
        # Tokenizers raise on lone surrogates. JSON may contain one if a text was cut within an emoji.
        try:
            text.encode()
        except UnicodeEncodeError as error:
            part = text[max(0, error.start - 20) : error.start + 20]
            return f"a prompt contains a lone surrogate, which cannot be encoded: {part!r}"
    return None
