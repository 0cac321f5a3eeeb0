"""`colocated-grpo atropos`: every command line, flag and environment variable of Atropos' example trainer."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from colocated_grpo.launch import cli, launcher
from colocated_grpo.settings.config_file import read_config
from colocated_grpo.settings.errors import ConfigError, parse_path
from colocated_grpo.settings.names.atropos_command import FLAGS, read_command
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.tree import lookup
from tests.support.atropos_commands import EXAMPLES, SERVER, Example


@dataclass(frozen=True, kw_only=True)
class Resolved:
    options: argparse.Namespace
    config: Config
    notes: list[str]

    def value(self, key: str) -> Any:
        return lookup(self.config.model_dump(), parse_path(key))


def words(text: str) -> list[str]:
    """Split a command line that may be continued on further lines, as a shell does."""
    return shlex.split(text.replace("\\\n", " "))


def resolve(text: str, environment: dict[str, str] | None = None, gpus: int = 1) -> Resolved:
    options, overrides, lines = read_command(words(text), cli.run_parser(), environment or {}, lambda _: gpus)
    notes = [line.removeprefix("note: ") for line in lines]
    return Resolved(options=options, config=read_config(options.config, overrides).config, notes=notes)


def error(text: str, environment: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(text, environment)
    return str(caught.value)


# Commands


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_a_command_of_the_guides_means_what_it_says(example: Example):
    resolved = resolve(example.text, example.environment)
    assert {key: resolved.value(key) for key in example.settings} == example.settings
    assert resolved.value("engine.placement") == "server"
    assert (resolved.value("loss.type"), resolved.value("loss.old_logprobs")) == ("grpo", "sampling")


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_a_dry_run_of_a_command_of_the_guides_shows_the_banner(example: Example, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    for name in (
        "VLLM_ENABLE_SHARED_WEIGHTS",
        "VLLM_BRIDGE_CONFIG_PATH",
        "NUM_INFERENCE_NODES",
        "CUDA_VISIBLE_DEVICES",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in example.environment.items():
        monkeypatch.setenv(name, value)
    assert launcher.main(["atropos", *words(example.text), "--dry-run"]) == 2
    output, errors = capsys.readouterr()
    assert output.startswith("Co-located GRPO\n")
    assert output.endswith("Dry run mode - command not executed\n")
    assert errors.startswith("error: model.name=") and errors.count("\n") == 1
    assert errors.endswith("not in the local cache, and HF_HUB_OFFLINE is set\n")


def test_without_flags_the_error_names_the_required_one(capsys):
    assert launcher.main(["atropos"]) == 2
    assert capsys.readouterr().err == (
        "error: --model-name: required: a folder or the name of a model on the Hugging Face Hub\n"
    )


def test_help_lists_the_flags_and_their_defaults(capsys):
    with pytest.raises(SystemExit):
        launcher.main(["atropos", "--help"])
    output = " ".join(capsys.readouterr().out.split())
    assert "--save-path TEXT default: trained_model_checkpoints" in output
    assert "--dry-run" in output


# Flags

NOT_NEEDED, NO_EFFECT = ": not needed", ": no effect"
ENGINE = ": the server at http://localhost:9001 was started with its own"
LORA = "--weight-bridge-mode lora_restart "
SHARED = "--weight-bridge-mode shared_vllm "
FLAG_CASES: list[tuple[str, dict[str, Any], str | None]] = [
    ("--model-name org/other", {"model.name": "org/other"}, None),
    ("--model org/other", {"model.name": "org/other"}, None),
    ("--learning-rate 2e-6", {"policy.lr": 2e-6}, None),
    ("--lr 3e-6", {"policy.lr": 3e-6}, None),
    ("--training-steps 7", {"training_steps": 7}, None),
    ("--warmup-steps 4", {"policy.warmup_steps": 4, "policy.lr": 1e-5}, None),
    ("--warmup-steps 20", {"policy.warmup_steps": 10, "policy.lr": 5e-6}, "rises to 5e-06 only"),
    ("--batch-size 4", {"rollout.prompts_per_step": 16, "rollout.group_size": 8}, None),
    ("--batch-size 3 --gradient-accumulation-steps 5", {"rollout.prompts_per_step": 5, "rollout.group_size": 3}, None),
    ("--gradient-accumulation-steps 6", {"rollout.prompts_per_step": 3, "rollout.group_size": 4}, None),
    ("--seq-len 1025", {"rollout.max_prompt_tokens": 512, "rollout.max_completion_tokens": 513}, None),
    ("--seq-len 8192", {"rollout.max_prompt_tokens": 4096, "engine.max_model_len": 8192}, None),
    ("--optimizer adamw", {"policy.optimizer.type": "adamw", "policy.optimizer.weight_decay": 0.01}, None),
    ("--optimizer adafactor", {"policy.optimizer.type": "adafactor", "policy.optimizer.weight_decay": 0}, None),
    ("--device cuda", {}, ": nothing to set"),
    ("--save-path /data/checkpoints/a", {"output_dir": "/data/checkpoints", "run_name": "a"}, None),
    ("--checkpoint-interval 0", {"checkpoint.export_every": 0, "checkpoint.final": True}, None),
    ("--clip-eps 0.1", {"loss.clip_low": 0.1, "loss.clip_high": 0.1}, None),
    ("--kl-coef 0.05", {"loss.kl.coef": 0.05, "loss.kl.target": "rollout"}, None),
    ("--train-layer-indices 0-3,28-29", {"policy.train_layers": [0, 1, 2, 3, 28, 29]}, None),
    (LORA + "--train-layer-indices 0-3", {"policy.train_layers": None}, NO_EFFECT),
    (
        "--weight-bridge-mode lora_restart",
        {"engine.bridge": "restart", "engine.urls": [], "policy.lora.rank": 16, "sync_frequency": 3},
        None,
    ),
    (SHARED, {"engine.bridge": "shared", "engine.urls": SERVER}, None),
    (SHARED + "--use-shared-memory", {"engine.bridge": "broadcast", "engine.urls": SERVER}, None),
    (SHARED + "--single-copy", {"engine.bridge": "shared", "engine.urls": SERVER}, None),
    ("--use-shared-memory", {"engine.bridge": "restart"}, NO_EFFECT),
    ("--single-copy", {"engine.bridge": "restart"}, NO_EFFECT),
    (SHARED + "--vllm-config-path b.json", {"engine.bridge_config": "b.json"}, None),
    ("--vllm-config-path b.json", {"engine.bridge_config": None}, NO_EFFECT),
    ("--vllm-restart-interval 9", {"sync_frequency": 9}, None),
    (SHARED + "--vllm-restart-interval 9", {"sync_frequency": 1}, NO_EFFECT),
    (LORA + "--lora-r 8", {"policy.lora.rank": 8, "policy.lora.alpha": 32}, None),
    (LORA + "--lora-alpha 64", {"policy.lora.alpha": 64}, None),
    (LORA + "--lora-dropout 0.1", {"policy.lora.dropout": 0}, ": read as 0: the engine samples without dropout"),
    (LORA + "--lora-target-modules k_proj o_proj", {"policy.lora.target_modules": ["k_proj", "o_proj"]}, None),
    (LORA + "--lora-layer-indices 20-21", {"policy.lora.layers": [20, 21]}, None),
    *[
        (f"--lora-{flag}", {"policy.lora": None}, NO_EFFECT)
        for flag in ("r 8", "alpha 8", "dropout 0.1", "target-modules q_proj", "layer-indices 3")
    ],
    ("--vllm-port 9002", {"environments.0.server.port": 9002, "engine.urls": []}, None),
    ("--port 9002", {"environments.0.server.port": 9002}, None),
    (
        SHARED + "--vllm-port 9003",
        {"environments.0.server.port": 9004, "engine.urls": ["http://localhost:9003"]},
        ": environments sample from the server at port 9003",
    ),
    ("--vllm-gpu 0", {}, None),
    (SHARED + "--vllm-gpu 1", {}, ": not read"),
    ("--gpu-memory-utilization 0.3", {"engine.gpu_memory_utilization": 0.3}, None),
    ("--vllm-gpu-memory-utilization 0.3", {"engine.gpu_memory_utilization": 0.3}, None),
    (SHARED + "--gpu-memory-utilization 0.3", {"engine.gpu_memory_utilization": 0.3}, ENGINE),
    ("--max-model-len 3000", {"engine.max_model_len": 3000}, None),
    ("--dtype bfloat16", {"engine.dtype": "bfloat16", "policy.compute_dtype": "bfloat16"}, None),
    ("--dtype auto", {"engine.dtype": "auto", "policy.compute_dtype": "auto"}, None),
    ("--dtype float16", {"engine.dtype": "float16", "policy.compute_dtype": "auto"}, ": of the server"),
    ("--tensor-parallel-size 2", {"engine.tensor_parallel_size": 2}, None),
    ("--enforce-eager", {"engine.enforce_eager": True}, None),
    ("--enable-lora", {"policy.lora": None}, NOT_NEEDED),
    ("--atropos-url http://other:8002", {"environments.0.url": "http://other:8002"}, None),
    ("--use-wandb", {"tracking.wandb": "online"}, None),
    ("--wandb-project p --wandb-group 2024", {"tracking.wandb_project": "p", "tracking.wandb": "off"}, None),
    ("--wandb-group 2024", {"tracking.wandb_group": "2024"}, None),
    ("--trainer-rank 0", {}, NOT_NEEDED),
    ("--init-method tcp://host:29500", {}, NOT_NEEDED),
    ("--num-inference-nodes 0", {"engine.urls": []}, NOT_NEEDED),
    ("--benchmark", {}, NOT_NEEDED),
]


INVALID: list[tuple[Any, ...]] = [
    (
        "--batch-size 1 --gradient-accumulation-steps 1",
        "--batch-size=1: times --gradient-accumulation-steps must be",
    ),
    ("--atropos-url localhost:8000", r"environments.0.url='localhost:8000': must be http://HOST:PORT, or https"),
    ("--trainer-rank 1", "--trainer-rank=1: one command starts all ranks of a machine"),
    ("--world-size 0", "--world-size=0: must be at least 1"),
    ("--num-inference-nodes 2", "--num-inference-nodes=2: servers on other machines are named by address"),
    ("--device cuda:1", "--device=cuda:1: must be cuda or cpu; choose GPUs with CUDA_VISIBLE_DEVICES"),
    ("--seq-len 1", "--seq-len=1: must be at least 2"),
    ("--lora-dropout 1.5", "--lora-dropout=1.5: must be at least 0 and less than 1"),
    ("--save-path /", "--save-path=/: must name a folder"),
    (SHARED + "--single-copy --use-shared-memory", "--use-shared-memory keeps two copies of the weights"),
    ("--adafactor-scale-parameter", "--adafactor-scale-parameter=true: not supported; Adafactor uses --lr as it is"),
    ("--adafactor-relative-step", "--adafactor-relative-step=true: not supported; Adafactor uses --lr as it is"),
    ("--config my.yaml", "--config=my.yaml: not used by this command; add settings as --section.key VALUE"),
    ("--max-model-len 100", "engine.max_model_len=100: must be at least rollout.max_prompt_tokens + "),
]
PROCESSES: list[tuple[Any, ...]] = [
    ("", 8, {}, {"gpus": 1}),
    ("--vllm-gpu 1", 2, {}, {"gpus": 2, "engine_gpus": 1}),
    ("--vllm-gpu 1 --tensor-parallel-size 2", 4, {}, {"gpus": 3, "engine_gpus": 2}),
    ("--vllm-gpu 0", 2, {}, {"gpus": 1, "engine_gpus": 0}),
    ("", 2, {"CUDA_VISIBLE_DEVICES": "4,5"}, {"gpus": None}),
    ("", 0, {}, {"gpus": None, "nproc": None}),
    ("--gpus 4", 8, {}, {"gpus": 4}),
    ("--world-size 2", 8, {}, {"gpus": 2}),
    ("--world-size 2", 0, {}, {"gpus": None, "nproc": 2}),
    ("--device cpu", 1, {}, {"gpus": 0}),
    ("--debug-loading", 1, {}, {"log_level": "DEBUG"}),
    ("--debug-loading --log-level ERROR", 1, {}, {"log_level": "ERROR"}),
]


@pytest.mark.parametrize(
    ("flags", "settings", "note"), FLAG_CASES, ids=lambda value: value if type(value) is str else ""
)
def test_a_flag_sets_a_setting_or_is_reported(flags: str, settings: dict[str, Any], note: str | None):
    resolved = resolve(f"--model-name m {flags}")
    assert {key: resolved.value(key) for key in settings} == settings
    flag = next(word for word in reversed(words(flags)) if word.startswith("--"))
    notes = [line for line in resolved.notes if line.startswith(flag)]
    assert len(notes) == (note is not None)
    assert note is None or note in notes[0]


def test_every_flag_and_every_spelling_has_a_case():
    tested = {word for flags, *_ in FLAG_CASES + INVALID + PROCESSES for word in words(flags) if word.startswith("--")}
    assert {name for flag in FLAGS for name in flag.names} - tested == set()


def test_the_defaults_are_those_of_the_guides():
    resolved = resolve("--model-name m")
    assert {
        key: resolved.value(key)
        for key in ("policy.lr", "training_steps", "policy.warmup_steps", "policy.optimizer.type", "sync_frequency")
    } == {
        "policy.lr": 1e-5,
        "training_steps": 10,
        "policy.warmup_steps": 0,
        "policy.optimizer.type": "adamw_8bit",
        "sync_frequency": 3,
    }
    config = resolved.config
    assert (config.rollout.prompts_per_step, config.rollout.group_size, config.max_sequence_tokens) == (8, 8, 2048)
    assert (config.output_dir, config.run_name, config.checkpoint.export_every) == (".", "trained_model_checkpoints", 3)
    assert (config.loss.clip_low, config.loss.clip_high, config.loss.kl.coef) == (0.2, 0.2, 0)
    engine = config.engine
    assert (engine.gpu_memory_utilization, engine.max_model_len, engine.dtype) == (0.45, 4096, "bfloat16")
    assert config.atropos.url == "http://localhost:8000"
    assert (config.atropos.server.port, config.tracking.wandb) == (9001, "off")
    assert resolved.notes == []


def test_flags_and_defaults_are_those_of_atropos():
    cli = pytest.importorskip("example_trainer.cli", reason="atroposlib is not installed")
    ours = {name: flag for flag in FLAGS for name in flag.names}
    different = {"--device", "--world-size", "--lora-target-modules"}
    for action in cli.create_full_parser()._actions:
        for name in set(action.option_strings) - {"-h", "--help", "--log-dir"}:  # the launcher has --log-dir itself
            flag = ours[name]
            assert (flag.kind is bool) == isinstance(action, argparse._StoreTrueAction), name
            assert (flag.default or None) == (action.default or None) or name in different, name
            assert flag.choices is None or set(flag.choices) == set(action.choices), name


def test_a_flag_that_nobody_knows_fails_with_the_nearest_name(capsys):
    with pytest.raises(SystemExit, match="2"):
        error("--model-name m --batch-sise 3")
    assert capsys.readouterr().err == "error: --batch-sise: unknown flag; did you mean --batch-size?\n"
    assert error("--model-name m --lora-rank 3") == "--lora-rank: unknown flag; did you mean --lora-r?"
    assert error("--model-name m --dry") == "--dry: unknown flag; did you mean --dry-run?"
    assert error("--model-name m --distill-enabled") == "--distill-enabled: unknown flag; --help lists all flags"


@pytest.mark.parametrize(
    ("flags", "line"),
    INVALID,
)
def test_an_invalid_value_is_rejected_in_one_line(flags: str, line: str):
    message = error(f"--model-name m {flags}")
    assert line in message
    assert "\n" not in message


def test_settings_after_the_flags_take_precedence():
    resolved = resolve("--model-name m --lr 1e-4 --policy.lr 2e-6 --seed 3 --model.name ./other --gpus 0")
    assert (resolved.config.policy.lr, resolved.config.seed, resolved.config.model.name) == (2e-6, 3, "./other")
    assert resolved.options.gpus == 0


@pytest.mark.parametrize("override", ["--engine.placement colocated", "--engine.placement=colocated"])
def test_in_process_engines_serve_at_the_port_of_the_server(override: str):
    resolved = resolve(f"--model-name m {SHARED} {override}")
    assert (resolved.value("environments.0.server.port"), resolved.value("engine.urls")) == (9001, [])


def test_a_text_that_looks_like_yaml_stays_a_text():
    resolved = resolve("--model-name m --wandb-project '{a: 1}' --save-path 'runs/[x]: 1' --wandb-group true")
    assert (resolved.value("tracking.wandb_project"), resolved.value("tracking.wandb_group")) == ("{a: 1}", "true")
    assert resolved.value("run_name") == "[x]: 1"


def test_without_bitsandbytes_adamw_is_used_with_one_warning(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))
    resolved = resolve("--model-name m")
    assert resolved.value("policy.optimizer.type") == "adamw"
    assert [note for note in resolved.notes if "bitsandbytes" in note] == [
        "warning: --optimizer adamw_8bit: bitsandbytes is not installed; using adamw with four times the state"
    ]


# Devices and processes


@pytest.mark.parametrize(
    ("flags", "gpus", "environment", "chosen"),
    PROCESSES,
)
def test_flags_about_processes_set_the_flags_of_the_launcher(flags, gpus, environment, chosen):
    options = resolve(f"--model-name m {flags}", environment, gpus).options
    assert {name: getattr(options, name) for name in chosen} == chosen


def test_on_the_cpu_weights_are_float32_unless_a_type_is_given():
    resolve_on_cpu = partial(resolve, gpus=0)
    assert resolve_on_cpu("--model-name m").value("policy.compute_dtype") == "auto"
    assert resolve_on_cpu("--model-name m --dtype bfloat16").value("policy.compute_dtype") == "bfloat16"


# Environment variables


def test_environment_variables_are_read():
    shared = resolve(f"--model-name m {SHARED}", {"VLLM_BRIDGE_CONFIG_PATH": "b.json"})
    assert shared.value("engine.bridge_config") == "b.json"
    given = resolve(f"--model-name m {SHARED} --vllm-config-path a.json", {"VLLM_BRIDGE_CONFIG_PATH": "b.json"})
    assert given.value("engine.bridge_config") == "a.json"
    assert "named by address" in error("--model-name m", {"NUM_INFERENCE_NODES": "2"})
    assert "'x' must be a whole number" in error("--model-name m", {"NUM_INFERENCE_NODES": "x"})
    two_nodes = {"NUM_INFERENCE_NODES": "2"}
    urls = resolve("--model-name m --engine.urls [http://a:9001,http://b:9001]", two_nodes).value("engine.urls")
    assert urls == ["http://a:9001", "http://b:9001"]
    unset = resolve("--model-name m", {"VLLM_ENABLE_SHARED_WEIGHTS": "0"})
    assert unset.value("engine.bridge") == "restart"
