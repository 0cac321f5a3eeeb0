"""Files, folders and symbols named in the contributor's pages and in the example exist."""

from __future__ import annotations

import ast
import builtins
import re
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

from colocated_grpo.settings.schema import Config
from tests.support.paths import ROOT
from tests.support.source_names import defines

PAGES = [ROOT / "docs/architecture.md", ROOT / "docs/contributing.md"]
EXAMPLE = ROOT / "docs/examples/minimal_grpo.py"
FILE_ENDINGS = ("py", "md", "yaml", "json", "toml")
TOPS = (ROOT, ROOT / "colocated_grpo")
CODE = [file for top in ("colocated_grpo", "tests") for file in (ROOT / top).rglob("*.py")]
NOT_CHECKED = {"trl.rewards", "my_task.py", "utils.py", "Makefile", "Any"}
"""Names of other packages, of a user's file, and of a file that must not exist."""
MAKE_VARIABLES = re.findall(r"^(\w+) [:?]?=", (ROOT / "Makefile").read_text(), re.MULTILINE)


def spans(page: Path) -> list[str]:
    """Return the inline code of a page, without fenced blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [span for span in re.findall(r"`([^`]+)`", text) if span not in NOT_CHECKED]


def is_path(span: str) -> bool:
    return re.fullmatch(r"[\w./-]+/|[\w./-]+\.(" + "|".join(FILE_ENDINGS) + ")", span) is not None


def path_exists(path: str) -> bool:
    return any((top / path).exists() for top in TOPS)


def is_symbol(span: str) -> bool:
    """Return True for a class, a constant or a dotted name. A single lower-case word is too ambiguous to check."""
    return re.fullmatch(r"[A-Z]\w*|[A-Za-z_]\w*(\.\w+)+", span) is not None


@cache
def definitions() -> dict[str, list[Path]]:
    """Return the names defined at module level, with their files."""
    found: dict[str, list[Path]] = {}
    for file in CODE:
        for node in ast.parse(file.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names.append(node.name)
            for name in names:
                found.setdefault(name, []).append(file)
    return found


def is_defined(symbol: str) -> bool:
    """Look up `Class`, `CONSTANT`, `Class.attribute`, `module.name` or a setting such as `policy.lr`."""
    first, _, rest = symbol.partition(".")
    if not rest:
        return first in definitions() or first in MAKE_VARIABLES or hasattr(builtins, first)
    in_class = any(defines(file.parent, f"{file.stem}:{symbol}") for file in definitions().get(first, []))
    in_module = any(file.stem == first and defines(file.parent, f"{first}:{rest}") for file in CODE)
    return in_class or in_module or is_setting(symbol)


def is_setting(name: str) -> bool:
    section: object = Config
    for part in name.split("."):
        if not (isinstance(section, type) and issubclass(section, BaseModel) and part in section.model_fields):
            return False
        section = section.model_fields[part].annotation
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_named_in_a_page_exists(page):
    paths = [span for span in spans(page) if is_path(span)]
    assert paths
    missing = [path for path in paths if not path_exists(path)]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_symbol_named_in_a_page_exists(page):
    symbols = [span for span in spans(page) if is_symbol(span) and not is_path(span)]
    assert symbols
    missing = [symbol for symbol in symbols if not is_defined(symbol)]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_symbol_is_defined_in_the_file_named_after_it(page):
    """In pages: `Symbol` (`path.py`)."""
    pairs = re.findall(r"`([A-Za-z_]\w*)` \(`([\w/]+\.py)`\)", page.read_text())
    assert pairs
    files = {name: [top / path for top in TOPS if (top / path).exists()] for name, path in pairs}
    missing = [name for name, found in files.items() if not set(found) & set(definitions().get(name, []))]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_in_a_command_exists(page):
    modules = re.findall(r"-m (colocated_grpo[\w.]*)", page.read_text())
    missing = [name for name in modules if not (ROOT / name.replace(".", "/")).with_suffix(".py").exists()]
    assert not missing


def test_every_room_has_a_row_in_the_tree():
    tree = PAGES[0].read_text().partition("## The tree")[2].partition("\n## ")[0]
    rooms = {span.rstrip("/") for row in re.findall(r"^\| (`.*?) \|", tree, re.MULTILINE) for span in row.split("`")}
    parts = [part for part in (ROOT / "colocated_grpo").iterdir() if part.suffix == ".py" or list(part.glob("*.py"))]
    assert [part.name for part in parts if part.name not in rooms and not part.name.startswith("__")] == []


def test_every_file_named_in_the_example_exists():
    paths = re.findall(r"\b(?:\w+/)+(?:\w+\.py)?|\b\w+\.py\b", EXAMPLE.read_text())
    named = [path for path in paths if path not in ("runs/", "docs/")]
    assert len(named) > 10
    missing = [path for path in named if not path_exists(path)]
    assert not missing


@pytest.mark.parametrize("symbol", ["Choreography.rollout_phase", "policy.lr", "PATCHES", "trainer.train"])
def test_symbols_of_each_kind_are_found(symbol):
    assert is_symbol(symbol) and is_defined(symbol)


@pytest.mark.parametrize("symbol", ["Choreography.misspelt", "policy.misspelt", "MISSPELT", "trainer.misspelt"])
def test_a_misspelt_symbol_is_noticed(symbol):
    assert is_symbol(symbol) and not is_defined(symbol)
