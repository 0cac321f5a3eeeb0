"""Base class and types of settings models, including the models of environments' `args`."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, PrivateAttr
from pydantic_core.core_schema import SerializationInfo, ValidationInfo

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
INITIAL, DEFAULT_INIT, TRAIN_DATASET = "initial", "default", "train_dataset"
"""Special values accepted in place of a path: the run's own initial model, a new adapter, and an entry's training rows
that were passed to Trainer as an object."""


@dataclass(frozen=True)
class ConfigFolder:
    """Validation context: the config file's folder, in which relative file names of the config are also looked up."""

    folder: Path
    typed: frozenset[str]
    """Values from the command line. File names among these values are relative to the working folder only."""


def names_code(name: str) -> bool:
    """Return True for 'path/to/file.py:object'."""
    return name.rpartition(":")[0].endswith(".py")


def _find_file(name: str, info: ValidationInfo) -> str:
    """Return the path of a file: `name` itself, or its path in the config's folder if the file exists only there."""
    if not name:
        raise ValueError("must not be empty")
    here = os.path.expanduser(name)
    file, rest = _file_of(here)
    context = info.context
    if not isinstance(context, ConfigFolder) or name in context.typed or name in (INITIAL, DEFAULT_INIT):
        return here
    beside = context.folder / file
    if os.path.isabs(file) or not os.path.exists(beside):
        return here
    if not os.path.exists(file):
        return f"{beside}{rest}"
    if beside.samefile(file):
        return here
    both = f"{Path.cwd() / file} and {beside.absolute()} (beside the config)"
    raise ValueError(f"both {both} exist; write the absolute path of one")


def _file_of(name: str) -> tuple[str, str]:
    """Split 'path/to/file.py:object' into the path and ':object'; the second part of other names is empty."""
    file = name.rpartition(":")[0] if names_code(name) else name
    return file, name[len(file) :]


def without_folder(name: str) -> str:
    """Return the last part of a path that exists; other names, such as those of datasets on the Hub, unchanged."""
    file, rest = _file_of(name)
    return os.path.basename(os.path.normpath(file)) + rest if os.path.exists(file) else name


SAVED = "saved"
"""Context with which settings are written for a later run, which may start in another folder."""


def _absolute(name: str, info: SerializationInfo) -> str:
    """Return the absolute path of a file that exists, for settings to be saved."""
    file, rest = _file_of(name)
    known = name not in (INITIAL, DEFAULT_INIT, TRAIN_DATASET) and os.path.exists(file)
    return os.path.abspath(file) + rest if info.context == SAVED and known else name


def file_names(rule: Callable[[str], object]) -> tuple[AfterValidator, PlainSerializer]:
    """Return annotations of text that names an input file if the rule is true. It may be in the config's folder."""
    return (
        AfterValidator(lambda name, info: _find_file(name, info) if rule(name) else name),
        PlainSerializer(lambda name, info: _absolute(name, info) if rule(name) else name),
    )


FileName = Annotated[str, AfterValidator(os.path.expanduser)]
"""Path of a file or folder. A leading ~ is expanded here, because no shell expands the ~ of a YAML file."""
InputFile = Annotated[str, *file_names(lambda _: True)]
"""Path of an input file. Text that does not name a file is unchanged."""
CodeName = Annotated[str, *file_names(names_code)]
"""Name of built-in or installed code, or of user code in a file."""

SET_BY_THE_RUN = frozenset(
    {
        *("messages", "conversation", "chat_template", "tools", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
    }
)
"""Arguments of transformers' apply_chat_template() that are no template variables, or have settings of their own."""


def read_json(value: object) -> object:
    """Parse text as JSON; return other values unchanged. TRL's command line and columns hold nested values as text."""
    return json.loads(value) if isinstance(value, str) else value


def check_variables(variables: JsonObject) -> JsonObject:
    """Raise ValueError for a name that cannot be a template variable."""
    if reserved := sorted(SET_BY_THE_RUN & variables.keys()):
        elsewhere = {"tools": "; see tools of an environment", "chat_template": "; see model.chat_template"}
        raise ValueError(f"{reserved[0]} cannot be set here{elsewhere.get(reserved[0], '')}")
    return variables


TemplateVariables = Annotated[JsonObject, BeforeValidator(read_json), AfterValidator(check_variables)]
"""Variables of the chat template. Example: {"enable_thinking": False}"""
Tool = CodeName | JsonObject
"""A JSON schema, or the name of a Python function that transformers converts to one."""


class Section(BaseModel):
    """A group of settings. Immutable; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class NamedObject(Section):
    """Settings of code or data that is loaded by `name` or passed as an object by the calling program."""

    _object: object = PrivateAttr(default=None)

    @property
    def given(self) -> Any:
        """Object passed to Trainer by the program; None: load by `name`. Not saved with the settings."""
        return self._object
