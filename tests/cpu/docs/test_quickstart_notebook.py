"""The example notebook: its cells run, and its stored outputs are those of the current code.

No kernel runs here: the packages for one are not installed. The cells are executed as Python.
"""

from __future__ import annotations

import re
import shutil

import pytest

from tests.support.notebook import NOTEBOOK, code_cells, run_cells
from tests.support.paths import ROOT
from tests.support.ranks import Ranks
from tests.support.training_runs import tiny_model

STEPS, TIMEOUT = 2, 300.0
VARIES = re.compile(r": [\d.]+ s$| \.\.\.$|, rewritten while the run goes on$|^  reward .* -> |^  no mismatch ")
"""Lines that depend on time (phases of the start, the first report of a long run) or on what the model samples."""
SECONDS_OF_PHASES = re.compile(r" \([a-z]+ [\d.]+.*?\)")
"""Part of the line of a step: only phases that took a good part of it are named."""
MAX_BYTES = 20_000


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Text and last value of each cell, with a model of random weights in place of the quickstart's."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(tiny_model(), root / "runs/quickstart-model")
    (root / "docs/examples").mkdir(parents=True)
    with Ranks(run_cells, 1, root / "docs/examples", STEPS) as process:
        cells = process.results(TIMEOUT)[0]
    return [(text.replace(f"{root}/docs/examples/../../", "../../"), value) for text, value in cells]


def stored() -> list[str]:
    """Return the printed text in the outputs of each cell."""
    return [
        "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")
        for cell in code_cells()
    ]


def kinds(text: str) -> set[str]:
    """Return the lines with # in place of every number and one space between words."""
    lines = [SECONDS_OF_PHASES.sub("", line) for line in text.splitlines() if not VARIES.search(line)]
    return {re.sub(r"-?\d[\d.,]*(e[+-]?\d+)?", "#", " ".join(line.split())) for line in lines}


def test_the_cells_print_what_the_notebook_shows(shown):
    for (text, _), stored_text in zip(shown, stored(), strict=True):
        assert kinds(stored_text) - kinds(text) == set()


def test_the_report_is_shown_inline(shown):
    assert shown[-1][1].startswith("<iframe srcdoc=")


def test_the_stored_run_has_learned(shown):
    [line] = [line for text in stored() for line in text.splitlines() if line.startswith("finished after")]
    before, after = re.search(r"held-out reward ([\d.]+) .*-> ([\d.]+)", line).groups()
    assert float(after) > float(before)


def test_the_notebook_is_small_and_names_no_folder_of_a_machine():
    text = NOTEBOOK.read_text()
    assert len(text) <= MAX_BYTES
    assert str(ROOT) not in text
    assert not re.search(r"/(home|tmp|root|work|Users)/", text)
