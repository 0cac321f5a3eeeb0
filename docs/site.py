"""Build the documentation as a web site: python -m docs.site FOLDER. A broken link is an error."""

from __future__ import annotations

import logging
import re
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from latex2mathml.converter import convert
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import Abort

ROOT = Path(__file__).resolve().parents[1]
TOP = ("README.md", "CHANGELOG.md")
WIDE = """\
.wy-nav-content { max-width: 75em; }
.wy-table-responsive table td, .wy-table-responsive table th { white-space: normal; }
"""
"""The theme is made for narrow tables."""
CODE_OR_FORMULA = re.compile(r"```.*?```|`[^`\n]*`|\$\$(?P<block>[^$]+)\$\$|\$(?P<inline>[^$\s][^$\n]*)\$", re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)")


def main(arguments: list[str]) -> int:
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    target = Path(arguments[0] if arguments else "runs/site").resolve()
    with TemporaryDirectory() as folder:
        stage(pages := Path(folder) / "pages")
        try:
            build(configuration(Path(folder), pages, target))
        except Abort as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print(target / "index.html")
    return 0


def stage(pages: Path) -> None:
    """Copy the pages and what they link to, with the places of the checkout, so that links keep their meaning."""
    shutil.copytree(ROOT / "docs", pages / "docs", ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    (pages / "wide.css").write_text(WIDE)
    for name in TOP:
        shutil.copy(ROOT / name, pages)
    for page in pages.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        page.write_text(CODE_OR_FORMULA.sub(with_mathml, text), encoding="utf-8")
        for link in LINK.findall(text):
            copy = (page.parent / link).resolve()
            source = ROOT / copy.relative_to(pages.resolve()) if copy.is_relative_to(pages.resolve()) else copy
            if source.is_file() and not copy.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, copy)


def with_mathml(found: re.Match[str]) -> str:
    """Return code unchanged, and a formula as MathML, which browsers show without a script."""
    if block := found["block"]:
        return convert(block, display="block")
    # Without the span, a formula at the start of a line would end its paragraph.
    return f"<span>{convert(found['inline'])}</span>" if found["inline"] else found[0]


def configuration(folder: Path, pages: Path, target: Path) -> MkDocsConfig:
    file = folder / "mkdocs.yml"
    file.write_text("site_name: colocated_grpo\n", encoding="utf-8")
    return load_config(
        str(file),
        strict=True,
        docs_dir=str(pages),
        site_dir=str(target),
        nav=navigation((pages / "docs/README.md").read_text(encoding="utf-8")),
        theme={"name": "readthedocs", "highlightjs": False, "navigation_depth": 2},
        extra_css=["wide.css"],
        markdown_extensions=["sane_lists", {"toc": {"slugify": anchor}}],
        validation={
            "nav": {"omitted_files": "warn", "not_found": "warn"},
            "links": {"not_found": "warn", "anchors": "warn", "absolute_links": "warn", "unrecognized_links": "warn"},
        },
    )


def navigation(index: str) -> list[dict[str, object]]:
    """Return the navigation: the sections of the index, each with the pages that it links to, in its order."""
    sections: dict[str, list[dict[str, str]]] = {}
    pages: list[dict[str, str]] = []
    for line in index.partition("\n## ")[0].splitlines():
        if title := re.match(r"([A-Z][^:\[]*):", line):
            pages = sections.setdefault(title[1], [])
        pages += [{name: f"docs/{path}"} for name, path in re.findall(r"\[([^]]+)\]\(([\w/]+\.md)\)", line)]
    return [
        {"Start": "README.md"},
        {"Documentation": "docs/README.md"},
        *({title: pages} for title, pages in sections.items()),
        {"Changelog": "CHANGELOG.md"},
    ]


def anchor(heading: str, separator: str) -> str:
    """Return the anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading).replace(" ", separator).lower()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
