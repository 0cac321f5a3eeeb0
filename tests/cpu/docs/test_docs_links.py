"""Every link of README and docs leads to a file or a heading, and every result file is named somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_linked_files_exist(page):
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    missing = [link for link in links if not link.startswith("http") and not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_linked_headings_exist(page):
    links = re.findall(r"\]\(([\w./]*)#([^)\s]+)\)", page.read_text())
    missing = [(path, anchor) for path, anchor in links if anchor not in anchors(page.parent / path if path else page)]
    assert not missing


def anchors(page: Path) -> list[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading).replace(" ", "-").lower() for heading in headings]


def test_every_result_file_is_named_in_a_page_or_in_the_code():
    files = [*PAGES, *(ROOT / "colocated_grpo").rglob("*.py")]
    text = "\n".join(file.read_text() for file in files)
    results = [file.name for file in (ROOT / "docs/results").iterdir()]
    assert [name for name in results if name not in text] == []
