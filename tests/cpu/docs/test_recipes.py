"""The rewards on the page of recipes are those of the result files, and its table of ready configs is complete."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

from colocated_grpo.settings.config_file import load_config
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/recipes.md").read_text()
CONFIGS = (ROOT / "docs/running.md").read_text().partition("## Ready configs")[2].partition("\n## ")[0]
MAKEFILE = (ROOT / "Makefile").read_text()  # of make quickstart
RESULTS = ROOT / "docs/results"
WINDOW = 20
RECIPES = [
    RESULTS / name for name in ("quickstart_2cores.json", "learning_tool_use_2cores.json", "learning_town_2cores.json")
] + sorted(RESULTS.glob("learn_*.json"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_the_rewards_of_a_recipe_are_those_of_its_file(file: Path):
    [row] = [line for line in PAGE.splitlines() if line.startswith("| ") and f"(results/{file.name})" in line]
    assert row.endswith(f"| {' | '.join(expected(file))} |")


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_the_command_of_a_recipe_is_the_one_that_was_run(file: Path):
    content = json.loads(file.read_text())
    if "commands" in content:
        [name] = re.findall(r"--config (\S+)", content["commands"][-1])
        assert f"--config {name}" in PAGE + MAKEFILE
        assert load_config(ROOT / name).training_steps == len(content["reward"])
    else:
        work = content["work"]
        assert f"--task {work['task']} --mode {work['mode']} --model " in PAGE
        assert f"{work['model']} --steps {work['steps']} " in PAGE


def expected(file: Path) -> list[str]:
    """Return the cells of a recipe: rewards in windows of steps, then the held-out reward before and after."""
    content = json.loads(file.read_text())
    if "runs" in content:
        runs = [run for run in content["runs"] if run["trainer"] == "ours"]
        curves = [[step["reward"] for step in run["steps"]] for run in runs]
        held_out = [run["held_out"]["sampled"]["mean"] for run in runs]
        start = content["start_held_out"]["sampled"]["mean"]
    else:
        curves = [content["reward"]]
        start, *_, last = [entry["reward"] for entry in content.get("held_out_reward") or content["held_out"]]
        held_out = [last]
    steps = len(curves[0])
    windows = [[statistics.mean(curve[at : at + WINDOW]) for curve in curves] for at in range(0, steps, WINDOW)]
    cells = [*map(between, windows), *[""] * (6 - len(windows))]
    return [*cells, f"{start:.2f}, {between(held_out)}"]


def between(values: list[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def test_every_shipped_config_has_a_row_that_says_whether_it_was_run():
    rows = {row.rpartition("training_configs/")[2].partition(")")[0]: row for row in CONFIGS.splitlines()[4:]}
    files = {file.name for file in (ROOT / "training_configs").glob("*.yaml")}
    assert files == {name for name in rows if name.endswith(".yaml")}
    runs = {name: rows[name].split(" | ")[3] for name in files}
    assert [name for name, run in runs.items() if not run.startswith(("yes", "no"))] == []


def test_a_config_that_was_run_has_a_file_of_as_many_steps():
    found = re.findall(r"\| yes[^[|]*\[[^]]*\]\((results/[^)]*)\).*\(\.\./(training_configs/[^)]*)\)", CONFIGS)
    assert len(found) == 3
    for result, config in found:
        rewards = json.loads((ROOT / "docs" / result).read_text())["reward"]
        assert len(rewards) == load_config(ROOT / config).training_steps, config
