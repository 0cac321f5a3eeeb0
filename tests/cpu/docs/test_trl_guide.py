"""The TRL guide: its YAML loads, and the defaults and metrics that it compares are right."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from colocated_grpo.api.ported import as_in_trl
from colocated_grpo.settings.errors import parse_path, setting_names
from colocated_grpo.settings.losses import GSPOConfig
from colocated_grpo.settings.schema import Config
from tests.support.config_text import config_error, load
from tests.support.paths import ROOT

GUIDE_FOLDER = ROOT / "docs/guides"
GUIDE = (GUIDE_FOLDER / "from_trl.md").read_text()


YAML, ADAPTER, DATASETS, REWARDS = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)


def test_the_yaml_of_the_guide_means_the_same_as_the_script():
    config = load(YAML, alone=True)
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


def test_settings_of_the_dataset_are_added_to_the_entry_that_dataset_name_makes():
    [entry] = load(YAML + DATASETS, alone=True).environments
    assert (entry.name, entry.prompt_column, entry.columns) == ("questions.jsonl", "question", {"answer": "solution"})


def test_entries_of_reward_funcs_may_have_arguments():
    text = re.sub(r"^reward_(funcs|weights): .*\n", "", YAML, flags=re.MULTILINE) + REWARDS
    [entry] = load(text, alone=True).environments
    assert [(reward.name, reward.args) for reward in entry.rewards] == [
        ("my_rewards.py:right", None),
        ("my_rewards.py:Length", {"target": 200}),
        ("trl.rewards:get_soft_overlong_punishment", {"max_completion_len": 256, "soft_punish_cache": 64}),
    ]


def test_the_compared_defaults_are_right():
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
    assert (theirs["router_aux_loss_coef"], ours.policy.load_balancing) == (None, 0.0)
    assert (theirs["max_completion_length"], ours.rollout.max_completion_tokens) == (512, 1024)
    assert (theirs["eval_strategy"], ours.evaluation.every) == ("no", 10)
    assert (theirs["learning_rate"], ours.policy.lr, load(ADAPTER).policy.lr) == (1e-6, 1e-6, 1e-5)
    assert (theirs["save_total_limit"], ours.checkpoint.keep_last) == (None, 2)
    assert (theirs["seed"], ours.seed) == (42, 0)


def test_settings_listed_as_not_supported_are_rejected():
    for name in ("entropy_coef", "top_entropy_quantile", "sync_ref_model", "load_in_8bit"):
        assert f"`{name}`" in GUIDE
        assert config_error(f"{name}: 0.1").startswith(name)
    for loss in ("sapo", "vespo", "luspo"):
        assert f"`{loss}`" in GUIDE
        assert loss in config_error(f"loss_type: {loss}")


def test_the_yaml_of_an_adapter_means_the_same():
    lora = load(YAML + ADAPTER, alone=True).policy.lora
    assert (lora.rank, lora.alpha, lora.target_modules) == (32, 64, "all-linear")
    [mapping] = re.findall(r"`(peft_config: [^`]+)`", GUIDE)
    lora = load(mapping).policy.lora
    assert (lora.rank, lora.alpha, lora.target_modules) == (16, 32, ["q_proj", "v_proj"])


def test_the_names_of_adapter_settings_are_translated_or_rejected_as_listed():
    trl = pytest.importorskip("trl")
    rows = re.findall(r"^\| (`.*) \| (.*) \|$", GUIDE.split("## Adapters")[1].split("## ")[0], re.MULTILINE)
    listed = {name: meaning for names, meaning in rows for name in re.findall(r"`(\w+)`", names)}
    theirs = {field.name for field in fields(trl.ModelConfig)}
    assert {name for name in theirs if name.startswith(("lora_", "use_", "load_in_"))} - {*listed} == {
        "use_bnb_nested_quant"
    }
    for name, meaning in listed.items():
        if meaning.startswith("rejected"):
            assert config_error(f"{name}: true").startswith(f"{name}=true: ")
        for setting in re.findall(r"`(policy\.[\w.]+)`", meaning):
            assert parse_path(setting) in {path for path, _ in setting_names(Config)}


def test_the_metrics_named_in_the_guide_are_explained():
    table = GUIDE.split("## Metrics")[1].split("## ")[0]
    explained = (GUIDE_FOLDER / "metrics.md").read_text()
    names = re.findall(r"^\| .* \| (.*) \|$", table, re.MULTILINE)[1:]
    same = re.findall(r"`([^`]+)`", table.rpartition("|")[2])
    assert len(names) == 9 and len(same) == 6
    for name in [*re.findall(r"`([^`]+)`", " ".join(names)), *same]:
        assert f"`{name}`" in explained or name == "seconds/step", name


def test_the_history_of_a_script_has_the_names_of_the_table():
    table = GUIDE.split("## Metrics")[1].split("## ")[0]
    for theirs, ours in re.findall(r"^\| (`.*`) \| (`.*`) \|$", table, re.MULTILINE):
        pairs = zip(re.findall(r"`([^`]+)`", theirs), re.findall(r"`([^`]+)`", ours), strict=True)
        for their_name, our_name in pairs:
            name = their_name.replace(".../", "sampling/sampling_logp_difference/").replace("<name>", "right")
            assert name in as_in_trl({our_name.replace("<name>", "right"): 1.0}) or name == "cispo_clip_ratio", name
