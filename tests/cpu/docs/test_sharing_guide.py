"""The guide to trackers and the Hub: its YAML loads, its tables and commands are right."""

from __future__ import annotations

import re

from colocated_grpo.policy.export import AdapterExport, ModelExport
from colocated_grpo.settings.errors import parse_path, setting_names
from colocated_grpo.settings.schema import Config
from colocated_grpo.tracking.records import LONGEST_TEXT, completions_table
from tests.support.config_text import load
from tests.support.paths import ROOT
from tests.support.tracked_run import groups_of

GUIDE = (ROOT / "docs/guides/sharing.md").read_text()


def section(heading: str) -> str:
    return GUIDE.split(f"## {heading}\n")[1].split("\n## ")[0]


def test_the_yaml_loads_and_every_named_setting_exists():
    [text] = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
    config = load(text)
    assert config.hub is not None
    assert (config.hub.repo, config.hub.every, config.hub.private) == ("me/my-model", 50, True)
    assert (config.tracking.completions_every, config.tracking.completions_rows) == (10, 16)
    settings = {path for path, _ in setting_names(Config)}
    named = re.findall(r"`(?:--)?((?:tracking|hub|policy)\.\w[\w.]*)", GUIDE)
    assert len(named) > 4
    assert [name for name in named if parse_path(name) not in settings] == []


def test_the_columns_of_the_table_are_complete():
    text = section("Tables of completions")
    columns, _ = completions_table(0, groups_of(0), 4)
    assert all(f"`{name}`" in text for name in columns if not name.startswith("reward/"))
    assert f"{LONGEST_TEXT:,} characters" in text


def test_the_folders_are_right():
    for name in (ModelExport.final_name, AdapterExport.final_name):
        assert f"`{name}/`" in GUIDE
    assert f"{ModelExport.best_name}/" in GUIDE
