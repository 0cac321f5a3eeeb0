"""Every promise of the reliability page is shown by a test that exists."""

from __future__ import annotations

import json
import re

from tests.support.paths import ROOT

PAGE = (ROOT / "docs/reliability.md").read_text()


def test_every_promise_names_test_files_that_exist():
    table = PAGE.partition("## Promises")[2].partition("##")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    named = [re.findall(r"`(tests/\S+\.py)`", row) for row in rows]
    assert len(named) > 10 and all(named)
    assert [name for names in named for name in names if not (ROOT / name).is_file()] == []


def test_the_environment_variable_of_the_page_is_the_one_that_is_read():
    from colocated_grpo.environments.adapters import tossim

    assert f"{tossim.TRUST_VARIABLE}=1" in PAGE
    assert f"~/.config/{tossim.key_file().parent.name}/" in PAGE


def test_the_cost_of_checksums_on_the_page_is_the_measured_one():
    [row] = json.loads((ROOT / "docs/results/checksums_2cores.json").read_text())["rows"]
    assert f"[{row['ratio']:.2f} x](results/checksums_2cores.json)" in PAGE
    assert f"{row['export_seconds_per_gigabyte']:.2f} s for each GB" in PAGE
