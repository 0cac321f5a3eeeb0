"""The guide to built-in rewards: its YAML loads and builds, its tables are complete, its rows are scored."""

from __future__ import annotations

import json
import re

import pytest

from colocated_grpo.environments.rewards.functions import BUILT_IN, build_rewards
from colocated_grpo.environments.rewards.judge import Judge
from colocated_grpo.environments.rewards.run_code import RunCode, cases_of
from colocated_grpo.settings.sources import names_model
from tests.support.config_text import load
from tests.support.paths import ROOT

GUIDE = (ROOT / "docs/guides/rewards.md").read_text()
YAML = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)


def table(heading: str) -> dict[str, str]:
    """Return the second cells of the first table below a heading, by the names in the first cells."""
    text = GUIDE.partition(f"# {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", text, re.MULTILINE)
    named = [(name, second) for names, second in rows for name in re.findall(r"`(\w+)`", names)]
    return {name: second for name, second in named if name != "args"}


@pytest.mark.parametrize("text", YAML)
def test_the_rewards_of_every_yaml_are_built(text):
    [source] = load(text, alone=True).environments
    offline = [reward for reward in source.rewards if not names_model(reward.name)]
    assert len(build_rewards(offline, "guide")) == len(offline) > 0


def test_the_table_names_every_built_in_reward():
    assert table("Built-in rewards").keys() == BUILT_IN.keys()


@pytest.mark.parametrize(("heading", "reward"), [("A judge over HTTP", Judge), ("Programs with tests", RunCode)])
def test_the_arguments_are_listed_with_their_defaults(heading, reward):
    listed = table(heading)
    assert listed.keys() == reward.model_fields.keys()
    for name, default in listed.items():
        value = reward.model_fields[name].default
        if "," not in default and isinstance(value, int | float):
            assert float(default) == value, name


def test_the_rows_have_tests():
    [rows] = re.findall(r"```json\n(.*?)```", GUIDE, re.DOTALL)
    assert [len(cases_of(json.loads(row)["tests"])) for row in rows.splitlines()] == [2, 1, 1]


def test_the_cost_of_processes_is_the_measured_one():
    rows = {row["run_in"]: row for row in json.loads((ROOT / "docs/results/rewards_2cores.json").read_text())["rows"]}
    assert f"[{rows['process']['ratio']:.2f} x](../results/rewards_2cores.json)" in GUIDE
    assert rows["process"]["ratio"] <= 1.05, "the bound for which processes are the default"
