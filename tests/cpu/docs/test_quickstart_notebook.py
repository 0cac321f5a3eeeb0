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
DEPENDS_ON_TIME = re.compile(r": [\d.]+ s$| \.\.\.$|, rewritten while the run goes on$")
"""Lines that are printed only for what takes long enough: phases of the start, and the first report of a long run."""
MAX_BYTES = 20_000


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Text, HTML and last value of each cell, with a model of random weights in place of the quickstart's."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(tiny_model(), root / "runs/quickstart-model")
    (root / "docs/examples").mkdir(parents=True)
    with Ranks(run_cells, 1, root / "docs/examples", STEPS) as process:
        cells = process.results(TIMEOUT)[0]
    return [(text.replace(f"{root}/docs/examples/../../", "../../"), html, value) for text, html, value in cells]


def stored() -> list[tuple[str, list[str]]]:
    """Return the printed text and the HTML in the outputs of each cell."""
    texts, pages = [], []
    for cell in code_cells():
        outputs = cell["outputs"]
        texts.append("".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream"))
        pages.append(["".join(out["data"]["text/html"]) for out in outputs if "text/html" in out.get("data", {})])
    return list(zip(texts, pages, strict=True))


def kinds(text: str) -> set[str]:
    """Return the lines with # in place of every number."""
    lines = [line for line in text.splitlines() if not DEPENDS_ON_TIME.search(line)]
    return {re.sub(r"-?\d[\d.,]*(e[+-]?\d+)?", "#", line) for line in lines}


def test_the_cells_print_what_the_notebook_shows(shown):
    for (text, _, _), (stored_text, _) in zip(shown, stored(), strict=True):
        assert kinds(stored_text) - kinds(text) == set()


def test_progress_and_report_are_shown_inline(shown):
    [(_, [progress], _)] = [cell for cell in shown if cell[1]]
    assert f'<progress value="{STEPS}" max="{STEPS}">' in progress
    assert shown[-1][2].startswith("<iframe srcdoc=")
    [(_, [stored_progress])] = [cell for cell in stored() if cell[1] and "<progress" in cell[1][0]]
    titles = re.findall("<th>(.*?)</th>", stored_progress)
    # A model of random weights may have no gradient, and then no metrics of one.
    assert set(titles) - {"mismatch", "clip"} <= set(re.findall("<th>(.*?)</th>", progress))


def test_the_stored_run_has_learned(shown):
    [line] = [line for text, _ in stored() for line in text.splitlines() if line.startswith("finished after")]
    before, after = re.search(r"held-out reward ([\d.]+) -> ([\d.]+)", line).groups()
    assert float(after) > float(before)


def test_the_notebook_is_small_and_names_no_folder_of_a_machine():
    text = NOTEBOOK.read_text()
    assert len(text) <= MAX_BYTES
    assert str(ROOT) not in text
    assert not re.search(r"/(home|tmp|root|work|Users)/", text)
