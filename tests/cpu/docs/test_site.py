"""The web site: it is built from all pages, and a broken link is an error. The page of classes is what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.exceptions import Abort

from docs.api_page import PAGE, page
from docs.site import configuration, main, stage
from tests.support.paths import ROOT


def test_the_page_of_classes_is_generated_from_their_docstrings():
    assert PAGE.read_text() == page(), "run python -m docs.api_page"


def test_the_site_has_every_page(tmp_path: Path):
    assert main([str(tmp_path)]) == 0
    pages = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "docs").rglob("*.md") if path.stem != "README"]
    assert [str(name) for name in pages if not (tmp_path / name / "index.html").is_file()] == []
    assert "<math" in (tmp_path / "docs/guides/losses/index.html").read_text()


def test_broken_links_and_a_page_that_the_index_leaves_out_are_errors(tmp_path: Path):
    stage(tmp_path / "pages")
    links = ["missing.md", "running.md#missing", "../training_configs/missing.yaml"]
    (tmp_path / "pages/docs/forgotten.md").write_text("\n\n".join(f"[broken]({link})" for link in links))
    with pytest.raises(Abort, match="4 warnings"):
        build(configuration(tmp_path, tmp_path / "pages", tmp_path / "site"))
