"""A script of TRL with another import: what its trainer is given, calls and reads afterwards."""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, EarlyStoppingCallback, TrainerCallback, trainer_callback

from colocated_grpo import ConfigError, RunError, Trainer
from colocated_grpo.api.ported import FollowingCallback, TrainedModel, as_in_trl
from colocated_grpo.assembly.engines import engine_spec
from colocated_grpo.callbacks import Callbacks
from colocated_grpo.policy.model_files import read_tokenizer
from colocated_grpo.settings.names.translation import ALIASES
from colocated_grpo.settings.schema import Config
from tests.support.programs import ported
from tests.support.ranks import Ranks, single_rank_world
from tests.support.training_runs import tiny_model

ROWS = [{"prompt": f"{number} + 1 = ", "answer": str(number + 1)} for number in range(50)]
TEMPLATE = "{% for message in messages %}{{ message.content }}!{% endfor %}"
TIMEOUT = 300.0


def right(completions, answer, **columns):
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


def trainer(model="some/model", **arguments) -> Trainer:
    return Trainer(model, right, train_dataset=ROWS, **arguments)


def grpo_config(name="GRPOConfig", **settings):
    return getattr(pytest.importorskip("trl"), name)(use_cpu=True, bf16=False, **settings)


def in_batches(**settings):
    config = trainer(args=grpo_config(num_generations=4, max_steps=3, **settings)).config
    return config.rollout.prompts_per_step, config.batch.minibatches


# What the trainer is given


def test_arguments_come_in_the_order_of_trls_trainer():
    config = Trainer("some/model", right, {"learning_rate": 2e-6}, ROWS, ROWS[:3]).config
    assert (config.policy.lr, config.environments[0].given, config.environments[0].given_held_out) == (
        2e-6,
        ROWS,
        ROWS[:3],
    )


def test_what_a_script_leaves_unset_is_accepted():
    assert trainer(args=grpo_config(resume_from_checkpoint="true", max_steps=3)).config.training_steps == 3
    unset = {
        "tools": [],
        "optimizers": (None, None),
        "reward_processing_classes": [None, None],
        "quantization_config": None,
    }
    assert trainer(callbacks=None, **unset).config == trainer().config


def test_weights_of_rewards_may_come_with_the_default_epochs():
    config = Trainer("some/model", [right, "math_verify"], grpo_config(reward_weights=[1.0, 0.5]), ROWS).config
    assert [reward.weight for reward in config.environments[0].rewards] == [1.0, 0.5]


@pytest.mark.parametrize("name", ["GRPOConfig", "RLOOConfig"])
def test_every_field_of_trl_is_translated_noted_or_rejected_with_a_reason(name):
    known = {*ALIASES, *(alias.split(".")[0] for alias in ALIASES), *Config.model_fields}
    assert {field.name for field in fields(getattr(pytest.importorskip("trl"), name))} <= known


def test_a_bound_of_the_correction_belongs_to_its_mode():
    def correction(**settings):
        found = trainer(args=grpo_config(max_steps=3, **settings)).config.loss.correction
        return found.level, found.mode, found.floor, found.cap

    assert correction(vllm_importance_sampling_clip_min=0.5) == ("sequence", "mask", 0.5, 3.0)
    assert correction(vllm_importance_sampling_clip_max=2.5) == ("sequence", "mask", 0.0, 2.5)
    assert correction(vllm_importance_sampling_cap=2.5) == ("sequence", "mask", 0.0, 2.5)
    assert correction(vllm_importance_sampling_clip_max=None) == ("sequence", "mask", 0.0, 1e30)
    assert correction(vllm_importance_sampling_correction=False)[1] == "off"
    assert trainer().config.loss.correction.mode == "truncate"


def test_the_default_bound_of_an_older_trl_stays():
    @dataclass
    class GRPOConfig:
        max_steps: int = 3
        steps_per_generation: int = 1
        gradient_accumulation_steps: int = 1
        generation_batch_size: int = 8
        push_to_hub: bool = False
        vllm_importance_sampling_correction: bool = True
        vllm_importance_sampling_mode: str = "token_truncate"
        vllm_importance_sampling_cap: float = 2.0

    GRPOConfig.__module__ = "trl.trainer.grpo_config"
    correction = trainer(args=GRPOConfig(vllm_importance_sampling_mode="sequence_mask")).config.loss.correction
    assert (correction.level, correction.mode, correction.cap) == ("sequence", "mask", 2.0)


def test_generations_between_two_updates_are_one_batch():
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    assert in_batches(**sizes) == (4, 1)
    assert in_batches(**sizes, steps_per_generation=2) == (4, 1)
    assert in_batches(**sizes, steps_per_generation=8) == (8, 2)
    with pytest.raises(ConfigError, match=r"steps_per_generation=3: .* divisor of gradient_accumulation_steps=4"):
        in_batches(**sizes, steps_per_generation=3)


def test_a_config_of_rloo_trains_with_its_advantages():
    ported = trainer(args=grpo_config("RLOOConfig", max_steps=3))
    config = ported.config
    assert (config.advantage.leave_one_out, config.advantage.scale, config.loss.type) == (True, "none", "dr_grpo")
    assert (config.loss.kl.coef, config.rollout.group_size, config.rollout.prompts_per_step) == (0.05, 2, 4)
    assert any(note.startswith("RLOOConfig: trained with loss.type=dr_grpo") for note in ported._loaded.notes)


def test_a_config_of_another_algorithm_is_one_line():
    gmpo = pytest.importorskip("trl.experimental.gmpo")
    with pytest.raises(ConfigError, match=r"^args: of type GMPOConfig; give TRL's GRPOConfig or RLOOConfig"):
        trainer(args=gmpo.GMPOConfig(use_cpu=True, bf16=False))


def test_fields_that_a_program_adds_to_grpo_config_are_its_own():
    @dataclass
    class Mine(type(grpo_config())):
        benchmark: str = "none"

    config = trainer(args=Mine(use_cpu=True, bf16=False, benchmark="math", learning_rate=3e-6, max_steps=3)).config
    assert config.policy.lr == 3e-6


def test_a_repository_without_push_to_hub_is_for_the_trainers_own_push():
    ported = trainer(args=grpo_config(max_steps=3, hub_model_id="me/mine", hub_private_repo=False))
    assert (ported.config.hub, ported.hub_model_id) == (None, "me/mine")
    pushing = trainer(args=grpo_config(max_steps=3, hub_model_id="me/mine", hub_private_repo=False, push_to_hub=True))
    assert (pushing.config.hub.repo, pushing.config.hub.private) == ("me/mine", False)


def test_fsdp_of_transformers_is_noted():
    fsdp = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2}}
    notes = trainer(args=grpo_config(max_steps=3, **fsdp))._loaded.notes
    assert "fsdp: nothing to set (FSDP2 shards the weights over all ranks; see policy)" in notes


def test_generation_kwargs_are_sampling_settings():
    rollout = trainer(args=grpo_config(max_steps=3, generation_kwargs={"stop": "</a>", "top_k": 5})).config.rollout
    assert (rollout.stop, rollout.top_k) == (["</a>"], 5)
    with pytest.raises(ConfigError, match=r"^generation_kwargs.presence_penalty=0.5: not supported; must be one of"):
        trainer(generation_kwargs={"presence_penalty": 0.5})


def test_a_cosine_may_end_above_zero():
    policy = trainer(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 1e-7}).config.policy
    assert (policy.schedule, policy.min_lr) == ("cosine", 1e-7)
    with pytest.raises(ConfigError, match=r"^lr_scheduler_kwargs.min_lr_rate=0.1: not supported; set policy.min_lr"):
        trainer(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.1})


def test_a_note_says_that_defaults_are_this_trainers():
    note = "fields with GRPOConfig's defaults have this trainer's: docs/guides/from_trl.md#different-defaults"
    for args, expected in ((grpo_config(max_steps=3), 1), ({"max_steps": 3}, 0)):
        assert sum(each.startswith(note) for each in trainer(args=args)._loaded.notes) == expected


def test_a_clip_range_above_one_has_no_lower_bound():
    assert trainer(epsilon=10.0).config.loss.clip_low == 10.0


def test_quantization_in_nf4_is_the_base_of_the_adapter():
    nf4 = SimpleNamespace(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    assert trainer(quantization_config=nf4, peft_config={"r": 4}).config.policy.lora.base_dtype == "nf4"
    with pytest.raises(ConfigError, match=r"^quantization_config: a base of 4 bits is nf4"):
        trainer(quantization_config=SimpleNamespace(load_in_4bit=True, bnb_4bit_quant_type="fp4"))


def test_an_adapter_other_than_lora_is_one_line():
    peft = pytest.importorskip("peft")
    with pytest.raises(ConfigError, match=r"^peft_config: of type IA3Config; must be a LoraConfig"):
        trainer(peft_config=peft.IA3Config())


def test_a_method_that_is_never_called_is_one_line():
    class Mine(Trainer):
        def compute_loss(self, *arguments, **options): ...
        def _compute_loss(self, model, inputs): ...
        def _prepare_inputs(self, inputs): ...

    names = "_compute_loss, _prepare_inputs, compute_loss"
    with pytest.raises(ConfigError, match=rf"^Mine: methods that are never called: {names}$"):
        Mine("some/model", right, train_dataset=ROWS)


def test_an_instance_with_a_name_of_its_own_is_called_by_it():
    class Score:
        __name__ = "how_short"

        def __call__(self, completions, **columns): ...

    [reward] = Trainer("some/model", Score(), train_dataset=ROWS).config.environments[0].rewards
    assert reward.name == f"{__name__}:how_short"


def test_a_model_object_stands_for_the_files_that_it_was_loaded_from():
    model = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.bfloat16)
    ported = trainer(model)
    assert ported.config.model.name == str(tiny_model())
    assert any("the object is not used" in note for note in ported._loaded.notes)


def test_a_model_object_that_its_files_do_not_describe_is_one_line():
    model = AutoModelForCausalLM.from_pretrained(tiny_model())
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    with pytest.raises(ConfigError, match=r"^model: model.norm.weight differs from the files of .*save_pretrained\(\)"):
        trainer(model)
    with pytest.raises(ConfigError, match=r"^model: of type Qwen3ForCausalLM; give its folder or name"):
        trainer(type(model)(model.config.from_dict({**model.config.to_dict(), "_name_or_path": ""})))
    model.config.quantization_config = {}
    with pytest.raises(ConfigError, match=r"^model: quantized; give its name"):
        trainer(model)
    model.peft_config = {}
    with pytest.raises(ConfigError, match=r"^model: of type Qwen3ForCausalLM; give .* an adapter as peft_config"):
        trainer(model)


def test_a_tokenizer_that_equals_the_models_sets_nothing(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model(), padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer(["a", "b c d"], padding=True)
    config = trainer(tiny_model(), processing_class=tokenizer, output_dir=tmp_path / "runs").config
    assert config.model.tokenizer is None
    assert not (tmp_path / "runs").exists()


def test_a_tokenizer_that_differs_is_saved_once_and_used(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    tokenizer.chat_template = TEMPLATE
    first, second = (trainer(tiny_model(), processing_class=tokenizer, output_dir=tmp_path) for _ in range(2))
    assert first.config.model.tokenizer == second.config.model.tokenizer
    assert [folder.name for folder in (tmp_path / "tokenizers").iterdir()] == [first.config.model.tokenizer[-12:]]
    assert read_tokenizer(first.config.model).chat_template == TEMPLATE
    engine = engine_spec(first.config, tiny_model(), 1, torch.device("cpu"))
    assert engine.args == {"tokenizer": first.config.model.tokenizer}


def test_a_stream_is_read_as_far_as_the_run_goes():
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_list(ROWS * 4).to_iterable_dataset()
    arguments = {"max_steps": 3, "rollout": {"prompts_per_step": 8}, "evaluation": {"prompts": 5}}
    config = Trainer("some/model", right, train_dataset=stream, eval_dataset=stream, **arguments).config
    assert len(config.environments[0].given) == 3 * 8 + 64
    assert config.environments[0].given[:50] == ROWS
    assert config.environments[0].given_held_out == ROWS[:5]
    with pytest.raises(ConfigError, match=r"num_train_epochs=2: needs a train_dataset of rows"):
        Trainer("some/model", right, train_dataset=stream, num_train_epochs=2)


def test_rows_with_images_are_one_line():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"prompt": "What is this?", "image": "a path"}])
    with pytest.raises(ConfigError, match=r"^train_dataset: prompts have no images here; remove the column image"):
        Trainer("some/model", right, train_dataset=rows)


@pytest.mark.parametrize("name", ["save_model", "push_to_hub", "evaluate", "model"])
def test_what_needs_a_trained_model_is_one_line_before_there_is_one(name):
    with pytest.raises(RunError, match=rf"^trainer.{name}: needs a run that train\(\) has completed"):
        getattr(trainer(), name)()
    assert trainer().state.log_history == []


def test_what_the_trainer_does_not_have_is_named():
    with pytest.raises(AttributeError, match=r"^trainer.optimizer: not available; docs/guides/python.md#from-a-trl"):
        trainer().optimizer  # noqa: B018
    assert not hasattr(trainer(), "ref_model")


def test_an_epoch_uses_each_training_row_once():
    assert trainer(rollout={"prompts_per_step": 9}).epoch(5) == 1, "5 of the 50 rows are held out"
    assert trainer(rollout={"prompts_per_step": 10}, eval_dataset=ROWS[:3]).epoch(5) == 1
    assert Trainer("some/model", right, train_dataset="rows.jsonl").epoch(5) == 0


def test_a_property_that_fails_shows_its_own_error():
    class Broken(TrainedModel):
        @property
        def model(self) -> None:
            raise AttributeError("its own error")

    with pytest.raises(AttributeError, match=r"^its own error$"):
        _ = Broken().model


# Callbacks of transformers


class Recorder(TrainerCallback):
    """Records every event, and stops the run after its second step."""

    def __init__(self):
        self.events = []

    def on_train_begin(self, args, state, control, **others):
        self.events.append(("begin", args.learning_rate, state.max_steps))

    def on_step_begin(self, args, state, control, **others):
        self.events.append(("step begin", state.global_step))

    def on_step_end(self, args, state, control, processing_class, **others):
        self.events.append(("step end", state.global_step, processing_class))
        control.should_training_stop = state.global_step == 2

    def on_log(self, args, state, control, logs=None, **others):
        self.events.append(("log", state.global_step, logs))
        assert state.log_history[-1] == {**logs, "step": state.global_step, "epoch": state.epoch}
        assert state.epoch == logs["epoch"] == state.global_step / 4

    def on_evaluate(self, args, state, control, metrics, **others):
        self.events.append(("evaluate", state.global_step, metrics["eval_reward"]))

    def on_train_end(self, args, state, control, **others):
        self.events.append(("end", state.global_step))


def followed(folder, callback, **args) -> Callbacks:
    trainer = SimpleNamespace(args=grpo_config(**args), processing_class="a tokenizer", epoch=lambda steps: steps / 4)
    following = FollowingCallback(callback, trainer, trainer_callback)
    return Callbacks([following], 5, folder, single_rank_world(), print, None)


def test_a_callback_of_transformers_sees_the_run_and_ends_it(tmp_path):
    recorder = Recorder()
    calls = followed(tmp_path, recorder, learning_rate=2e-6)
    for step in range(2):
        calls.step_begins(step)
        calls.evaluated(step, {"held_out/reward": 0.25})
        assert not calls.requests().stop
        calls.step_ended(step, {"reward": 0.5, "lr": 1e-6})
    calls.end("finished")
    assert calls.requests().stop
    evaluation = {"held_out/reward": 0.25, "eval_reward": 0.25}
    row = {"reward": 0.5, "lr": 1e-6, "learning_rate": 1e-6}
    assert recorder.events == [
        ("begin", 2e-6, 5),
        *(("step begin", 0), ("evaluate", 0, 0.25), ("log", 0, evaluation | {"epoch": 0.0})),
        *(("step end", 1, "a tokenizer"), ("log", 1, row | {"epoch": 0.25})),
        *(("step begin", 1), ("evaluate", 1, 0.25), ("log", 1, evaluation | {"epoch": 0.25})),
        *(("step end", 2, "a tokenizer"), ("log", 2, row | {"epoch": 0.5})),
        ("end", 2),
    ]


def test_early_stopping_of_transformers_stops_when_the_reward_no_longer_rises(tmp_path):
    settings = {"metric_for_best_model": "eval_reward", "eval_strategy": "steps", "eval_steps": 1}
    calls = followed(tmp_path, EarlyStoppingCallback(early_stopping_patience=2), **settings)
    stopped = []
    for step, reward in enumerate((0.1, 0.3, 0.2, 0.3)):
        calls.step_begins(step)
        calls.evaluated(step, {"held_out/reward": reward})
        stopped.append(calls.requests().stop)
    assert stopped == [False, False, False, True]


def test_early_stopping_of_transformers_without_a_metric_is_one_line():
    with pytest.raises(ConfigError, match=r"^callbacks: EarlyStoppingCallback needs metric_for_best_model,"):
        trainer(callbacks=EarlyStoppingCallback())


def test_what_a_callback_cannot_have_here_is_noted_before_the_run():
    class Curious(TrainerCallback):
        def on_epoch_end(self, args, state, control, model=None, **others): ...

        def on_step_end(self, args, state, control, processing_class=None, **others): ...

    notes = trainer(callbacks=Curious)._loaded.notes
    curious = trainer(callbacks=[Curious, Recorder])
    assert (type(curious.pop_callback(Curious)), curious.pop_callback(Curious)) == (Curious, None)
    assert "callback Curious: here these are never called, or None: on_epoch_end, model" in notes


def test_a_request_that_has_no_effect_is_noted(tmp_path, capsys):
    class Saver(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            control.should_save = True

    followed(tmp_path, Saver()).step_ended(0, {})
    assert "on_step_end: should_save: no effect; see checkpoint.every" in capsys.readouterr().out


def test_metrics_have_the_names_of_trl_too():
    ours = {"held_out/reward/right": 1.0, "reward_std/right": 2.0, "truncated": 3.0, "clip_fraction/low": 4.0}
    ours |= {"held_out/reward/right_stderr": 5.0, "eval/easy/mean": 6.0, "eval/easy/mean_stderr": 7.0}
    theirs = {"eval_rewards/right/mean": 1.0, "rewards/right/std": 2.0, "completions/clipped_ratio": 3.0}
    theirs |= {"clip_ratio/low_mean": 4.0}
    theirs |= {"eval_rewards/right/mean_stderr": 5.0, "eval_easy_reward": 6.0, "eval_easy_reward_stderr": 7.0}
    assert as_in_trl(ours) == ours | theirs


def test_a_standard_error_keeps_its_ending_in_the_names_of_trl():
    ours = {"held_out/reward/right_stderr": 1.0, "held_out/truncated_stderr": 2.0}
    theirs = {"eval_rewards/right/mean_stderr": 1.0, "eval_completions/clipped_ratio_stderr": 2.0}
    assert as_in_trl(ours) == ours | theirs


# A whole script


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    with Ranks(ported, 1, tiny_model(), tmp_path_factory.mktemp("ported")) as process:
        return process.results(TIMEOUT)[0]


def test_a_script_saves_its_model_where_it_wants(seen):
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= seen["saved"]
    assert seen["template"] == TEMPLATE, "of the processing_class"


def test_a_script_reads_the_history_and_the_last_evaluation(seen):
    assert [row["step"] for row in seen["history"] if "learning_rate" in row] == [1, 2]
    assert all(row["epoch"] == row["step"] * seen["prompts"] / 40 for row in seen["history"])
    assert seen["history"][-1]["eval_reward"] == seen["evaluated"]["eval_reward"]
    assert seen["other_rows"].startswith("trainer.evaluate: returns the run's last evaluation")
    assert seen["steps"] == 2, "a callback has ended the run"
    assert seen["begun"] == [0, 1]


def test_a_script_reads_what_train_returned(seen):
    taken = seen["taken"]
    assert (taken.global_step, taken.training_loss) == (2, taken.metrics["train_loss"])
    assert taken.metrics["train_runtime"] * taken.metrics["train_steps_per_second"] == pytest.approx(2)


def test_a_push_without_a_token_is_a_line(seen):
    [line] = [line for line in seen["printed"] if line.startswith("warning: push_to_hub")]
    assert "no token; set HF_TOKEN to one that may write" in line


def test_a_script_gets_the_trained_model(seen):
    assert seen["trained"] == "Qwen3ForCausalLM"
