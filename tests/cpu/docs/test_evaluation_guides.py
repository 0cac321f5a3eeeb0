"""The guides to evaluation and dynamic sampling: their YAML loads, and their tables are complete and right."""

from __future__ import annotations

import re

import pytest

from colocated_grpo.evaluation.evaluator import BEST_FILE
from colocated_grpo.evaluation.metrics import set_metrics
from colocated_grpo.policy.export import AdapterExport, ModelExport
from colocated_grpo.rollout.resample import resample_metrics
from colocated_grpo.settings.errors import parse_path, setting_names
from colocated_grpo.settings.evaluation import ANSWERS, EvaluationSetConfig
from colocated_grpo.settings.generation import ResampleConfig, SkipSolvedConfig
from colocated_grpo.settings.schema import Config
from colocated_grpo.tools.evaluate import _parser
from tests.cpu.evaluation.test_estimators import group
from tests.support.config_text import load
from tests.support.paths import ROOT

EVALUATION = (ROOT / "docs/guides/evaluation.md").read_text()
SAMPLING = (ROOT / "docs/guides/dynamic_sampling.md").read_text()


def yaml_of(page: str) -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)


def first_column(page: str, heading: str) -> list[str]:
    """Return the inline code in the first cells of the first table below a heading."""
    table = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    return [span for cell in cells for span in re.findall(r"`([^`]+)`", cell)]


def test_every_yaml_loads():
    sets, patience = (load(text) for text in yaml_of(EVALUATION))
    assert [entry.name for entry in sets.evaluation.sets] == ["aime", "gsm8k", "countdown"]
    assert [sets.evaluation.interval(entry) for entry in sets.evaluation.sets] == [20, 50, 20]
    assert (patience.evaluation.keep_best, patience.evaluation.patience) == ("held_out/reward", 5)
    [text] = yaml_of(SAMPLING)
    rollout = load(text).rollout
    assert (rollout.resample, rollout.skip_solved) == (ResampleConfig(), SkipSolvedConfig()), "the defaults are shown"


def test_the_table_of_a_set_is_complete():
    assert set(first_column(EVALUATION, "Sets")) == set(EvaluationSetConfig.model_fields)


def test_the_tables_of_metrics_are_complete():
    groups = [group(index, [1.0, 0.0], ["a", "b"]) for index in range(2)]
    written = set_metrics("eval/<name>", groups, [2], pass_reward=1.0, answer=lambda text: text)
    named = {name.replace("@2", "@k") for name in written if not name.endswith("_stderr")}
    assert named | {"eval/<name>/..._stderr"} == {name for name in first_column(EVALUATION, "Metrics") if "/" in name}
    rounds = {*resample_metrics(groups, [], 2), "resample/rounds"}
    assert set(first_column(SAMPLING, "Replacing groups")) == rounds


def test_the_table_of_answers_is_right():
    rows = re.findall(r"^\| `(\w+)` \| .* \| `(\w+)` \|$", EVALUATION, re.MULTILINE)
    assert {reward: answer for answer, reward in rows} == ANSWERS


@pytest.mark.parametrize("page", [EVALUATION, SAMPLING], ids=["evaluation", "sampling"])
def test_settings_named_in_the_guides_exist(page):
    settings = {path for path, _ in setting_names(Config)}
    named = re.findall(r"`((?:evaluation|rollout|checkpoint)\.\w[\w.]*)`", page)
    assert len(named) > 2
    assert [name for name in named if parse_path(name) not in settings] == []


def test_the_folders_and_flags_in_the_guide_exist():
    best = EVALUATION.partition("## The best step")[2]
    for name in (f"{ModelExport.best_name}/", f"{AdapterExport.best_name}/", BEST_FILE):
        assert f"`{name}`" in best
    for command in re.findall(r"tools\.evaluate (.*)", EVALUATION.partition("```bash")[2].partition("```")[0]):
        options, overrides = _parser().parse_known_args(command.split())
        assert options.model
        assert not [flag for flag in overrides[::2] if not flag.startswith("--evaluation.")]
