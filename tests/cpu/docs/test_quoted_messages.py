"""Every message that a troubleshooting table quotes is a message of the code."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.support.paths import ROOT

TABLES = {
    "troubleshooting": (ROOT / "docs/troubleshooting.md").read_text(),
    "atropos": (ROOT / "docs/guides/atropos.md").read_text().partition("## Troubleshooting")[2],
}
FOREIGN = {"import transformers", "Scores are the same in a group, skipping", "No trajectories collected"}
"""A statement of the reader's, and messages of atroposlib."""


def quotes(table: str) -> list[str]:
    """Return the messages in the first column: inline code with a space."""
    cells = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
    return [span for cell in cells for span in re.findall(r"`([^`]+)`", cell) if " " in span and span not in FOREIGN]


@cache
def messages() -> list[str]:
    """Return all strings of the package, with every formatted value as '...'."""
    return [
        text
        for file in (ROOT / "colocated_grpo").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if (text := message_of(node)) is not None
    ]


def message_of(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
    return None


def is_a_message(quote: str) -> bool:
    """Compare with all messages. '...' and numbers in the quote stand for any text."""
    pattern = ".*".join(map(re.escape, re.split(r"\.\.\.|\b\d+\b", quote)))
    return any(re.search(pattern, message) for message in messages())


@pytest.mark.parametrize("page", TABLES)
def test_quoted_messages_exist(page):
    found = quotes(TABLES[page])
    assert len(found) > 3
    assert [quote for quote in found if not is_a_message(quote)] == []


def test_an_outdated_quote_is_noticed():
    assert is_a_message("no batch for 60 s; ... holds 0 groups")
    assert not is_a_message("no batch since 60 s; ... holds 0 groups")
