"""A script of TRL with another import: what its trainer is given, calls and reads afterwards."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, EarlyStoppingCallback, TrainerCallback, trainer_callback

from colocated_grpo import ConfigError, RunError, Trainer
from colocated_grpo.api.ported import FollowingCallback, as_in_trl
from colocated_grpo.assembly.engines import engine_spec
from colocated_grpo.callbacks import Callbacks
from colocated_grpo.policy.model_files import read_tokenizer
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


def grpo_config(**settings):
    return pytest.importorskip("trl").GRPOConfig(use_cpu=True, bf16=False, **settings)


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
    unset = {"tools": [], "optimizers": (None, None), "reward_processing_classes": [None], "quantization_config": None}
    assert trainer(callbacks=None, **unset).config == trainer().config


def test_weights_of_rewards_may_come_with_the_default_epochs():
    config = Trainer("some/model", [right, "math_verify"], grpo_config(reward_weights=[1.0, 0.5]), ROWS).config
    assert [reward.weight for reward in config.environments[0].rewards] == [1.0, 0.5]


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
    with pytest.raises(ConfigError, match=r"^model: a Qwen3ForCausalLM; give its folder or name"):
        trainer(type(model)(model.config.from_dict({**model.config.to_dict(), "_name_or_path": ""})))
    model.peft_config = {}
    with pytest.raises(ConfigError, match=r"^model: a Qwen3ForCausalLM; give .* an adapter as peft_config"):
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
        assert state.log_history[-1] == {**logs, "step": state.global_step}

    def on_evaluate(self, args, state, control, metrics, **others):
        self.events.append(("evaluate", state.global_step, metrics["eval_reward"]))

    def on_train_end(self, args, state, control, **others):
        self.events.append(("end", state.global_step))


def followed(folder, callback, **args) -> Callbacks:
    trainer = SimpleNamespace(args=grpo_config(**args), processing_class="a tokenizer")
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
        *(("step begin", 0), ("evaluate", 0, 0.25), ("log", 0, evaluation)),
        *(("step end", 1, "a tokenizer"), ("log", 1, row)),
        *(("step begin", 1), ("evaluate", 1, 0.25), ("log", 1, evaluation)),
        *(("step end", 2, "a tokenizer"), ("log", 2, row)),
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


def test_what_a_callback_cannot_have_here_is_noted_before_the_run():
    class Curious(TrainerCallback):
        def on_epoch_end(self, args, state, control, model=None, **others): ...

        def on_step_end(self, args, state, control, processing_class=None, **others): ...

    notes = trainer(callbacks=[Curious])._loaded.notes
    assert "callback Curious: here these are never called, or None: on_epoch_end, model" in notes


def test_a_request_that_has_no_effect_is_noted(tmp_path, capsys):
    class Saver(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            control.should_save = True

    followed(tmp_path, Saver()).step_ended(0, {})
    assert "on_step_end: should_save, should_evaluate: no effect; see checkpoint.every" in capsys.readouterr().out


def test_metrics_have_the_names_of_trl_too():
    ours = {"held_out/reward/right": 1.0, "reward_std/right": 2.0, "truncated": 3.0, "loss": 4.0}
    theirs = {"eval_rewards/right/mean": 1.0, "rewards/right/std": 2.0, "completions/clipped_ratio": 3.0}
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
    assert seen["history"][-1]["eval_reward"] == seen["evaluated"]["eval_reward"]
    assert seen["steps"] == 2, "a callback has ended the run"
    assert seen["begun"] == [0, 1]


def test_a_push_without_a_token_is_a_line(seen):
    [line] = [line for line in seen["printed"] if line.startswith("warning: push_to_hub")]
    assert "no token; set HF_TOKEN to one that may write" in line


def test_a_script_gets_the_trained_model(seen):
    assert seen["trained"] == "Qwen3ForCausalLM"
