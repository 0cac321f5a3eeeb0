"""Settings that load: files, values, overrides, names of other trainers."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import yaml

from colocated_grpo.settings.config_file import load_config, parse_overrides, read_config
from colocated_grpo.settings.errors import setting_names
from colocated_grpo.settings.names.translation import ALIASES
from colocated_grpo.settings.rules import check_world
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.training import layers_text, parse_layers
from tests.support.config_text import config_error, load, notes
from tests.support.paths import ROOT

SHIPPED = sorted((ROOT / "training_configs").glob("*.yaml"))

SEED_TEXT = """\
# training_configs/dr_grpo_config.yaml
model_name: "microsoft/DialoGPT-medium"

# Optimized vLLM settings for co-location
vllm_config:
  tensor_parallel_size: 1  # Each rank gets its own vLLM instance
  max_num_seqs: 32  # Reduced for co-location
  max_model_len: 2048
  gpu_memory_utilization: 0.4  # Leave room for FSDP training
  enforce_eager: true  # Better for co-location
  disable_log_stats: true  # Reduce overhead

# FSDP settings for distributed training
fsdp_config:
  sharding_strategy: "FULL_SHARD"
  cpu_offload: false
  mixed_precision: true

# Training parameters
learning_rate: 1e-5
batch_size: 64
max_iterations: 5000
sync_frequency: 100  # How often to sync FSDP->vLLM weights
"""


# Files


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_file_loads_for_its_number_of_ranks(path):
    gpus = re.search(r"(\d)gpu", path.name)
    ranks = int(gpus[1]) if gpus else 8
    assert check_world(load_config(path), ranks) is None  # raises otherwise


def test_all_documented_files_are_shipped():
    assert {path.name for path in SHIPPED} >= {
        "quickstart.yaml",
        "dr_grpo_config.yaml",
        "gsm8k_qwen3_0.6b_1gpu.yaml",
        "gsm8k_qwen3_8b_8gpu.yaml",
        "gsm8k_qwen3_8b_lora_1gpu.yaml",
        "large_model_config.yaml",
        "reasoning_gym_1gpu.yaml",
    }


def test_the_shipped_dr_grpo_file_begins_with_the_original_text_unchanged():
    assert (ROOT / "training_configs/dr_grpo_config.yaml").read_text().startswith(SEED_TEXT)


def test_the_original_co_located_file_loads_unchanged():
    config = load(SEED_TEXT, alone=True)
    assert config.model.name == "microsoft/DialoGPT-medium"
    assert config.policy.lr == 1e-5
    assert config.training_steps == 5000
    assert config.sync_frequency == 100
    assert config.rollout.prompts_per_step * config.rollout.group_size == 64
    assert (config.engine.max_num_seqs, config.engine.max_model_len) == (32, 2048)
    assert config.engine.gpu_memory_utilization == 0.4
    assert config.engine.enforce_eager is True
    assert config.engine.args == {"disable_log_stats": True}
    assert config.policy.cpu_offload is False
    assert config.policy.compute_dtype == "auto"


def test_the_shipped_dr_grpo_file_trains_with_the_dr_grpo_loss():
    config = load_config(ROOT / "training_configs/dr_grpo_config.yaml")
    assert (config.loss.type, config.advantage.scale) == ("dr_grpo", "none")


def test_a_file_without_environments_gets_a_built_in_task_and_a_note(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("model: {name: a}")
    loaded = read_config(path)
    assert [source.name for source in loaded.config.environments] == ["arithmetic"]
    assert "environments: not given; training on the built-in task 'arithmetic'" in loaded.notes


def test_a_resolved_config_written_as_yaml_loads_to_the_same_config(tmp_path):
    config = load("loss: {type: gspo}\npolicy: {lr: 1e-7}\nengine: {args: {max_logprobs: 3}}\n")
    saved = tmp_path / "config.yaml"
    saved.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    assert load_config(saved) == config


# Values


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "0.00001", '"1e-5"', "1.e-5", ".1e-4"])
def test_small_numbers_load_however_they_are_written(text):
    assert load(f"policy: {{lr: {text}}}").policy.lr == pytest.approx(1e-5, rel=1e-12)


@pytest.mark.parametrize("text", ["1e4", "10000", "10_000", '"10000"', "1.0e4"])
def test_whole_numbers_load_however_they_are_written(text):
    assert load(f"training_steps: {text}").training_steps == 10000


@pytest.mark.parametrize(("text", "value"), [("off", False), ("on", True), ("true", True), ("auto", "auto")])
def test_every_spelling_of_true_and_false_is_accepted_beside_auto(text, value):
    assert load(f"policy: {{compile: {text}}}").policy.compile == value


@pytest.mark.parametrize(
    ("text", "blocks"),
    [("20-22", [20, 21, 22]), ('"0-1, 6-7"', [0, 1, 6, 7]), ("5", [5]), ("[7, 3, 3]", [3, 7]), ('"1-1"', [1])],
)
def test_blocks_load_however_they_are_written(text, blocks):
    assert load(f"policy: {{train_layers: {text}}}").policy.train_layers == blocks
    assert load(f"policy: {{lora: {{layers: {text}}}}}").policy.lora.layers == blocks


@pytest.mark.parametrize("text", ["0", "20-31", "0-3,28-31", "1,3,5-6"])
def test_blocks_are_shown_as_they_are_written(text):
    assert layers_text(parse_layers(text)) == text


def test_an_adapter_has_ten_times_the_default_learning_rate_of_full_training():
    assert load("policy: {lora: {}}").policy.lr == pytest.approx(10 * load("").policy.lr)
    assert load("policy: {lora: {}, lr: 2e-6}").policy.lr == 2e-6
    assert load("policy: {lora: null}").policy == load("").policy


@pytest.mark.parametrize(("text", "value"), [("yes", True), ("on", True), ("no", False), ("false", False)])
def test_yes_and_no_are_booleans_in_boolean_settings(text, value):
    assert load(f"engine: {{sleep: {text}}}").engine.sleep is value


def test_a_leading_zero_does_not_make_a_number_octal():
    assert load("training_steps: 010").training_steps == 10


def test_numbers_in_free_form_arguments_are_numbers():
    config = load("engine: {args: {swap_space: 1e-3, label: 12:30}}")
    assert config.engine.args == {"swap_space": 0.001, "label": "12:30"}


def test_a_loss_without_type_is_the_default_loss():
    assert load("loss: {kl: {coef: 0.1}}").loss.type == "dapo"


# Overrides


@pytest.mark.parametrize("words", [["--policy.lr", "2e-6"], ["--policy.lr=2e-6"], ["--learning_rate", "2e-6"]])
def test_an_override_replaces_the_value_of_the_file(words):
    assert load("policy: {lr: 1e-5}", *words).policy.lr == 2e-6


def test_overrides_reach_into_lists_and_free_form_arguments():
    config = load("", "--environments.0.args.max_digits", "3", "--environments.0.weight=2")
    assert config.environments[0].args == {"max_digits": 3}
    assert config.environments[0].weight == 2.0


def test_overrides_can_be_lists_booleans_and_null():
    overrides = ["--rollout.stop", "[a, b]", "--engine.sleep", "false", "--engine.max_model_len", "null"]
    config = load("engine: {max_model_len: 9000}", *overrides)
    assert config.rollout.stop == ["a", "b"]
    assert config.engine.sleep is False
    assert config.engine.max_model_len is None


def test_an_override_can_add_the_next_entry_of_a_list():
    config = load("", "--environments.1.name", "arithmetic")
    assert [source.name for source in config.environments] == ["sorting", "arithmetic"]


@pytest.mark.parametrize("text", ["2024", "true", "1e5", "{{ x }}", "[a"])
def test_an_override_of_a_text_setting_is_not_parsed(text):
    assert load("", "--run_name", text).run_name == text


def test_an_override_of_a_setting_that_is_a_list_or_text_is_not_parsed_as_a_number():
    assert load("", "--policy.lora.target_modules", "5").policy.lora.target_modules == "5"


def test_a_negative_number_is_a_value_and_not_a_flag():
    assert parse_overrides(["--environments.0.args.low", "-5"]) == [(("environments", 0, "args", "low"), "-5")]


def test_the_command_line_takes_precedence_over_an_old_name_in_the_file():
    assert load("learning_rate: 1e-5", "--policy.lr", "3e-6").policy.lr == 3e-6


def test_an_old_name_on_the_command_line_takes_precedence_over_the_file():
    assert load("engine: {max_num_seqs: 8}", "--vllm_config.max_num_seqs", "16").engine.max_num_seqs == 16


def test_the_batch_size_counts_completions_with_the_group_size_of_the_command_line():
    assert load("batch_size: 64", "--rollout.group_size", "16").rollout.prompts_per_step == 4


# Old names


def setting(config: Config, name: str):
    value = config
    for step in name.split("."):
        value = value[int(step)] if step.isdigit() else getattr(value, step)
    return value


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("num_generations: 4", "rollout.group_size", 4),
        ("k_per_prompt: 4", "rollout.group_size", 4),
        ("generation_batch_size: 16", "rollout.prompts_per_step", 2),
        ("beta: 0.04", "loss.kl.coef", 0.04),
        ("epsilon: 0.1", "loss.clip_low", 0.1),
        ("epsilon: 0.1", "loss.clip_high", 0.1),
        ("{epsilon: 0.1, epsilon_high: 0.3}", "loss.clip_high", 0.3),
        ("{epsilon: 0.1, epsilon_high: 0.3}", "loss.clip_low", 0.1),
        ("delta: 2.0", "loss.dual_clip", 2.0),
        ("loss_type: bnpo", "loss.type", "bnpo"),
        ("scale_rewards: true", "advantage.scale", "group"),
        ("scale_rewards: false", "advantage.scale", "none"),
        ("scale_rewards: batch", "advantage.scale", "batch"),
        ("num_iterations: 2", "batch.epochs", 2),
        ("router_aux_loss_coef: 0.01", "policy.load_balancing", 0.01),
        ("max_completion_length: 77", "rollout.max_completion_tokens", 77),
        ("max_prompt_length: 77", "rollout.max_prompt_tokens", 77),
        ("temperature: 0.8", "rollout.temperature", 0.8),
        ("max_steps: 9", "training_steps", 9),
        ("max_ticks: 9", "training_steps", 9),
        ("sync_every: 9", "sync_frequency", 9),
        ("gradient_clip_norm: 0.5", "policy.grad_clip", 0.5),
        ("optim: adamw_bnb_8bit", "policy.optimizer.type", "adamw_8bit"),
        ("warmup_ratio: 0.1", "policy.warmup_steps", 0.1),
        ("warmup_steps: 0.5", "policy.warmup_steps", 0.5),
        ("warmup_steps: 5", "policy.warmup_steps", 5),
        ("{loss_type: grpo, importance_sampling_level: sequence}", "loss.type", "gspo"),
        ("model_init_kwargs: {revision: main, dtype: float32, device_map: null}", "model.revision", "main"),
        ("{push_to_hub: true, output_dir: some/where}", "hub.repo", "where"),
        ("{push_to_hub: true, hub_model_id: a/b, output_dir: c}", "hub.repo", "a/b"),
        ("lr_scheduler_type: cosine", "policy.schedule", "cosine"),
        ("max_grad_norm: 0", "policy.grad_clip", 0.0),
        ("max_grad_norm: 0.5", "policy.grad_clip", 0.5),
        ("fsdp_config: {mixed_precision: false}", "policy.compute_dtype", "float32"),
        ("fsdp: {activation_checkpointing: true}", "policy.gradient_checkpointing", True),
        ("vllm_config: {enable_sleep_mode: false}", "engine.sleep", False),
        ("vllm_config: {quantization: fp8}", "engine.args", {"quantization": "fp8"}),
        ("vllm_importance_sampling_mode: sequence_mask", "loss.correction.level", "sequence"),
        ("vllm_importance_sampling_mode: sequence_mask", "loss.correction.mode", "mask"),
        ("vllm_importance_sampling_correction: false", "loss.correction.mode", "off"),
        ("report_to: [wandb, tensorboard]", "tracking.tensorboard", True),
        ("num_generations_eval: 3", "evaluation.samples_per_prompt", 3),
        ('eval_strategy: "no"', "evaluation.every", 0),
        ("save_strategy: no", "checkpoint.every", 0),
        ("torch_compile: false", "policy.compile", False),
        ("model_revision: main", "model.revision", "main"),
        ("use_wandb: true", "tracking.wandb", "online"),
    ],
)
def test_an_old_name_sets_its_equivalent(tmp_path, line, name, value):
    path = tmp_path / "x.yaml"
    settings = yaml.safe_load(line)
    path.write_text(json.dumps({"model": {"name": "a"}, "environments": [{"name": "sorting"}], **settings}))
    assert setting(load_config(path), name) == value


TOSSIM = """\
learning_rate: 0.00005
min_learning_rate: 0.00001
warmup_ticks: 100
gradient_clip_norm: 1.0
sync_every: 10
batch_size: 90
max_tokens_per_gen: 96
temperature: 0.8
top_p: 0.9
const_baseline: 0.0
num_concurrent_games: 30
active_seats_per_game: 3
max_ticks: 5000
save_ticks: 500
log_ticks: 10
eval_ticks: 100
early_stop_parse_rate: 0.99
early_stop_consecutive_ticks: 1000
enable_verbosity_penalty: false
verbosity_penalty_rate: 0.05
max_think_tokens: 64
tensor_parallel_size: 2
dtype: "bfloat16"
max_model_len: 2048
trust_remote_code: true
expected_convergence_ticks: 3000
expected_initial_parse_rate: 0.85
expected_initial_legal_rate: 0.80
"""
"""Settings of dr_grpo_config.yaml and dr_grpo_r1.yaml in ToSSim's repository, without the model."""


def test_the_files_of_tossims_repository_load_with_notes_about_what_they_do_not_set():
    config = load(TOSSIM)
    assert (config.rollout.prompts_per_step, config.rollout.group_size) == (45, 2)
    assert (config.training_steps, config.checkpoint.every, config.evaluation.every) == (5000, 500, 100)
    assert (config.policy.lr, config.policy.min_lr, config.policy.warmup_steps) == (5e-5, 1e-5, 100)
    assert config.policy.schedule == "cosine"
    assert (config.engine.tensor_parallel_size, config.engine.max_model_len) == (2, 2048)
    assert (config.rollout.max_completion_tokens, config.sync_frequency) == (96, 10)
    assert config.model.trust_remote_code
    [games] = [note for note in notes(TOSSIM) if note.startswith("num_concurrent_games")]
    assert games == (
        "num_concurrent_games, active_seats_per_game: nothing to set (of the game: args of an environment with type: "
        "turns and name: tossim)"
    )


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("enable_verbosity_penalty: true", "must be 0 (subtract it in a reward function)"),
        ("verbosity_penalty: 0.1", "must be 0 (subtract it in a reward function)"),
        ("const_baseline: 1", "must be 0 (advantages are relative to the group)"),
        ("dtype: float16", "must be 'bfloat16' (policy.compute_dtype)"),
    ],
)
def test_settings_of_tossim_that_change_the_training_are_rejected(line, error):
    assert error in config_error(line)


TRL_SCRIPT = """\
model_name_or_path: a
dataset_name: rows.jsonl
dataset_train_split: train
reward_funcs: [my_rewards.right, accuracy_reward]
reward_weights: [1.0, 0.5]
"""


def test_the_names_of_trls_own_script_make_a_dataset_environment():
    [source] = load(TRL_SCRIPT, alone=True).environments
    assert (source.type, source.name, source.split) == ("dataset", "rows.jsonl", "train")
    assert [(reward.name, reward.weight) for reward in source.rewards] == [
        ("my_rewards:right", 1.0),
        ("trl.rewards:accuracy_reward", 0.5),
    ]


def test_reward_funcs_know_the_names_of_trl_and_a_file_is_no_module():
    names = ["get_soft_overlong_punishment", "my_rewards.py"]
    [source] = load(f"model: a\ndataset_name: d\nreward_funcs: {names}", alone=True).environments
    assert [reward.name for reward in source.rewards] == ["trl.rewards:get_soft_overlong_punishment", "my_rewards.py"]


def test_reward_funcs_accept_a_name_with_arguments():
    entry = "{name: my_rewards.py:Length, args: {target: 9}}"
    text = f"model: a\ndataset_name: d\nreward_funcs: [m.f, {entry}]\nreward_weights: [1, 0.5]"
    [source] = load(text, alone=True).environments
    plain, length = source.rewards
    assert (plain.name, plain.args, plain.weight) == ("m:f", None, 1)
    assert (length.name, length.args, length.weight) == ("my_rewards.py:Length", {"target": 9}, 0.5)


@pytest.mark.parametrize(
    ("text", "words", "model"),
    [
        ("model: org/a", [], {"name": "org/a"}),
        ("model: org/a", ["--model.revision", "v1"], {"name": "org/a", "revision": "v1"}),
        ("model: org/a\nmodel_revision: v1", [], {"name": "org/a", "revision": "v1"}),
        ("{model: {name: a, revision: v1}}", ["--model", "b"], {"name": "b", "revision": "v1"}),
        ("{model: {name: a, revision: v1}}", ["--model", "{name: b}"], {"name": "b"}),
    ],
)
def test_a_model_given_as_text_is_its_name(text, words, model):
    assert load(text, *words, alone=True).model.model_dump(exclude_unset=True) == model


def test_keys_of_free_form_sections_keep_their_hyphens():
    assert load("", "--environments.0.args.a-b", "1").environments[0].args == {"a-b": 1}


@pytest.mark.parametrize(
    "name",
    [
        "beta",
        "delta",
        "epsilon",
        "epsilon_high",
        "generation_batch_size",
        "lr_scheduler_type",
        "min_p",
        "num_train_epochs",
        "report_to",
        "reward_weights",
        "vllm_importance_sampling_mode",
    ],
)
def test_null_for_an_old_name_sets_nothing(name):
    assert load(f"{name}: null") == load()


def test_names_that_trls_scripts_use_are_translated_or_accepted():
    names = """
    model_name_or_path dtype torch_dtype attn_implementation use_peft lora_r lora_alpha dataset_name output_dir
    learning_rate bf16 gradient_checkpointing gradient_checkpointing_kwargs logging_steps save_strategy save_steps
    per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps report_to use_vllm vllm_mode
    vllm_gpu_memory_utilization log_completions seed run_name push_to_hub warmup_ratio weight_decay max_grad_norm
    """
    assert set(names.split()) - set(ALIASES) - set(Config.model_fields) == set()


@pytest.mark.parametrize("name", ["load_in_8bit", "sync_ref_model", "entropy_coef"])
def test_a_name_without_a_counterpart_may_be_off(name):
    assert load(f"{name}: 0") == load()
    assert config_error(f"{name}: 1").startswith(f"{name}=1: not supported; ")


def test_translated_names_are_reported_in_a_note():
    assert notes("learning_rate: 1e-5\nmax_iterations: 3") == [
        "translated names: max_iterations -> training_steps, learning_rate -> policy.lr"
    ]


def test_a_translated_value_is_reported_with_what_it_became():
    assert notes("loss_type: grpo\nimportance_sampling_level: sequence\noptim: adamw_torch") == [
        "loss_type: translated to loss.type='gspo'",
        "optim: translated to policy.optimizer.type='adamw'",
        "importance_sampling_level: nothing to set (part of loss_type)",
    ]


def test_an_old_name_without_effect_is_reported_with_the_reason():
    assert notes("logging_steps: 5") == ["logging_steps: nothing to set (no counterpart is needed here)"]


def test_no_old_name_hides_a_setting():
    settings = {".".join(map(str, path)) for path, _ in setting_names(Config)}
    assert not settings & set(ALIASES)
    assert not {name.partition(".")[0] for name in ALIASES} & set(Config.model_fields)


def test_every_old_name_leads_to_a_setting_that_exists():
    settings = {".".join(map(str, path)) for path, _ in setting_names(Config)}
    for old, alias in ALIASES.items():
        for value in ("full_shard", "token", "cosine", "adafactor", "group", "token_mask", "wandb", True, False, 8):
            try:
                targets = alias.translate(old.split(".")[-1], value, lambda name: None)
            except ValueError:
                continue
            assert all(name in settings or name.startswith("engine.args.") for name in targets), old


def test_reading_settings_imports_no_heavy_library():
    code = (
        "import sys, colocated_grpo.settings.config_file, colocated_grpo.settings.inputs\n"
        "print(sorted({'torch', 'vllm', 'transformers', 'huggingface_hub', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]"


def test_a_config_with_our_own_names_reads_no_table_of_another_trainers_names(tmp_path):
    (tmp_path / "own.yaml").write_text("model: {name: some/model}\nenvironments: [{name: sorting}]\n")
    code = (
        "import sys\n"
        "from colocated_grpo.settings.config_file import load_config\n"
        "load_config(sys.argv[1], ['--policy.lr', '2e-6', '--policy.lora.target_modules', '[a, b]'])\n"
        "print([name for name in sys.modules if name.startswith('colocated_grpo.settings.names')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "own.yaml"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert result.stdout.strip() == "[]"
