"""Settings that do not load: one error line each, with key, value, rule and location."""

from __future__ import annotations

import pytest

from colocated_grpo.settings.config_file import load_config
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.rules import check_world
from tests.support.config_text import config_error, load, notes


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("policy: {lr: -1}", "policy.lr=-1: must be greater than 0 (line 3 of x.yaml)"),
        ("policy: {lr: fast}", "policy.lr='fast': must be a number (line 3 of x.yaml)"),
        ("policy: {lr: .inf}", "policy.lr=inf: must be a finite number (line 3 of x.yaml)"),
        ("policy: {lr: .nan}", "policy.lr=nan: must be a finite number (line 3 of x.yaml)"),
        ("training_steps: 1.5", "training_steps=1.5: must be a whole number (line 3 of x.yaml)"),
        ("training_steps: true", "training_steps=true: must be a number (line 3 of x.yaml)"),
        ("policy:\n  lr: true", "policy.lr=true: must be a number (line 4 of x.yaml)"),
        ("engine: {sleep: maybe}", "engine.sleep='maybe': must be true or false (line 3 of x.yaml)"),
        ("run_name: 5", "run_name=5: must be text; put quotes around it (line 3 of x.yaml)"),
        ("rollout: {stop: x}", "rollout.stop='x': must be a list (line 3 of x.yaml)"),
        ("run_name: [a]", "run_name=['a']: must be text (line 3 of x.yaml)"),
        ("rollout: 5", "rollout=5: must be a mapping of settings (line 3 of x.yaml)"),
        ("rollout: {group_size: 1}", "rollout.group_size=1: must be at least 2 (line 3 of x.yaml)"),
        ("rollout: {group_size: 10001}", "rollout.group_size=10001: must be at most 10000 (line 3 of x.yaml)"),
        (
            "rollout: {prompts_per_step: 100001}",
            "rollout.prompts_per_step=100001: must be at most 100000 (line 3 of x.yaml)",
        ),
        ("rollout: {top_p: 1.5}", "rollout.top_p=1.5: must be at most 1 (line 3 of x.yaml)"),
        ("rollout: {temperature: 0.005}", "rollout.temperature=0.005: must be at least 0.01 (line 3 of x.yaml)"),
        ("seed: -1", "seed=-1: must be at least 0 (line 3 of x.yaml)"),
        ("seed: 4294967296", "seed=4294967296: must be less than 4294967296 (line 3 of x.yaml)"),
        (
            "policy: {schedule: cosin}",
            "policy.schedule='cosin': must be 'constant', 'cosine' or 'linear' (line 3 of x.yaml)",
        ),
        (
            "loss: {type: grppo}",
            "loss.type='grppo': must be one of grpo, dr_grpo, dapo, bnpo, cispo, gspo (line 3 of x.yaml)",
        ),
        (
            "loss: {type: distill}",
            "loss.type='distill': must be one of grpo, dr_grpo, dapo, bnpo, cispo, gspo; "
            "for distillation, name the teacher in loss.kl.model: docs/guides/distillation.md (line 3 of x.yaml)",
        ),
        *(
            (
                f"policy: {{warmup_steps: {value}}}",
                f"policy.warmup_steps={value}: must be a whole number of steps, or a fraction of the run from 0 to 1 "
                "(line 3 of x.yaml)",
            )
            for value in ("-0.5", "1.5", "-1", "'much'")
        ),
        ("policy: {learning_rte: 1}", "policy.learning_rte: unknown key; did you mean policy.lr? (line 3 of x.yaml)"),
        (
            "max_completion_tokens: 9",
            "max_completion_tokens: unknown key; did you mean rollout.max_completion_tokens? (line 3 of x.yaml)",
        ),
        (
            "system_prompt: Think.",
            "system_prompt: unknown key; did you mean environments.0.system_prompt? (line 3 of x.yaml)",
        ),
        (
            "evaluation: {sets: [{name: a, source: x.jsonl, rewards: [{type: reward_model, name: org/model}]}]}",
            "evaluation.sets.0.source.rewards.0.type: unknown key; valid in evaluation.sets.0.source.rewards.0: name, "
            "args, run_in, relative, weight (line 3 of x.yaml)",
        ),
        (
            "loss: {type: cispo, clip_low: 0.1}",
            "loss.clip_low: unknown key; valid only for type grpo, dr_grpo, dapo, bnpo, gspo (line 3 of x.yaml)",
        ),
        ("policy:\n  lr: 1\n  lr: 2", "x.yaml:5: policy.lr: given twice"),
        ("policy: {lr: 1", "x.yaml:3: not valid YAML: expected ',' or '}', but got '<stream end>'"),
        ("policy:\n\tlr: 1", "x.yaml:4: not valid YAML: a tab; YAML is indented with spaces only"),
        (
            "model_name: b",
            "model_name='b': the same setting as model.name in line 1 of x.yaml; remove one of them (line 3 of x.yaml)",
        ),
        (
            "fsdp_config: {sharding_strategy: NO_SHARD}",
            "fsdp_config.sharding_strategy='NO_SHARD': must be one of 'full_shard', 'hybrid_shard' (policy.replicate) "
            "(line 3 of x.yaml)",
        ),
        (
            "generation_batch_size: 60",
            "generation_batch_size=60: counts completions, so it must be a multiple of rollout.group_size=8 (line 3 of "
            "x.yaml)",
        ),
        (
            "k_per_prompt: 4\nbatch_size: 61",
            "batch_size=61: counts completions, so it must be a multiple of rollout.group_size=4 (line 4 of x.yaml)",
        ),
        (
            "gradient_accumulation_steps: 4",
            "gradient_accumulation_steps=4: not supported; set generation_batch_size to per_device_train_batch_size * "
            "gradient_accumulation_steps * GPUs; batch.max_tokens_per_micro_batch sizes the micro-batches "
            "(line 3 of x.yaml)",
        ),
        (
            "loss: {correction: {floor: 0.5}}",
            "loss.correction: floor=0.5: only mode: mask has a lower bound (line 3 of x.yaml)",
        ),
        (
            "loss: {type: grpo, dual_clip: 1.1}",
            "loss: dual_clip=1.1: must be greater than 1 + clip_high=1.2 (line 3 of x.yaml)",
        ),
        (
            "gradient_acumulation_steps: 4",
            "gradient_acumulation_steps: unknown key; did you mean gradient_accumulation_steps? (line 3 of x.yaml)",
        ),
        (
            "num_train_epochs: 3\nmax_steps: -1",
            "max_steps=-1: TRL uses num_train_epochs then; set training_steps: rows * epochs / "
            "rollout.prompts_per_step (line 4 of x.yaml)",
        ),
        (
            "num_train_epochs: 3",
            "num_train_epochs=3: not supported; set training_steps: rows * epochs / rollout.prompts_per_step "
            "(line 3 of x.yaml)",
        ),
        (
            "environments.0.name: reversal",
            "environments.0.name: unknown key; dotted names work on the command line only; in a file write "
            "environments: [{name: ...}] (line 3 of x.yaml)",
        ),
        (
            "policy.lr: 1",
            "policy.lr: unknown key; dotted names work on the command line only; in a file write policy: {lr: ...} "
            "(line 3 of x.yaml)",
        ),
        ("lora_rank: 8", "lora_rank: unknown key; did you mean policy.lora.rank? (line 3 of x.yaml)"),
        ("policy: {lora_rank: 8}", "policy.lora_rank: unknown key; did you mean policy.lora.rank? (line 3 of x.yaml)"),
        ("eval_every: 5", "eval_every: unknown key; did you mean evaluation.every? (line 3 of x.yaml)"),
        ("steps: 5", "steps: unknown key; did you mean training_steps? (line 3 of x.yaml)"),
        ("dataset: a.jsonl", "dataset: unknown key; did you mean dataset_name? (line 3 of x.yaml)"),
        ("grpo_samples: 4", "grpo_samples: unknown key; did you mean rollout.group_size? (line 3 of x.yaml)"),
        ("num_epochs: 4", "num_epochs: unknown key; did you mean training_steps? (line 3 of x.yaml)"),
        (
            "policy: {lora: {targets: [q]}}",
            "policy.lora.targets: unknown key; valid in policy.lora: rank, alpha, rslora, target_modules, "
            "exclude_modules, layers, dropout, init, base_dtype, base_on_host (line 3 of x.yaml)",
        ),
        ("use_vlm: true", "use_vlm: unknown key; did you mean use_vllm? (line 3 of x.yaml)"),
        (
            "reward_weights: [1.0, 0.5]",
            "reward_weights=[1.0, 0.5]: needs reward_funcs; or write rewards: [{name: ..., weight: ...}] in the "
            "dataset environment (line 3 of x.yaml)",
        ),
        (
            "save_total_limit: null",
            "save_total_limit=null: TRL keeps every checkpoint then; set the number to keep (checkpoint.keep_last) "
            "(line 3 of x.yaml)",
        ),
        (
            "policy: {lora: {target_modules: 5}}",
            "policy.lora.target_modules=5: must be a list or text; put quotes around it (line 3 of x.yaml)",
        ),
        (
            "policy: {lora: {exclude_modules: {a: b}}}",
            "policy.lora.exclude_modules={'a': 'b'}: must be a list or text (line 3 of x.yaml)",
        ),
        (
            "policy: {lora: {target_modules: [q_proj, 1]}}",
            "policy.lora.target_modules.1=1: must be text; put quotes around it (line 3 of x.yaml)",
        ),
        (
            "batch: {max_tokens_per_micro_batch: x}",
            "batch.max_tokens_per_micro_batch='x': must be 'auto' or a whole number (line 3 of x.yaml)",
        ),
        (
            "environments:\n- name: sorting\n  type: x",
            "x.yaml:3: environments: given twice",
        ),
        (
            "loss:\n  clip_low: 0.1\n  type: x",
            "loss.type='x': must be one of grpo, dr_grpo, dapo, bnpo, cispo, gspo (line 5 of x.yaml)",
        ),
        (
            "policy: {train_layers: 31-20}",
            "policy.train_layers='31-20': '31-20' is no range of blocks; write 20-31 or 0-3,28-31 (line 3 of x.yaml)",
        ),
        ("policy: {train_layers: [3, -1]}", "policy.train_layers.0=-1: must be at least 0 (line 3 of x.yaml)"),
        ("policy: {lora: {layers: []}}", "policy.lora.layers=[]: needs at least 1 entry (line 3 of x.yaml)"),
        (
            "policy: {lora: {dropout: 0.05}}",
            "policy.lora.dropout=0.05: must be 0: the engine samples without dropout, so training with it would not be "
            "on-policy (line 3 of x.yaml)",
        ),
        ("policy: {lora: true}", "policy.lora=true: must be a mapping of settings (line 3 of x.yaml)"),
        ("vllm_config: 3", "vllm_config=3: must be a mapping of settings"),
        ("learning_rate: fast", "policy.lr='fast': must be a number (line 3 of x.yaml, as learning_rate)"),
    ],
)
def test_an_invalid_line_of_the_file_is_reported_with_value_and_rule(text, line):
    assert config_error(text) == line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "x.yaml: empty; at least model.name is required"),
        ("- a\n- b", "x.yaml: must be a mapping of settings, not a list"),
        ("environments: [{name: sorting}]", "model: required, but not given"),
        ("modle: a\nenvironments: [{name: sorting}]", "modle: unknown key; did you mean model? (line 1 of x.yaml)"),
        (
            "model: a\nenvironments: [{name: d, type: dataset, rewards: [{nam: gsm8k}]}]",
            "environments.0.rewards.0.nam: unknown key; did you mean environments.0.rewards.0.name? (line 2 of x.yaml)",
        ),
        ("model: 3", "model=3: must be a name, or a mapping of settings (line 1 of x.yaml)"),
        ("model: {}\nenvironments: [{name: sorting}]", "model.name: required, but not given (line 1 of x.yaml)"),
        ("model: {name: a}\nenvironments: []", "environments=[]: needs at least 1 entry (line 2 of x.yaml)"),
        (
            "model: {name: a}\nenvironments: [{type: dataset, name: d}]",
            "environments.0.rewards: required, but not given (line 2 of x.yaml)",
        ),
        (
            "model: {name: a}\nenvironments: [{name: d, rewards: [gsm8k]}]",
            "environments.0.rewards: unknown key; valid only for type dataset (line 2 of x.yaml)",
        ),
        ("[" * 5000, "x.yaml: nested too deeply"),
        ("model: a\nseed: " + "9" * 5000, "x.yaml:2: not valid YAML: a number of 5000 digits"),
    ],
)
def test_an_invalid_file_is_a_one_line_error(text, line):
    assert config_error(text, alone=True) == line


def test_the_sections_of_a_prime_rl_file_are_not_called_those_of_verl():
    error = config_error(
        "max_steps: 20\ntrainer: {optim: {lr: 3e-6}}\norchestrator: {batch_size: 128}\ninference: {}\n"
    )
    assert error.splitlines() == [
        f"{name}: a section of prime-rl; docs/settings.md lists the settings to use (line {line} of x.yaml)"
        for name, line in (("trainer", 4), ("orchestrator", 5), ("inference", 6))
    ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--policy.lr", "-1"], "policy.lr=-1: must be greater than 0 (command line)"),
        (
            ["--seed", "9" * 5000],
            f"seed='{'9' * 76}...: Unable to parse input string as an integer, exceeded maximum size (command line)",
        ),
        (["--seed", "[" * 5000], f"seed='{'[' * 76}...: must be a whole number (command line)"),
        (["--policy.lr"], "--policy.lr: needs a value, for example --policy.lr VALUE or --policy.lr=VALUE"),
        (
            ["--policy.lr", "--seed", "1"],
            "--policy.lr: needs a value, for example --policy.lr VALUE or --policy.lr=VALUE",
        ),
        (["policy.lr", "1"], "'policy.lr': expected --section.key VALUE"),
        (
            ["data.train_batch_size=8"],
            "'data.train_batch_size=8': expected --section.key VALUE; for overrides of Hydra, such as verl's: "
            "docs/guides/from_verl.md",
        ),
        (["--policy..lr", "1"], "'--policy..lr': expected --section.key VALUE"),
        (["--model.name.x", "1"], "model.name.x: model.name is a value, not a section"),
        (
            ["--environments.name", "x"],
            "environments.name: environments is a list; name an entry, as in environments.0",
        ),
        (["--environments.7.name", "x"], "environments.7.name: the next new entry of environments is environments.1"),
        (
            ["--learning_rate", "1", "--policy.lr", "1"],
            "learning_rate=1: the same setting as policy.lr; remove one of them (command line)",
        ),
        (
            ["--save_strategy", "epoch"],
            "save_strategy='epoch': must be one of 'steps', 'no', false; set save_steps (command line)",
        ),
        (["--policy.learning_rate", "1"], "policy.learning_rate: unknown key; did you mean policy.lr? (command line)"),
        (  # the most similar name of another section is `batch`
            ["--model.path", "x"],
            "model.path: unknown key; valid in model: name, revision, trust_remote_code, tokenizer, chat_template, "
            "chat_template_kwargs (command line)",
        ),
    ],
)
def test_an_invalid_override_is_reported_with_value_and_rule(words, line):
    assert config_error("", *words) == line


def test_a_broken_file_is_named_with_its_folder(tmp_path):
    (tmp_path / "config.yaml").write_text("policy: {lr: 1")
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/config.yaml:1: not valid YAML"):
        load_config(tmp_path / "config.yaml")


def test_a_toml_file_is_not_read_as_yaml(tmp_path):
    (tmp_path / "x.toml").write_text('[model]\nname = "x"\n')
    with pytest.raises(ConfigError, match=r"^config='.*x.toml': TOML; a config is YAML, for example model: "):
        load_config(tmp_path / "x.toml")


def test_a_missing_file_is_a_one_line_error(tmp_path):
    with pytest.raises(ConfigError, match=r"^config='.*nope.yaml': no such file$"):
        load_config(tmp_path / "nope.yaml")


def test_a_shipped_file_is_suggested_for_a_wrong_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "training_configs").mkdir()
    (tmp_path / "training_configs/large.yaml").touch()
    with pytest.raises(ConfigError, match=r"no such file; did you mean training_configs/large.yaml\?$"):
        load_config("configs/large.yaml")


def test_a_folder_is_rejected_as_a_config_file(tmp_path):
    with pytest.raises(ConfigError, match=r"^config='.*': cannot be read \(Is a directory\)$"):
        load_config(tmp_path)


def test_a_binary_file_is_a_one_line_error(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 0\)$"):
        load_config(path)


def test_reward_weights_need_one_number_per_reward():
    text = "model: {name: a}\ndataset_name: d\nreward_funcs: [m.f, m.g]\nreward_weights: [1.0]"
    line = "reward_weights=[1.0]: needs one number for each of the 2 rewards (line 4 of x.yaml)"
    assert config_error(text, alone=True) == line


def test_a_reward_with_two_weights_is_rejected():
    text = "model: a\ndataset_name: d\nreward_funcs: [{name: m.f, weight: 2}]\nreward_weights: [1.0]"
    line = "reward_weights=[1.0]: one of the rewards has a weight of its own; remove one of them (line 4 of x.yaml)"
    assert config_error(text, alone=True) == line


def test_a_misspelt_key_hides_the_required_one_of_its_own_entry_only():
    first, second = config_error("model: a\nenvironments: [{type: task}, {nam: sorting}]", alone=True).splitlines()
    assert first.startswith("environments.0.name: required")
    assert second.startswith("environments.1.nam: unknown key; did you mean environments.1.name?")


def test_several_mistakes_give_one_line_each():
    assert len(config_error("policy: {lr: -1}\nseed: x\nfoo: 1").splitlines()) == 3


def test_a_yaml_document_of_exponential_size_is_read_quickly():
    levels = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 25))
    assert "unknown key" in config_error("a0: &a0 [x]\n" + levels)


# Rules between settings


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "batch: {max_tokens_per_micro_batch: 2048}\nrollout: {max_completion_tokens: 2048}",
            "batch.max_tokens_per_micro_batch=2048: must be at least rollout.max_prompt_tokens + "
            "rollout.max_completion_tokens=3072, the longest sequence",
        ),
        (
            "run_name: sweep/" + 256 * "x",
            f"run_name='sweep/{34 * 'x'}'...: each part of the path must be at most 255 bytes of UTF-8, without NUL",
        ),
        (
            "run_name: a/../../b",
            "run_name='a/../../b': must be below output_dir='runs', so no leading '/' and no '..'",
        ),
        (
            "run_name: /b",
            "run_name='/b': must be below output_dir='runs', so no leading '/' and no '..'",
        ),
        (
            'output_dir: "a\\0b"',
            "output_dir='a\\x00b': each part of the path must be at most 255 bytes of UTF-8, without NUL",
        ),
        (
            'run_name: "\\udcff"',
            "run_name='\\udcff': each part of the path must be at most 255 bytes of UTF-8, without NUL",
        ),
        (
            "engine: {max_model_len: 1000}",
            "engine.max_model_len=1000: must be at least rollout.max_prompt_tokens + "
            "rollout.max_completion_tokens=2048, or the engine would truncate completions",
        ),
        (
            "batch: {minibatches: 3}",
            "batch.minibatches=3: must divide rollout.prompts_per_step=32, as a minibatch consists of whole groups",
        ),
        (
            "evaluation: {temperature: 0.005}",
            "evaluation.temperature=0.005: must be 0 (greedy) or at least 0.01",
        ),
        (
            "policy: {lr: 1e-6, min_lr: 1e-5}",
            "policy.min_lr=1e-05: must be at most policy.lr=1e-06, the peak of the schedule",
        ),
        (
            "training_steps: 5\npolicy: {warmup_steps: 6}",
            "policy.warmup_steps=6: must be at most the run's 5 optimizer steps, "
            "or the learning rate would never reach policy.lr",
        ),
        (
            "deterministic: true\nsync_frequency: 4\ncheckpoint: {every: 50}",
            "checkpoint.every=50: must be a multiple of sync_frequency=4 with deterministic: true, because a resumed "
            "run begins with a weight sync",
        ),
        (
            "policy: {lora: {}, train_layers: 20-23}",
            "policy.train_layers=20-23: must be null with policy.lora, which freezes all weights of the model; set "
            "policy.lora.layers for the blocks that get an adapter",
        ),
        (
            "policy: {lora: {}, cpu_offload: true}",
            "policy.cpu_offload=true: must be false with policy.lora, whose forward pass reads the merged weights on "
            "the device; see policy.lora.base_on_host",
        ),
        (
            "policy: {lora: {base_dtype: nf4, base_on_host: true}}",
            "policy.lora.base_on_host=true: must be false with base_dtype: nf4, as each pass reads the base",
        ),
        (
            "policy: {lora: {base_dtype: nf4}}\nweights: shared",
            "policy.lora.base_dtype=nf4: must be auto with weights: shared, whose weights have the engine's type",
        ),
        (
            "policy: {lora: {}, load_balancing: 0.001}",
            "policy.load_balancing=0.001: must be 0 with policy.lora, which freezes routers",
        ),
        (
            "checkpoint: {export_merged: true}",
            "checkpoint.export_merged=true: must be false without policy.lora, as final_model/ and step_N/ are whole "
            "models then",
        ),
        (
            "engine: {args: {max_num_seqs: 3}}",
            "engine.args.max_num_seqs: has a setting of its own; write engine.max_num_seqs",
        ),
        (
            "engine: {args: {speculative_config: {method: ngram}}}",
            "engine.args.speculative_config: not supported: on CPUs, vLLM samples from a wrong distribution",
        ),
        ("engine: {args: {model: other}}", "engine.args.model: is the run's own model; write model.name"),
        (
            "engine: {args: {logprobs_mode: raw_logprobs}}",
            "engine.args.logprobs_mode: must be unset: training needs log-probabilities of the distribution that is "
            "sampled",
        ),
        (
            "engine: {args: {data_parallel_size: 2}}",
            "engine.args.data_parallel_size: must be unset: each rank has an engine; --gpus or --nproc starts more "
            "ranks",
        ),
        ("rollout: {stop: ['END', '']}", "rollout.stop: '' would end every completion; leave it out"),
    ],
)
def test_settings_that_contradict_each_other_are_rejected(text, line):
    assert config_error(text) == line


def test_a_dataset_needs_a_reward_that_counts_unless_a_kl_penalty_trains():
    for rewards in ("[]", "[{name: gsm8k, weight: 0}]"):
        text = f"model: {{name: a}}\nenvironments: [{{type: dataset, name: d, rewards: {rewards}}}]\n"
        rule = "no reward counts, and loss.kl.coef=0, so nothing would be trained; name a reward"
        assert config_error(text, alone=True) == f"environments.0.rewards: {rule}"
        text += "loss: {kl: {coef: 1, model: teacher}}\n"
        assert not load(text, alone=True).is_rewarded
        rule = "no environment has a reward that counts; name a metric of a set"
        best = "evaluation: {keep_best: held_out/reward, patience: 3}"  # it would never have a value
        assert config_error(text + best, alone=True) == f"evaluation.keep_best=held_out/reward: {rule}"


def test_without_rewards_the_trained_model_cannot_be_its_own_teacher():
    text = "model: {name: a}\nenvironments: [{type: dataset, name: d, rewards: []}]\nloss: {kl: {coef: 1}}\n"
    rule = "is the trained model, and no reward counts, so nothing would change; name a teacher"
    assert config_error(text, alone=True) == f"loss.kl.model=null: {rule}"
    same = text.replace("coef: 1", "coef: 1, model: ./a")
    assert config_error(same, alone=True) == f"loss.kl.model=./a: {rule}"
    assert not load(same.replace("name: a}", "name: a, revision: early}"), alone=True).is_rewarded


def test_trls_name_of_a_teacher_leads_to_the_setting():
    advice = "not supported; name the teacher in loss.kl.model: docs/guides/distillation.md"
    assert advice in config_error("teacher_model_name_or_path: a")


def test_an_invalid_reward_is_reported_with_its_index():
    text = "model: {name: a}\nenvironments:\n- {type: dataset, name: d, rewards: [gsm8k, {name: b, weight: big}]}"
    line = "environments.0.rewards.1.weight='big': must be a number (line 3 of x.yaml)"
    assert config_error(text, alone=True) == line


@pytest.mark.parametrize(
    "text",
    [
        "deterministic: true\nsync_frequency: 4\ncheckpoint: {every: 8}",
        "sync_frequency: 4\ncheckpoint: {every: 50}",
        "training_steps: 5\nbatch: {epochs: 2}\npolicy: {warmup_steps: 10}",
        "batch: {max_tokens_per_micro_batch: 2048}",
        "engine: {max_model_len: 2048}",
        "seed: 0",
        "policy: {lora: {layers: 20-23, base_on_host: true}}\ncheckpoint: {export_merged: true}",
        "policy: {train_layers: 20-23, cpu_offload: true}",
    ],
)
def test_settings_at_the_edge_of_a_rule_are_allowed(text):
    assert load(text).training_steps > 0


@pytest.mark.parametrize(
    ("text", "ranks", "line"),
    [
        (
            "engine: {tensor_parallel_size: 2}",
            3,
            "engine.tensor_parallel_size=2: must divide the number of ranks, 3",
        ),
        (
            "rollout: {prompts_per_step: 3}",
            4,
            "rollout.prompts_per_step=3: must be at least the number of engines, 4",
        ),
        (
            "deterministic: true\nrollout: {prompts_per_step: 6}",
            4,
            "rollout.prompts_per_step=6: must be a multiple of the number of engines, 4, with deterministic: true",
        ),
    ],
)
def test_settings_that_do_not_fit_the_number_of_ranks_are_rejected(text, ranks, line):
    with pytest.raises(ConfigError) as caught:
        check_world(load(text), ranks)
    assert str(caught.value) == line


@pytest.mark.parametrize(
    "text",
    [
        "rollout: {prompts_per_step: 6}",
        "rollout: {prompts_per_step: 1, generation: replicated}",
        "engine: {tensor_parallel_size: 4}\nrollout: {prompts_per_step: 1}",
    ],
)
def test_prompts_need_not_divide_evenly_when_ranks_share_a_counter(text):
    assert check_world(load(text), 4) is None  # raises otherwise


def test_renormalised_sampling_is_allowed_with_a_note():
    assert notes("rollout: {top_p: 0.9, top_k: 5}")[0].startswith("rollout.top_p=0.9, rollout.top_k=5: the engine's")


@pytest.mark.parametrize(
    ("setting", "switch", "why"),
    [
        ("policy.min_lr=1e-09", "policy.schedule=cosine", "policy.schedule is constant"),
        ("tracking.wandb_project=mine", "tracking.wandb=offline", "tracking.wandb is off"),
    ],
)
def test_a_setting_without_effect_is_noted(setting, switch, why):
    assert notes("", f"--{setting}") == [f"{setting}: no effect, because {why}"]
    assert notes("", f"--{setting}", f"--{switch}") == []


def test_a_key_that_only_resembles_an_old_name_gets_no_suggestion():
    assert config_error("dataset_num_proc: 4").startswith(
        "dataset_num_proc: unknown key; valid at the top level: model, "
    )
