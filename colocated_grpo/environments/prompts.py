"""From an item's prompt, with tools, variables and a system message of its template, to the model's tokens."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from colocated_grpo.environments.base import EnvironmentSetupError, Item
from colocated_grpo.environments.chat import ChatCodec, Message, render_tokens
from colocated_grpo.environments.user_code.loading import errors_named, load_object
from colocated_grpo.settings import sources
from colocated_grpo.settings.base import Tool, check_variables, read_json
from colocated_grpo.types import JsonObject, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOOLS, VARIABLES = "tools", "chat_template_kwargs"
"""Item keys whose values are passed to the chat template. Named as in TRL. Both values may be JSON text."""


@dataclass(frozen=True, kw_only=True)
class PromptTemplate:
    """What one environment adds to its prompts. An item's own tools and variables take precedence."""

    tools: Sequence[JsonObject] = ()
    variables: JsonObject = field(default_factory=dict)
    system_prompt: str | None = None

    def arguments(self, item: Item, source: str) -> JsonObject:
        """Return the arguments of apply_chat_template() for an item. Raises EnvironmentSetupError if malformed."""
        try:
            tools, variables = _parsed(item, TOOLS), _parsed(item, VARIABLES)
            if not isinstance(tools, list | None) or not all(isinstance(tool, dict) for tool in tools or ()):
                rule = "must be a list of JSON schemas, which the chat template reads"
                raise ValueError(f"{TOOLS} {rule}, got {tools!r:.80}")
            if not isinstance(variables, dict | None):
                raise ValueError(f"{VARIABLES} must be a mapping, got {variables!r:.80}")
            try:
                variables = {**self.variables, **check_variables(variables or {})}
            except ValueError as error:
                raise ValueError(f"{VARIABLES}: {error}") from None
        except ValueError as error:
            raise EnvironmentSetupError(f"environments {source!r}: {error}; rename or remove it") from None
        tools = self.tools if tools is None else tools
        return {**variables, TOOLS: list(tools)} if tools else variables  # templates render an empty list, too


PLAIN = PromptTemplate()


def _parsed(item: Item, key: str) -> object:
    """Return the parsed value of an item's key; None if it has no value, as in an empty cell of a .csv."""
    value = item.get(key)
    try:
        return None if value == "" else strip_nulls(read_json(value))
    except ValueError as error:
        raise ValueError(f"{key} is text that is not JSON: {error}") from None


def strip_nulls(value: object) -> object:
    """Return a value without null fields of its mappings, which columnar formats add and chat templates would print."""
    if isinstance(value, dict):
        return {key: strip_nulls(inner) for key, inner in value.items() if inner is not None}
    return [strip_nulls(inner) for inner in value] if isinstance(value, list) else value


def with_system_prompt(prompt: str | list[Message], system_prompt: str) -> list[Message]:
    """Return chat messages that begin with the system prompt. The prompt's own system message takes precedence."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return messages if messages[0]["role"] == "system" else [{"role": "system", "content": system_prompt}, *messages]


def build_template(
    entry: sources.EnvironmentConfig, name: str, tokenizer: "PreTrainedTokenizerBase", variables: JsonObject
) -> PromptTemplate:
    """Return what an entry adds to each prompt, besides the `variables` of all. Raises EnvironmentSetupError."""
    if not isinstance(entry, sources.ItemSourceConfig | sources.DatasetSourceConfig):
        return PromptTemplate(variables=variables)  # games and agents write their own prompts
    key = f"environments {name!r}"
    if entry.tools:
        check_is_read(tokenizer, f"{key}: {TOOLS}", TOOLS)
    for variable in entry.chat_template_kwargs:
        check_is_read(tokenizer, f"{key}: {VARIABLES}.{variable}", variable)
    if entry.system_prompt is not None and tokenizer.chat_template is None:
        problem = "the tokenizer has no chat template; set model.chat_template"
        raise EnvironmentSetupError(f"{key}: system_prompt: {problem}")
    in_rows = isinstance(entry, sources.DatasetSourceConfig)  # its rows already have the system prompt
    return PromptTemplate(
        tools=[_schema(tool, f"{key}: {TOOLS}.{number}") for number, tool in enumerate(entry.tools)],
        variables={**variables, **entry.chat_template_kwargs},
        system_prompt=None if in_rows else entry.system_prompt,
    )


def check_is_read(tokenizer: "PreTrainedTokenizerBase", key: str, name: str) -> None:
    """Raise EnvironmentSetupError if no chat template contains `name`, because the setting would have no effect."""
    if (templates := tokenizer.chat_template) is None:
        raise EnvironmentSetupError(f"{key}: the tokenizer has no chat template that could read it; remove it")
    texts = templates.values() if isinstance(templates, dict) else [templates]
    if not any(re.search(rf"\b{re.escape(name)}\b", text) for text in texts):
        problem = f"the model's chat template does not read {name!r}, so it would have no effect"
        raise EnvironmentSetupError(f"{key}: {problem}; remove it, or set model.chat_template")


def _schema(tool: Tool, key: str) -> JsonObject:
    """Return the JSON schema of a tool. transformers derives a function's schema from its type hints and docstring."""
    if isinstance(tool, dict):
        return tool
    function = load_object(tool, key)
    from transformers.utils import get_json_schema

    with errors_named(f"{key}={tool!r}: no JSON schema can be made of it"):
        return get_json_schema(function)


# The prefix avoids collisions with dataset columns.
PATTERN_KEY = "colocated_grpo:reply_pattern"
"""Item key for the regular expression that constrains the completions."""
BY_OPPONENT_KEY = "colocated_grpo:by_opponent"
"""Item key that is true if the frozen opponent samples the completion."""


class PromptEncoder:
    """Encodes prompts. A chat template renders messages, with its generation prompt, and text as one user message.

    Text with special tokens such as <|im_start|> counts as already rendered.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        max_prompt_tokens: int,
        templates: Mapping[str, PromptTemplate] = MappingProxyType({}),
        vocab_size: int | None = None,
    ) -> None:
        """templates: additions to the chat template, by `Prompt.source`. vocab_size: the model's; None: not checked."""
        self.tokenizer = tokenizer
        self._templates = templates
        self._vocab_size = vocab_size
        self.max_prompt_tokens = max_prompt_tokens
        self._last_dropped = 0
        """Tokens of the last prompt that was dropped after it was rendered."""
        # Only tokens such as <|im_start|> or [INST] prove that a template was applied. Other special tokens may be
        # plain text: some tokenizers pad with "!".
        self._markers = [token for token in tokenizer.all_special_tokens if token[0] in "<[" and len(token) > 2]
        self._max_characters = max_prompt_tokens * ChatCodec(tokenizer).longest_token

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
            self._last_dropped = len(token_ids)
            return None
        if self._vocab_size is not None and (largest := max(token_ids)) >= self._vocab_size:
            problem = f"a prompt has token {largest}, and the model's config.json has vocab_size={self._vocab_size}"
            raise EnvironmentSetupError(f"environments {source!r}: {problem}; the tokenizer belongs to another model")
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
        last = f" (the last has {self._last_dropped})" if self._last_dropped else ""
        limit = f"rollout.max_prompt_tokens={self.max_prompt_tokens}{last}; raise the limit or shorten the prompts"
        problem = f"{attempts} consecutive prompts are empty or longer than {limit}"
        return EnvironmentSetupError(f"environments {source!r}: {problem}")

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
                        rule = "a prompt contains special tokens, so no chat template is applied to it"
                        advice = f"write them into the prompts and remove {name}"
                        raise EnvironmentSetupError(f"environments {source!r}: {name}: {rule}; {advice}")
                return prompt, list(self.tokenizer.encode(prompt, add_special_tokens=False))
            prompt = [{"role": "user", "content": prompt}]
        elif self.tokenizer.chat_template is None:
            problem = "prompts are chat messages and the tokenizer has no chat template"
            advice = "set model.chat_template or use text prompts"
            raise EnvironmentSetupError(f"environments {source!r}: {problem}; {advice}")
        if template.system_prompt is not None:
            prompt = with_system_prompt(prompt, template.system_prompt)
        if TOOLS in arguments:  # an item may have its own
            check_is_read(self.tokenizer, f"environments {source!r}: {TOOLS}", TOOLS)
        rejects = f"the chat template rejects a prompt that ends with {repr(prompt[-1])[:80]}"
        with errors_named(f"environments {source!r}: {rejects}"):
            text = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **arguments)
            # Not encode(text): with some tokenizers, special tokens of the template have ids but no text form.
            token_ids = render_tokens(self.tokenizer, prompt, arguments)
        return cast(str, text), token_ids


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
