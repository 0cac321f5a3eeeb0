"""Configs that come with the package are found by their name in a checkout in any folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from colocated_grpo.settings.config_file import build_config, load_config
from colocated_grpo.settings.errors import ConfigError
from tests.support.paths import ROOT

NAME = "training_configs/quickstart.yaml"


def test_a_config_of_the_package_is_found_outside_the_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config(NAME) == load_config(ROOT / NAME) == build_config(NAME, {}).config
    with pytest.raises(ConfigError, match=r"no such file; did you mean training_configs/quickstart.yaml\?"):
        load_config("quickstart.yaml")
    with pytest.raises(ConfigError, match=r"config='training_configs/mine.yaml': no such file$"):
        load_config("training_configs/mine.yaml")


def test_a_file_of_that_name_in_the_working_folder_takes_precedence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("training_configs").mkdir()
    Path(NAME).write_text("model: mine\n")
    assert load_config(NAME).model.name == "mine"
