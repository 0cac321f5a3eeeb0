"""What every settings model shares."""

from os.path import expanduser
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
FileName = Annotated[str, AfterValidator(expanduser)]
"""What is or may be the name of a file or folder: a leading ~ is the user's home, which no shell replaces in a YAML."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A closed, immutable group of settings: an unknown key is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
