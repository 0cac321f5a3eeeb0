"""Every file that README and guides point to is there, and every result is pointed to."""

from __future__ import annotations

import re

import pytest

from tests.support.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    missing = [link for link in links if not link.startswith("http") and not (page.parent / link).exists()]
    assert not missing


def test_every_result_is_named_where_somebody_reads_of_it():
    read = [*PAGES, *(ROOT / "colocated_grpo").rglob("*.py")]
    text = "\n".join(page.read_text() for page in read)
    results = [file.name for file in (ROOT / "docs/results").iterdir()]
    assert [name for name in results if name not in text] == []
