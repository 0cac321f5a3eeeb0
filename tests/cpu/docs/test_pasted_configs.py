"""Configs in README and docs are complete: what has environments also has a model, and loads as it stands.

A block that belongs to the one before it says so in its first line.
"""

from __future__ import annotations

import re

import pytest

from tests.support.config_text import load
from tests.support.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CONFIGS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL))
    if re.search(r"^(environments|dataset_name):", block, re.MULTILINE) and not block.startswith("# my.yaml, continued")
]


@pytest.mark.parametrize("text", CONFIGS)
def test_a_config_that_is_pasted_from_a_page_loads(text):
    assert load(text, alone=True).environments


def test_there_are_configs_to_paste():
    assert len(CONFIGS) > 10
