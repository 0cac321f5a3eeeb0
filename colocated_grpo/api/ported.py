"""What a script of TRL uses besides `train`: attributes of its trainer, callbacks of transformers, names of metrics."""

import inspect
import os
import shutil
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from colocated_grpo.api.arguments import num_rows
from colocated_grpo.callbacks import RunState
from colocated_grpo.errors import ConfigError, RunError
from colocated_grpo.settings import config_json, inputs
from colocated_grpo.settings.schema import Config, HubConfig
from colocated_grpo.tracking import files
from colocated_grpo.tracking.hub import Hub
from colocated_grpo.types import STDERR

HOOKS = {
    *("compute_loss", "create_optimizer", "create_scheduler", "get_eval_dataloader", "get_train_dataloader", "log"),
    *("prediction_step", "training_step", "_calculate_rewards", "_generate", "_generate_and_score_completions"),
    *("_compute_loss", "_generate_single_turn", "_get_per_token_logps_and_entropies", "_get_train_sampler"),
    *("_prepare_inputs", "_save_checkpoint", "_tokenize_prompts", "_tool_call_loop", "get_off_policy_mask"),
}
"""Methods of TRL's trainer that its subclasses override."""
_CALLED = {"on_train_begin", "on_step_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_train_end"}
_NONE = dict.fromkeys(("model", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader"))
"""Arguments of transformers' events that are None here: weights are sharded, and rows are no dataloader."""
_RENAMED = {
    "lr": "learning_rate",
    "seconds/step": "step_time",
    "groups/constant": "frac_reward_zero_std",
    "completion_tokens": "completions/mean_length",
    "completion_tokens/min": "completions/min_length",
    "completion_tokens/max": "completions/max_length",
    "truncated": "completions/clipped_ratio",
    "clip_fraction/low": "clip_ratio/low_mean",
    "clip_fraction/high": "clip_ratio/high_mean",
    "mismatch/abs": "sampling/sampling_logp_difference/mean",
    "mismatch/max": "sampling/sampling_logp_difference/max",
}


def as_in_trl(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics under their names, and also under TRL's names where those differ (docs/guides/from_trl.md)."""
    return {**metrics, **{_name_in_trl(name): value for name, value in metrics.items()}}


def _name_in_trl(name: str) -> str:
    if name.endswith(STDERR):
        return _name_in_trl(name.removesuffix(STDERR)) + STDERR
    if name.startswith("held_out/"):
        return f"eval_{_name_in_trl(name.removeprefix('held_out/'))}"
    kind, _, function = name.partition("/")
    if kind == "eval" and function.endswith("/mean"):
        return f"eval_{function.removesuffix('/mean')}_reward"
    statistic = {"reward": "mean", "reward_std": "std"}.get(kind)
    return f"rewards/{function}/{statistic}" if statistic and function else _RENAMED.get(name, name)


class FollowingCallback:
    """Calls the events of one callback of transformers, in their order. A step is a batch."""

    def __init__(self, callback: Any, trainer: Any, library: Any) -> None:
        """library: the module transformers.trainer_callback."""
        self._library = library
        self.callback = callback
        self.callback_name = type(callback).__name__
        args = trainer.args
        self._args = args if hasattr(args, "output_dir") else SimpleNamespace(**(args or {}))
        stops_early = isinstance(callback, library.EarlyStoppingCallback)
        if stops_early and not getattr(self._args, "metric_for_best_model", None):
            raise ConfigError("callbacks: EarlyStoppingCallback needs metric_for_best_model, for example eval_reward")
        self._trainer = trainer
        self._begin_again()

    def _begin_again(self) -> None:
        self._state, self._control = self._library.TrainerState(), self._library.TrainerControl()

    def unavailable(self) -> list[str]:
        """Return the events of the callback that are never called, and its arguments that are None."""
        base = vars(self._library.TrainerCallback)
        own = [event for event in base if event[:3] == "on_" and getattr(type(self.callback), event) is not base[event]]
        parameters = {name for event in own for name in inspect.signature(getattr(self.callback, event)).parameters}
        return [*(name for name in own if name not in _CALLED), *(name for name in _NONE if name in parameters)]

    def on_step_begin(self, state: RunState) -> None:
        self._state.global_step = state.step
        if not self._state.max_steps:
            self._state.max_steps = state.training_steps
            self._call(state, "on_train_begin")
        self._call(state, "on_step_begin")

    def on_step_end(self, state: RunState) -> None:
        self._state.global_step = state.step + 1
        self._call(state, "on_step_end")
        self._log(state)

    def on_evaluate(self, state: RunState) -> None:
        metrics = as_in_trl(state.metrics)
        self._call(state, "on_evaluate", metrics=metrics)
        # EarlyStoppingCallback compares with the best value, which the trainer keeps.
        value = metrics.get(f"eval_{str(getattr(self._args, 'metric_for_best_model', None)).removeprefix('eval_')}")
        best = max if getattr(self._args, "greater_is_better", None) else min
        if value is not None:
            self._state.best_metric = best(value, value if self._state.best_metric is None else self._state.best_metric)
        self._log(state)

    def on_checkpoint(self, state: RunState) -> None:
        self._call(state, "on_save")

    def on_end(self, state: RunState) -> None:
        self._call(state, "on_train_end")
        self._begin_again()  # the trainer may train again

    def _log(self, state: RunState) -> None:
        step = self._state.global_step
        logs = {**as_in_trl(state.metrics), "epoch": self._trainer.epoch(step)}
        self._state.log_history.append({**logs, "step": step})
        self._call(state, "on_log", logs=logs)

    def _call(self, state: RunState, event: str, **more: object) -> None:
        call = getattr(self.callback, event)
        self._state.epoch = self._trainer.epoch(self._state.global_step)
        given = _NONE | {"processing_class": self._trainer.processing_class, **more}
        self._control = call(self._args, self._state, self._control, **given) or self._control
        if self._control.should_training_stop:
            state.stop()
        for wanted, setting in (("should_save", "checkpoint.every"), ("should_evaluate", "evaluation.every")):
            if getattr(self._control, wanted):
                state.note(f"{event}: {wanted}: no effect; see {setting}")
        self._control._new_step()


class TrainedModel:
    """What a script does with a trainer after `train`. Raises RunError in one line if there is no exported model."""

    config: Config
    args: Any
    train_dataset: Any
    _result: Any = None

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)  # a property that has failed: its own error
        raise AttributeError(f"trainer.{name}: not available; docs/guides/python.md#from-a-trl-script lists what is")

    def is_local_process_zero(self) -> bool:
        return os.environ.get("LOCAL_RANK", "0") == "0"

    def is_world_process_zero(self) -> bool:
        return os.environ.get("RANK", "0") == "0"

    @property
    def accelerator(self) -> SimpleNamespace:
        """The parts of accelerate's object that scripts decide and print with."""
        is_main = self.is_world_process_zero()
        return SimpleNamespace(
            is_main_process=is_main,
            is_local_main_process=self.is_local_process_zero(),
            process_index=int(os.environ.get("RANK", "0")),
            num_processes=int(os.environ.get("WORLD_SIZE", "1")),
            print=print if is_main else lambda *_texts, **_options: None,
            unwrap_model=lambda model, *_arguments, **_options: model,
            **dict.fromkeys(("end_training", "free_memory", "wait_for_everyone"), self._recorded),
        )

    @property
    def state(self) -> Any:
        """A TrainerState. log_history has the metrics of all steps and evaluations, under both trainers' names."""
        from transformers.trainer_callback import TrainerState

        if (result := self._result) is None:
            return TrainerState()
        rows = [as_in_trl(row) for row in files.read_rows(result.folder / files.METRICS_FILE)]
        for row in rows:
            row["step"] += row.pop("kind") == files.TRAIN  # transformers counts completed steps
            row["epoch"] = self.epoch(row["step"])
        steps, last = result.steps, self.config.training_steps
        return TrainerState(epoch=self.epoch(steps), global_step=steps, max_steps=last, log_history=rows)

    def epoch(self, steps: int) -> float:
        """Return how often these steps have used each training row of `train_dataset`; 0.0 if it has no count."""
        rows = self._num_rows
        return steps * self.config.rollout.prompts_per_step / rows if rows else 0.0

    @cached_property
    def _num_rows(self) -> int | None:
        return num_rows(self.config.environments[0])

    @cached_property
    def processing_class(self) -> Any:
        """The tokenizer of the run."""
        from colocated_grpo.policy.model_files import read_tokenizer

        return read_tokenizer(self.config.model)

    @cached_property
    def model(self) -> Any:
        """The exported model, loaded by transformers; with policy.lora, the base with the adapter."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self._exported("model"))

    @property
    def hub_model_id(self) -> str:
        """The repository that the model is pushed to."""
        name = getattr(self.args, "hub_model_id", None) or Path(self.config.output_dir).name
        return name if self.config.hub is None else self.config.hub.repo

    def evaluate(self, eval_dataset: object = None, **_options: object) -> dict[str, float]:
        """Return the metrics of the run's last evaluation, which measures the final weights."""
        self._exported("evaluate")
        if eval_dataset is not None:
            raise RunError("trainer.evaluate: returns the run's last evaluation; give other rows as eval_dataset")
        return as_in_trl(self._result.evaluation)

    def save_model(self, output_dir: str | Path | None = None, **_options: object) -> None:
        """Copy the exported model, or the adapter, into a folder; default: the folder of all runs, as in TRL."""
        exported = self._exported("save_model")
        if self.is_world_process_zero():
            shutil.copytree(exported, output_dir or self.config.output_dir, dirs_exist_ok=True)

    def push_to_hub(self, *_arguments: object, **_options: object) -> None:
        """Push the exported model, or the adapter, unless the run has. Prints a line if that is impossible."""
        exported = self._exported("push_to_hub")
        if not self.is_world_process_zero() or self.config.hub is not None:
            return
        settings = HubConfig(repo=self.hub_model_id, private=getattr(self.args, "hub_private_repo", None) is not False)
        if problems := [*inputs.check_hub(settings)]:
            print(f"warning: push_to_hub: {problems[0]}; the model is in {exported}")
            return
        text_part = config_json.has_text_part(config_json.read_config_json(self.config.model))
        hub = Hub(settings, exported.parent, None, text_part, print)
        hub.push(exported, self._result.steps)
        while hub.pending(settings.timeout, stopped=False):
            pass

    def _recorded(self, *_arguments: object, **_options: object) -> None:
        """Do nothing: the run folder has metrics and state, pushes have a card, and train() has closed all trackers."""

    is_fsdp_enabled = is_deepspeed_enabled = False
    log_metrics = save_metrics = save_state = create_model_card = end = _recorded

    def _exported(self, name: str) -> Path:
        if self._result is None or self._result.model is None:
            raise RunError(f"trainer.{name}: needs a run that train() has completed, with a model exported at its end")
        return self._result.model
