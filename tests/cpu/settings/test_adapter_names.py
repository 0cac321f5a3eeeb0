"""Names of adapter settings of TRL and PEFT: what they set, and what is rejected."""

from __future__ import annotations

import shlex
from dataclasses import fields
from typing import Any

import pytest

from tests.support.config_text import config_error, load, notes

TRLS = {"rank": 16, "alpha": 32.0, "target_modules": ["q_proj", "v_proj"]}
"""TRL's defaults. The modules are PEFT's default for Llama, Qwen, Mistral and Gemma."""
PEFTS = {"rank": 8, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"]}


def adapter(text: str = "", flags: str = "") -> dict[str, Any] | None:
    """Return the settings of the adapter that were given or translated; None without an adapter."""
    lora = load(text, *shlex.split(flags)).policy.lora
    return None if lora is None else lora.model_dump(exclude_unset=True)


# Defaults of the other trainers


def test_the_translated_defaults_are_those_of_trl():
    trl = pytest.importorskip("trl")
    theirs = {field.name: field.default for field in fields(trl.ModelConfig)}
    assert (theirs["lora_r"], theirs["lora_alpha"], theirs["lora_dropout"]) == (16, 32, 0.05)
    assert (theirs["use_peft"], theirs["lora_target_modules"]) == (False, None)


def test_the_translated_defaults_are_those_of_peft():
    from peft import LoraConfig
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as MODULES

    theirs = LoraConfig()
    assert (theirs.r, theirs.lora_alpha, theirs.lora_dropout, theirs.target_modules) == (8, 8, 0.0, None)
    for family in ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text"):
        assert MODULES[family] == PEFTS["target_modules"]


# TRL


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("use_peft: true", TRLS),
        ("lora_r: 8", {"rank": 8}),
        ("lora_alpha: 64\nuse_peft: true", {**TRLS, "alpha": 64.0}),
        ("use_peft: true\nlora_r: 8\nlora_alpha: 4", {**TRLS, "rank": 8, "alpha": 4.0}),
        ("use_rslora: true\nuse_peft: true", {**TRLS, "rslora": True}),
        ("use_peft: true\nuse_rslora: false", TRLS),
        ("use_peft: true\nlora_target_modules: null", TRLS),
        ("lora_target_modules: all-linear", {"target_modules": "all-linear"}),
        ("lora_target_modules: [all-linear]", {"target_modules": "all-linear"}),
        ("lora_target_modules: [q_proj, o_proj]", {"target_modules": ["q_proj", "o_proj"]}),
        ("lora_target_modules: q_proj", {"target_modules": ["q_proj"]}),
        ("lora_target_modules: ['.*[qv]_proj']", {"target_modules": ".*[qv]_proj"}),
        ("load_in_4bit: true\nuse_peft: true", {**TRLS, "base_dtype": "nf4"}),
        ("load_in_4bit: false\nuse_peft: true", TRLS),
        ("lora_dropout: 0", {"dropout": 0.0}),
        ("lora_task_type: CAUSAL_LM\nuse_peft: true", TRLS),
        ("use_peft: true\npolicy: {lora: {rank: 4}}", {**TRLS, "rank": 4}),
    ],
)
def test_a_name_of_trl_sets_an_adapter_with_its_defaults(text, settings):
    assert adapter(text) == settings


@pytest.mark.parametrize(
    "text",
    [
        "use_peft: false",
        "use_peft: false\nuse_rslora: false\nuse_dora: false",
        "lora_r: null\nlora_target_modules: null\nlora_modules_to_save: null",
        "use_rslora: false",
        "use_peft: null",
        "peft_config: null",
    ],
)
def test_an_adapter_that_the_other_trainer_would_not_train_is_not_trained(text):
    assert load(text).policy == load().policy


def test_the_defaults_of_the_other_trainer_are_shown():
    assert notes("lora_r: 8\nuse_peft: true") == [
        "translated names: lora_r -> policy.lora.rank",
        "use_peft: translated to policy.lora.alpha=32, policy.lora.target_modules=['q_proj', 'v_proj']",
    ]


def test_a_setting_on_the_command_line_replaces_one_default_and_no_other():
    assert adapter("use_peft: true", "--policy.lora.rank 64") == {**TRLS, "rank": 64}
    assert adapter("use_peft: true\nlora_r: 4\nlora_alpha: 8", "--lora-r 64") == {**TRLS, "rank": 64, "alpha": 8.0}


def test_an_adapter_to_continue_from_determines_what_is_not_given():
    assert adapter("use_peft: true\npolicy: {lora: {init: there}}") == {"init": "there"}
    assert adapter("lora_alpha: 8\npolicy: {lora: {init: there}}") == {"init": "there", "alpha": 8.0}


@pytest.mark.parametrize("dropout", ["0.05", "5e-2"])
@pytest.mark.parametrize("name", ["lora_dropout: {}", "peft_config: {{r: 8, lora_dropout: {}}}"])
def test_a_dropout_of_the_trainers_becomes_0_with_a_note(name, dropout):
    text = "lora_r: 8\n" * name.startswith("lora") + name.format(dropout)
    assert adapter(text)["dropout"] == 0
    assert any("trained without dropout, because the engine samples without it" in note for note in notes(text))


# The command line


@pytest.mark.parametrize(
    ("flags", "modules"),
    [
        ("--lora-target-modules q_proj", ["q_proj"]),
        ("--lora-target-modules '[q_proj, k_proj]' --lora-r 4", ["q_proj", "k_proj"]),
        ("--lora_target_modules all-linear --use_peft true", "all-linear"),
        ("--lora_target_modules '.*[qv]_proj' --use_peft true", ".*[qv]_proj"),
        ("--policy.lora.target_modules '[q_proj, v_proj]'", ["q_proj", "v_proj"]),
    ],
)
def test_target_modules_on_the_command_line(flags, modules):
    assert adapter("", flags)["target_modules"] == modules


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--lora-r 8 16", "'16': expected --section.key VALUE"),
        ("--policy.lora.layers 0-3 28-31", "'28-31': expected --section.key VALUE"),
        (
            "--lora-target-modules --lora-r 8",
            "--lora-target-modules: needs a value, for example --lora-target-modules VALUE or "
            "--lora-target-modules=VALUE",
        ),
        (
            "--policy.train_layers 31-20",
            "policy.train_layers='31-20': '31-20' is no range of blocks; write 20-31 or 0-3,28-31 (command line)",
        ),
    ],
)
def test_invalid_flags_are_one_line_errors(flags, line):
    assert config_error("", *shlex.split(flags)) == line


# PEFT


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("{}", PEFTS),
        ("{target_modules: null}", PEFTS),
        ("{lora_alpha: 32}", {**PEFTS, "alpha": 32.0}),
        ("{r: 16, lora_alpha: 32, lora_dropout: 0.0}", {**PEFTS, "rank": 16, "alpha": 32.0, "dropout": 0.0}),
        ("{target_modules: all-linear}", {**PEFTS, "target_modules": "all-linear"}),
        ("{exclude_modules: [o_proj]}", {**PEFTS, "exclude_modules": ["o_proj"]}),
        ("{layers_to_transform: [3, 2]}", {**PEFTS, "layers": [2, 3]}),
        ("{use_rslora: true, bias: none, task_type: CAUSAL_LM}", {**PEFTS, "rslora": True}),
    ],
)
def test_a_peft_config_sets_an_adapter_with_pefts_defaults(text, settings):
    assert adapter(f"peft_config: {text}") == settings


# Rejected


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "load_in_8bit: true",
            "load_in_8bit=true: not supported; base weights have 16 or 4 bits; see policy.lora.base_dtype "
            "(line 3 of x.yaml)",
        ),
        (
            "use_dora: true",
            "use_dora=true: not supported; adapters are plain LoRA, or rslora, of linear layers: docs/guides/lora.md "
            "(line 3 of x.yaml)",
        ),
        (
            "lora_task_type: SEQ_CLS",
            "lora_task_type='SEQ_CLS': must be 'causal_lm' (causal language models are trained) (line 3 of x.yaml)",
        ),
        (
            "lora_r: 0",
            "policy.lora.rank=0: must be greater than 0 (line 3 of x.yaml, as lora_r)",
        ),
        (
            "lora_r: 8\npolicy: {lora: {rank: 8}}",
            "lora_r=8: the same setting as policy.lora.rank in line 4 of x.yaml; remove one of them (line 3 of x.yaml)",
        ),
        (
            "use_peft: false\npolicy: {lora: {}}",
            "use_peft=false: an adapter is set by policy.lora or lora_*; remove one of them (line 3 of x.yaml)",
        ),
        ("use_peft: 1", "use_peft=1: must be true or false (line 3 of x.yaml)"),
        ("lora: {r: 8}", "lora: unknown key; did you mean policy.lora? (line 3 of x.yaml)"),
        ("peft_config: 8", "peft_config=8: must be a mapping of settings"),
        (
            "peft_config: {bias: all}",
            "peft_config.bias='all': must be 'none' (biases are not trained) (line 3 of x.yaml)",
        ),
        (
            "policy: {lora: {r: 8, lora_alpha: 16}}",
            "policy.lora.r: unknown key; did you mean policy.lora.rank? (line 3 of x.yaml)\n"
            "policy.lora.lora_alpha: unknown key; did you mean policy.lora.alpha? (line 3 of x.yaml)",
        ),
    ],
)
def test_what_has_no_equivalent_is_rejected_with_the_way_out(text, line):
    assert config_error(text) == line


def test_an_unknown_setting_of_a_peft_config_is_rejected_with_the_valid_ones():
    line = config_error("peft_config: {rank: 8}")
    assert line.startswith("peft_config.rank: unknown key; valid: lora_alpha, lora_dropout, target_modules, ")
