"""The troubleshooting page describes every check of the doctor, and names only checks and numbers that exist."""

from __future__ import annotations

import re

from colocated_grpo.rollout.vllm.versions import ENGINES
from colocated_grpo.settings.model_sizes import ENGINE_RESERVE
from colocated_grpo.settings.run_sizes import FULL, GIB
from colocated_grpo.tools.doctor.__main__ import CHECKS
from colocated_grpo.tools.doctor.machine import MIN_DRIVER, MIN_SHARED_MEMORY
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text()
DOCTOR = PAGE.split("## The doctor")[1].split("\n## ")[0]
TABLE = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", DOCTOR, re.MULTILINE))


def test_the_table_has_all_checks_in_their_order():
    assert list(TABLE) == [*CHECKS]


def test_the_entries_name_checks_that_exist():
    text = PAGE.partition("## Memory\n")[2].partition("## Resuming\n")[0]
    cells = re.findall(r"\| ([^|]+) \|$", text, re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert len(named) >= 8
    assert [name for name in named if name not in TABLE] == []


def test_the_numbers_of_the_page_are_those_of_the_checks():
    for cuda in (12, 13):
        assert f"CUDA {cuda} needs {MIN_DRIVER[cuda]}" in TABLE["torch"]
    assert f"{MIN_SHARED_MEMORY // GIB} GiB" in TABLE["shared_memory"]
    assert all(name in TABLE["vllm"] for name in ENGINES)
    assert f"a reserve of {ENGINE_RESERVE // GIB} GiB" in DOCTOR
    assert f"Above {FULL * 100:.0f} % of the memory" in DOCTOR
