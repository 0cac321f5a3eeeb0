"""Settings of the chat template: the variables and tools that it gets besides the messages."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

SET_BY_THE_RUN = frozenset(
    {
        *("messages", "conversation", "chat_template", "tools", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
    }
)
"""Arguments of transformers' apply_chat_template() that are not variables of the template, or have other settings."""


def read_json(value: Any) -> Any:
    """Parse text as JSON, in which TRL's command line and columns of datasets hold nested values."""
    return json.loads(value) if isinstance(value, str) else value


def check_variables(variables: dict[str, Any]) -> dict[str, Any]:
    """Raise ValueError for a name that is no variable of a template."""
    if reserved := sorted(SET_BY_THE_RUN & variables.keys()):
        elsewhere = {"tools": "; see tools of an environment", "chat_template": "; see model.chat_template"}
        raise ValueError(f"{reserved[0]} cannot be set here{elsewhere.get(reserved[0], '')}")
    return variables


TemplateVariables = Annotated[dict[str, Any], BeforeValidator(read_json), AfterValidator(check_variables)]
"""Variables of the chat template. Example: {"enable_thinking": False}"""
Tool = str | dict[str, Any]
"""A JSON schema, or the name of a Python function of which transformers makes one."""
