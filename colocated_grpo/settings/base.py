"""Base class and types of settings models, including those of environments' `args`."""

from os.path import expanduser
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
FileName = Annotated[str, AfterValidator(expanduser)]
"""Text that may name a file or folder. A leading ~ is expanded, because no shell expands it in YAML."""


class Section(BaseModel):
    """A group of settings. Immutable; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class NamedObject(Section):
    """Settings of code or data that is loaded by its `name`, or that the calling program has given as an object."""

    _object: Any = PrivateAttr(default=None)

    @property
    def given(self) -> Any:
        """The object that the program has given to Trainer; None: load it by `name`. Not among the saved settings."""
        return self._object
