"""Load configurations from text."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from colocated_grpo.settings.config_file import LoadedConfig, read_config
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.schema import Config

MINIMAL = "model: {name: some/model}\nenvironments: [{type: task, name: sorting}]\n"


def load(text: str = "", *overrides: str, alone: bool = False) -> Config:
    """Load `text`, appended to a minimal config unless `alone`, from a file named x.yaml."""
    return _read(text, overrides, alone).config


def notes(text: str, *overrides: str) -> list[str]:
    """Return the notes about old names in `text` after a minimal config."""
    return _read(text, overrides, alone=False).notes


def config_error(text: str = "", *overrides: str, alone: bool = False) -> str:
    """Return the error lines of a configuration, which must not load."""
    with pytest.raises(ConfigError) as caught:
        _read(text, overrides, alone)
    return re.sub(r"\S*/(?=x\.yaml)", "", str(caught.value))


def _read(text: str, overrides: tuple[str, ...], alone: bool) -> LoadedConfig:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "x.yaml"
        path.write_text(text if alone else MINIMAL + text)
        return read_config(path, overrides)
