"""Base class and types of settings models, including those of environments' `args`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
)

from colocated_grpo.types import JsonObject


def _reject_boolean(value: object) -> object:
    # pydantic converts true to 1, so `training_steps: true` would train for one step.
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


Integer = Annotated[int, BeforeValidator(_reject_boolean)]
Number = Annotated[float, BeforeValidator(_reject_boolean)]
Positive = Annotated[Integer, Field(gt=0)]
NonNegative = Annotated[Integer, Field(ge=0)]
Fraction = Annotated[Number, Field(ge=0.0, le=1.0)]
INITIAL, DEFAULT_INIT = "initial", "default"
"""Values that stand for the run's own model and for a new adapter, where a file may be named."""


@dataclass(frozen=True)
class ConfigFolder:
    """Validation context of a config file: its relative file names are also looked up in its folder."""

    folder: Path
    typed: frozenset[str]
    """Values of the command line, which are relative to the working folder."""


def names_code(name: str) -> bool:
    """Return True for 'path/to/file.py:object'."""
    return name.rpartition(":")[0].endswith(".py")


def find_file(name: str, info: ValidationInfo) -> str:
    """Return the name of a file as written in the working folder: of the one beside the config if only that exists."""
    here = os.path.expanduser(name)
    file, colon, wanted = here.rpartition(":") if names_code(here) else (here, "", "")
    context = info.context
    if not isinstance(context, ConfigFolder) or name in context.typed or name in (INITIAL, DEFAULT_INIT):
        return here
    beside = context.folder / file
    if os.path.isabs(file) or not os.path.exists(beside):
        return here
    if not os.path.exists(file):
        return f"{beside}{colon}{wanted}"
    if beside.samefile(file):
        return here
    raise ValueError(
        f"both {Path.cwd() / file} and {beside.absolute()} (beside the config) exist; write the absolute path of one"
    )


FileName = Annotated[str, AfterValidator(os.path.expanduser)]
"""Path of a file or folder. A leading ~ is expanded, because no shell expands it in YAML."""
InputFile = Annotated[str, AfterValidator(find_file)]
"""The same for a file to read, which may lie beside the config. Text that names no file stays as it is."""
CodeName = Annotated[str, AfterValidator(lambda name, info: find_file(name, info) if names_code(name) else name)]
"""Name of user code, in a file that may lie beside the config, or of what is built in or installed."""

SET_BY_THE_RUN = frozenset(
    {
        *("messages", "conversation", "chat_template", "tools", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
    }
)
"""Arguments of transformers' apply_chat_template() that are not variables of the template, or have other settings."""


def read_json(value: object) -> object:
    """Parse text as JSON, in which TRL's command line and columns of datasets hold nested values."""
    return json.loads(value) if isinstance(value, str) else value


def check_variables(variables: JsonObject) -> JsonObject:
    """Raise ValueError for a name that is no variable of a template."""
    if reserved := sorted(SET_BY_THE_RUN & variables.keys()):
        elsewhere = {"tools": "; see tools of an environment", "chat_template": "; see model.chat_template"}
        raise ValueError(f"{reserved[0]} cannot be set here{elsewhere.get(reserved[0], '')}")
    return variables


TemplateVariables = Annotated[JsonObject, BeforeValidator(read_json), AfterValidator(check_variables)]
"""Variables of the chat template. Example: {"enable_thinking": False}"""
Tool = CodeName | JsonObject
"""A JSON schema, or the name of a Python function of which transformers makes one."""


class Section(BaseModel):
    """A group of settings. Immutable; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class NamedObject(Section):
    """Settings of code or data that is loaded by its `name`, or that the calling program has given as an object."""

    _object: object = PrivateAttr(default=None)

    @property
    def given(self) -> Any:
        """The object that the program has given to Trainer; None: load it by `name`. Not among the saved settings."""
        return self._object
