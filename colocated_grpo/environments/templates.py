"""Tools, variables and a system message that the chat template receives in addition to a prompt's messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from colocated_grpo.environments.base import EnvironmentSetupError, Item
from colocated_grpo.environments.chat import Message
from colocated_grpo.environments.user_code.loading import load_object, one_line
from colocated_grpo.settings import sources
from colocated_grpo.settings.base import Tool, check_variables, read_json
from colocated_grpo.settings.turns import TurnsSourceConfig
from colocated_grpo.types import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOOLS, VARIABLES = "tools", "chat_template_kwargs"
"""Item keys whose values are passed to the chat template. The keys are named as in TRL. Both values may be JSON
text."""


@dataclass(frozen=True, kw_only=True)
class PromptTemplate:
    """Tools, variables and system prompt that one environment adds to its prompts.

    An item's own tools and variables take precedence.
    """

    tools: Sequence[JsonObject] = ()
    variables: JsonObject = field(default_factory=dict)
    system_prompt: str | None = None

    def arguments(self, item: Item, source: str) -> JsonObject:
        """Return the arguments of apply_chat_template() for an item. Raises EnvironmentSetupError if malformed."""
        try:
            tools, variables = _parsed(item, TOOLS), _parsed(item, VARIABLES)
            if not isinstance(tools, list | None) or not all(isinstance(tool, dict) for tool in tools or ()):
                raise ValueError(
                    f"{TOOLS} must be a list of JSON schemas, which the chat template reads, got {tools!r:.80}"
                )
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


TemplatedConfig = sources.TaskSourceConfig | sources.EpisodeSourceConfig | sources.DatasetSourceConfig
PLAIN = PromptTemplate()


def _parsed(item: Item, key: str) -> object:
    """Return the parsed value of an item's key, without null fields.

    Columnar formats give all mappings of a column the same keys and fill missing values with null. Returns None if the
    item has no value, as in an empty cell of a .csv. An empty list is a value.
    """
    value = item.get(key)
    try:
        return None if value == "" else _without_nulls(read_json(value))
    except ValueError as error:
        raise ValueError(f"{key} is text that is not JSON: {error}") from None


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def with_system_prompt(prompt: str | list[Message], system_prompt: str) -> list[Message]:
    """Return chat messages that begin with the system prompt. The prompt's own system message takes precedence."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def build_template(
    entry: TemplatedConfig | TurnsSourceConfig | sources.RowsSourceConfig,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    variables: JsonObject,
) -> PromptTemplate:
    """Return what an environment's entry adds to each prompt: tools, template variables and a system prompt.

    Imports the functions named in `tools`. variables: chat template variables common to all entries. Raises
    EnvironmentSetupError if the chat template ignores a setting of the entry.
    """
    if not isinstance(entry, TemplatedConfig):  # games and agents write their own prompts
        return PromptTemplate(variables=variables)
    key = f"environments {name!r}"
    if entry.tools:
        check_is_read(tokenizer, f"{key}: {TOOLS}", TOOLS)
    for variable in entry.chat_template_kwargs:
        check_is_read(tokenizer, f"{key}: {VARIABLES}.{variable}", variable)
    if entry.system_prompt is not None and tokenizer.chat_template is None:
        raise EnvironmentSetupError(
            f"{key}: system_prompt: the tokenizer has no chat template; set model.chat_template"
        )
    in_rows = isinstance(entry, sources.DatasetSourceConfig)  # its rows already have the system prompt
    return PromptTemplate(
        tools=[_schema(tool, f"{key}: {TOOLS}.{number}") for number, tool in enumerate(entry.tools)],
        variables={**variables, **entry.chat_template_kwargs},
        system_prompt=None if in_rows else entry.system_prompt,
    )


def check_is_read(tokenizer: PreTrainedTokenizerBase, key: str, name: str) -> None:
    """Raise EnvironmentSetupError if no chat template contains `name`, because the setting would have no effect."""
    templates = tokenizer.chat_template
    if templates is None:
        raise EnvironmentSetupError(f"{key}: the tokenizer has no chat template that could read it; remove it")
    texts = templates.values() if isinstance(templates, dict) else [templates]
    if not any(re.search(rf"\b{re.escape(name)}\b", text) for text in texts):
        raise EnvironmentSetupError(
            f"{key}: the model's chat template does not read {name!r}, so it would have no effect; remove it, or set "
            "model.chat_template"
        )


def _schema(tool: Tool, key: str) -> JsonObject:
    """Return the JSON schema of a tool. transformers derives a function's schema from its type hints and docstring."""
    if isinstance(tool, dict):
        return tool
    function = load_object(tool, key)
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:  # DocstringParsingException, TypeHintParsingException, or an error of inspect
        raise EnvironmentSetupError(f"{key}={tool!r}: no JSON schema can be made of it: {one_line(error)}") from error
