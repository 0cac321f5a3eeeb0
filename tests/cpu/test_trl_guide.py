"""The guide for people who come from TRL: its configuration is read, and what it says of defaults is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from trl import GRPOConfig

from colocated_grpo.config.schema import Config
from colocated_grpo.config.tree import lookup

from config_text import complaint, load

GUIDE = (Path(__file__).resolve().parents[2] / "docs/guides/from_trl.md").read_text()
TRL = {name: field.default for name, field in GRPOConfig.__dataclass_fields__.items()}


def block(language: str) -> str:
    [text] = re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)
    return text


def test_the_configuration_of_the_guide_means_what_its_script_means():
    config = load(block("yaml"), alone=True)
    assert config.training_steps == 500
    assert (config.rollout.prompts_per_step, config.rollout.group_size) == (32, 16)
    assert config.rollout.max_completion_tokens == 1024
    assert (config.policy.lr, config.policy.schedule) == (2e-6, "cosine")
    assert (config.loss.type, config.loss.clip_low, config.loss.clip_high, config.loss.kl.coef) == (
        "dapo",
        0.2,
        0.28,
        0,
    )
    assert [reward.weight for reward in config.environments[0].rewards] == [1.0, 0.2]
    assert (config.checkpoint.every, config.tracking.wandb) == (100, "online")


def test_every_name_of_the_script_is_one_of_trls():
    [arguments] = re.findall(r"GRPOConfig\((.*?)\n    \)", block("python"), re.DOTALL)
    assert set(re.findall(r"(\w+)=", arguments)) <= TRL.keys()


def rows_under(heading: str) -> list[list[str]]:
    section = GUIDE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    table = [line for line in section.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table]


DEFAULTS = {
    "upper clip of `dapo`": (TRL["epsilon_high"] or TRL["epsilon"], "loss.clip_high"),
    "sampler correction": (TRL["vllm_importance_sampling_clip_max"], "loss.correction.cap"),
    "learning-rate schedule": (TRL["lr_scheduler_type"], "policy.schedule"),
    "longest completion": (TRL["max_completion_length"], "rollout.max_completion_tokens"),
    "checkpoint every": (TRL["save_steps"], "checkpoint.every"),
}


def test_all_defaults_of_the_table_are_checked():
    names = [row[0] for row in rows_under("Defaults that differ")]
    assert set(names) - DEFAULTS.keys() == {"prompts that are too long"}


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_default_that_differs_is_as_the_guide_says(name):
    [(trl, ours, change)] = [row[1:] for row in rows_under("Defaults that differ") if row[0] == name]
    value, setting = DEFAULTS[name]
    plain = Config(model={"name": "none"}, environments=[{"type": "task", "name": "sorting"}]).model_dump()
    default = lookup(plain, tuple(setting.split(".")))
    assert default != value
    assert f"{value:g}" in trl if isinstance(value, float | int) else value in trl
    assert f"{default:,}".removesuffix(".0") in ours if isinstance(default, float | int) else default in ours
    changed = load(yaml.safe_dump(_nested(change.strip("`")))).model_dump()
    assert lookup(changed, tuple(setting.split("."))) == value


def _nested(dotted: str) -> dict:
    """'a.b: 1' as YAML with sections."""
    name, value = dotted.split(": ", 1)
    tree = yaml.safe_load(value)
    for part in reversed(name.split(".")):
        tree = {part: tree}
    return tree


def test_what_is_said_not_to_be_there_is_refused():
    for name in ("entropy_coef", "top_entropy_quantile", "sync_ref_model"):
        assert name in TRL
        assert f"`{name}`" in GUIDE
        assert complaint(f"{name}: 0.1").startswith(name)
    for loss in ("sapo", "vespo", "luspo"):
        assert f"`{loss}`" in GUIDE
        assert loss in complaint(f"loss_type: {loss}")
