"""The verl guide: its YAML loads, its reward function scores rows of verl, and its names are settings."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from colocated_grpo.environments.build import build_environments
from colocated_grpo.settings.errors import dotted, setting_names
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.sources import DatasetSourceConfig
from colocated_grpo.tools.make_model import build_char_tokenizer
from colocated_grpo.types import Completion
from tests.support.config_text import config_error, load
from tests.support.paths import ROOT

GUIDE = (ROOT / "docs/guides/from_verl.md").read_text()
ROW = {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": "1+1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0},
}


@pytest.mark.parametrize("result", ["right", "{'score': right, 'acc': 1}"])
def test_the_yaml_and_the_reward_of_the_guide_score_rows_of_verl(tmp_path, monkeypatch, result):
    monkeypatch.chdir(tmp_path)
    for name in ("train.parquet", "test.parquet"):
        parquet.write_table(pyarrow.Table.from_pylist([ROW] * 4), name)
    [reward] = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    Path("my_rewards.py").write_text(reward.replace("my_score", f"my_score_{len(result)}"))
    Path(f"my_score_{len(result)}.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    right = float((data_source, solution_str, extra_info['index']) == ('sums', ground_truth, 0))\n"
        f"    return {result}\n"
    )
    [text] = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
    made = build_environments(load(text, alone=True), build_char_tokenizer())
    [prompt] = made.open_source().next(1)
    sampled = Completion(token_ids=[1], sampling_logprobs=[-1.0], finish_reason="stop", policy_version=0)
    scores = made.scorers["train.parquet"].score(prompt, [sampled] * 2, ["2", "3"])
    assert [score.reward for score in scores] == [1.0, 0.0], scores


def test_names_in_the_guide_are_settings():
    names = {dotted(path) for path, _ in setting_names(Config)}
    given = {name for row in re.findall(r"^\| `.*? \| (.*) \|$", GUIDE, re.M) for name in re.findall(r"`([\w.]+)", row)}
    assert len(given) > 15
    not_settings = {"bnpo", "dr_grpo", "grpo", "get_soft_overlong_punishment", "train_batch_size", "use_kl_loss"}
    not_settings |= DatasetSourceConfig.model_fields.keys()
    assert {name.removesuffix(": none") for name in given} - names - not_settings <= {"token", "seq"}


@pytest.mark.parametrize("section", ["actor_rollout_ref", "algorithm", "data", "reward", "reward_model", "trainer"])
def test_the_error_for_a_section_of_verl_names_the_guide(section):
    line = config_error(f"{section}: {{rollout: 8}}")
    assert line.startswith(f"{section}: ") and "docs/guides/from_verl.md" in line
