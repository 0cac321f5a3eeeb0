"""The guide for those who come from TRL: its YAML loads, and the defaults that it compares are the defaults."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from colocated_grpo.config.losses import GSPOConfig
from tests.support.config_text import config_error, load
from tests.support.paths import ROOT

GUIDE_FOLDER = ROOT / "docs/guides"
GUIDE = (GUIDE_FOLDER / "from_trl.md").read_text()


def test_the_yaml_of_the_guide_means_what_its_script_means():
    text, more = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
    config = load(text, alone=True)
    [beside] = load(text + more, alone=True).environments
    assert (beside.name, beside.prompt_column, beside.columns) == (
        "questions.jsonl",
        "question",
        {"answer": "solution"},
    )
    [source] = config.environments
    assert [(reward.name, reward.weight) for reward in source.rewards] == [
        ("my_rewards.py:right", 1.0),
        ("my_rewards.py:style", 0.5),
    ]
    assert (source.type, source.name) == ("dataset", "questions.jsonl")
    assert config.rollout.prompts_per_step * config.rollout.group_size == 64
    assert (config.loss.clip_low, config.loss.clip_high) == (0.2, 0.28)
    assert (config.loss.correction.level, config.loss.correction.mode, config.loss.correction.cap) == (
        "sequence",
        "mask",
        3.0,
    )
    assert (config.policy.schedule, config.training_steps, config.tracking.wandb) == ("linear", 500, "online")


def test_the_defaults_that_the_guide_compares_are_the_defaults():
    trl = pytest.importorskip("trl")
    theirs = {field.name: field.default for field in fields(trl.GRPOConfig)}
    ours = load()
    assert (theirs["lr_scheduler_type"], ours.policy.schedule) == ("linear", "constant")
    assert (theirs["epsilon"], theirs["epsilon_high"], ours.loss.clip_high) == (0.2, None, 0.28)
    assert (GSPOConfig().clip_low, GSPOConfig().clip_high) == (3e-4, 4e-4)
    assert (theirs["vllm_importance_sampling_mode"], theirs["vllm_importance_sampling_clip_max"]) == (
        "sequence_mask",
        3.0,
    )
    correction = ours.loss.correction
    assert (correction.level, correction.mode, correction.cap) == ("token", "truncate", 2.0)
    assert theirs["use_bias_correction_kl"] is True
    assert (theirs["max_completion_length"], ours.rollout.max_completion_tokens) == (512, 1024)
    assert (theirs["eval_strategy"], ours.evaluation.every) == ("no", 10)
    assert (theirs["save_total_limit"], ours.checkpoint.keep_last) == (None, 2)
    assert (theirs["seed"], ours.seed) == (42, 0)


def test_what_the_guide_says_is_not_there_is_refused():
    for name in ("entropy_coef", "top_entropy_quantile", "sync_ref_model", "use_peft", "load_in_4bit"):
        assert f"`{name}`" in GUIDE
        assert config_error(f"{name}: 0.1").startswith(name)
    for name in ("lora", "peft_config"):
        assert "LoRA" in config_error(f"{name}: {{r: 16}}")
    for loss in ("sapo", "vespo", "luspo"):
        assert f"`{loss}`" in GUIDE
        assert loss in config_error(f"loss_type: {loss}")


def test_the_metrics_that_the_guide_names_are_those_that_are_explained():
    table = GUIDE.split("## Where the metrics are")[1].split("## ")[0]
    explained = (GUIDE_FOLDER / "metrics.md").read_text()
    names = re.findall(r"^\| .* \| (.*) \|$", table, re.MULTILINE)[1:]
    same = re.findall(r"`([^`]+)`", table.rpartition("|")[2])
    assert len(names) == 7 and len(same) == 6
    for name in [*re.findall(r"`([^`]+)`", " ".join(names)), *same]:
        assert f"`{name}`" in explained or name == "seconds/step", name
