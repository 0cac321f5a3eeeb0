"""API for Python programs: `Trainer`, a run with the program's functions and data, and its `Result`."""

import html
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from colocated_grpo.api.arguments import read_arguments
from colocated_grpo.api.ported import HOOKS, FollowingCallback, TrainedModel
from colocated_grpo.api.process import process_of, program_name, quiet_libraries, rank_variables, set_library_variables
from colocated_grpo.callbacks import RunState, check_callbacks
from colocated_grpo.environments.registry import check_names
from colocated_grpo.errors import AlreadyReported, ConfigError, RunError
from colocated_grpo.launch.cli import AUTO, checked
from colocated_grpo.runtime import program, run_folder, verdict
from colocated_grpo.tracking import ending, files

__all__ = ["ConfigError", "Result", "RunError", "RunState", "Trainer"]

REPORT_HEIGHT = 600
TORCH_CAME_FIRST = (
    "note: torch was imported before colocated_grpo: on a busy CPU, steps take several times as long; write "
    "`from colocated_grpo import Trainer` before other imports"
)
_TORCH_CAME_LATER = set_library_variables()


@dataclass(frozen=True, kw_only=True)
class Result:
    """Metrics and files of a completed or stopped run. Displays the run's report in a notebook."""

    outcome: str
    """finished, or stopped by a signal; the checkpoint of a stopped run continues with resume="auto"."""
    steps: int
    """Completed steps of the whole run, including the steps before a resume."""
    first_step: int = field(repr=False)
    """Steps completed before this call: 0, or those of the checkpoint that it continued."""
    metrics: dict[str, float] = field(repr=False)
    """Metrics of the last training step, named as in metrics.jsonl."""
    evaluation: dict[str, float] = field(repr=False)
    """Metrics of the last evaluation."""
    folder: Path
    """The run folder."""
    checkpoint: Path | None
    """The newest complete checkpoint."""
    model: Path | None
    """The exported model, or the adapter of a run with policy.lora; None for a stopped run."""
    best_model: Path | None
    """The model, or the adapter, of the best evaluation; None if the run did not keep it."""

    @property
    def global_step(self) -> int:
        """TRL's name for `steps`."""
        return self.steps

    @property
    def training_loss(self) -> float:
        """The loss of the last step."""
        return self.metrics.get("loss", math.nan)

    def _repr_html_(self) -> str:
        report = self.folder / files.REPORT_FILE
        if not report.is_file():
            return f"<pre>{html.escape(repr(self))}</pre>"
        page = html.escape(report.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" sandbox style="width: 100%; height: {REPORT_HEIGHT}px; border: 0"></iframe>'


class Trainer(TrainedModel):
    """A training run with settings from a config file, keyword arguments, or both.

    Construction only checks the settings, and saves a given tokenizer that differs from the model's. `train` runs in
    this process, as one rank. Under torchrun, every process runs the same program and is one rank of the run.
    """

    def __init__(
        self,
        model: object = None,
        reward_funcs: object = None,
        args: object = None,
        train_dataset: object = None,
        eval_datasets: object = None,
        processing_class: object = None,
        *,
        callbacks: Sequence[object] | None = None,
        config: str | Path | None = None,
        peft_config: object = None,
        **settings: object,
    ) -> None:
        """Read and check the settings. Raises ConfigError with one line per problem.

        model: folder, name, or an unchanged model of transformers. reward_funcs: functions in TRL's signature, or names
        of functions or reward models. train_dataset, eval_datasets: a datasets.Dataset, a list of dictionaries, or a
        name. A dictionary of such values defines one evaluation set per entry, with the entry's key as its name.
        processing_class: a tokenizer. callbacks: objects with methods of `colocated_grpo.callbacks.EVENTS`, or
        TrainerCallbacks of transformers. config: YAML file, whose settings the arguments override. args: a mapping of
        settings, or TRL's GRPOConfig. peft_config: a mapping, or PEFT's LoraConfig. settings: sections and names of the
        config file, or fields of GRPOConfig.
        """
        if unused := sorted(HOOKS.intersection(dir(type(self)))):
            raise ConfigError(f"{type(self).__name__}: methods that are never called: {', '.join(unused)}")
        self.args, self.train_dataset = args, train_dataset
        self.eval_dataset = settings.get("eval_dataset", eval_datasets)
        if processing_class is not None:
            self.processing_class = processing_class
        self._loaded = read_arguments(
            model=model,
            reward_funcs=reward_funcs,
            train_dataset=train_dataset,
            eval_datasets=eval_datasets,
            args=args,
            processing_class=processing_class,
            peft_config=peft_config,
            config=config,
            settings=settings,
        )
        self._callbacks: list[object] = []
        for callback in callbacks if isinstance(callbacks, Sequence) else [callbacks] if callbacks else []:
            self.add_callback(callback)
        check_names(self._loaded.config.environments, self._loaded.config.evaluation.sets)
        self._name = program_name() if config is None else Path(config).stem
        # Under torchrun, constructing GRPOConfig initializes a process group that nothing uses.
        self._replaces_group = args is not None and hasattr(args, "generation_batch_size")
        self.config = self._loaded.config
        """The settings, including defaults."""

    def add_callback(self, callback: Any) -> None:
        """Add a callback, or the class of one, for the next `train`. Raises ConfigError."""
        callback = callback() if isinstance(callback, type) else callback
        theirs = sys.modules.get("transformers.trainer_callback")  # imported if this is a TrainerCallback
        if theirs is not None and isinstance(callback, theirs.TrainerCallback):
            callback = FollowingCallback(callback, self, theirs)
            if unused := ", ".join(callback.unavailable()):
                note = f"callback {callback.callback_name}: here these are never called, or None: {unused}"
                self._loaded.notes.append(note)
        self._callbacks.append(callback)
        check_callbacks(self._callbacks)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, or the first one of a class, and return it; None if there is none."""
        for each in self._callbacks:
            theirs = each.callback if isinstance(each, FollowingCallback) else each
            if callback in (theirs, type(theirs)):
                self._callbacks.remove(each)
                return theirs
        return None

    remove_callback = pop_callback

    def check(self, resume: object = None) -> None:
        """Check settings, model, data and functions, and print the first prompts and rewards: a dry run.

        resume: as in `train`. Reads neither weights nor an engine. Raises ConfigError or RunError for the first
        problem.
        """
        with rank_variables(), quiet_libraries():
            import torch

            from colocated_grpo.assembly.preview import preview
            from colocated_grpo.settings.run_sizes import Placement

            config, lines = checked(self._loaded, _run_to_resume(resume), self._name)
            ranks = int(os.environ["WORLD_SIZE"])
            place = Placement(ranks=ranks, on_gpu=torch.cuda.is_available(), device_bytes=0)
            print(*lines, sep="\n", end="\n" * bool(lines))
            print(*preview(config, place, lambda line: print(f"note: {line}")), sep="\n")

    def train(self, resume: object = None, *, resume_from_checkpoint: object = None) -> Result:
        """Train to the end and return the result. Collective under torchrun.

        resume, or TRL's resume_from_checkpoint: a run folder, "auto" or True (the newest run of this config or program,
        if there is one), or None. Raises ConfigError or RunError, with one line per problem. A program may train
        several times, also with another Trainer; on CUDA, this requires engine.sleep: false.
        """
        resume = _run_to_resume(resume or resume_from_checkpoint)
        self.__dict__.pop("model", None)  # loaded after an earlier call
        started = time.monotonic()
        try:
            with rank_variables():
                self._result = self._train(resume)
            seconds = time.monotonic() - started
            rate = (self._result.steps - self._result.first_step) / seconds
            names_of_transformers = {"train_runtime": seconds, "train_steps_per_second": rate}
            self._result.metrics.update(names_of_transformers, train_loss=self._result.training_loss)
            return self._result
        except (ConfigError, RunError) as error:
            failure: BaseException = error
        except AlreadyReported:
            failure = SystemExit(verdict.RUN_ERROR)
        except OSError as error:
            if not (line := ending.explain_os_error(error, [self.config.output_dir, resume])):
                raise
            failure = RunError(line)
        # Raised here without a chain of exceptions, whose frames would keep the run in memory.
        failure.__cause__ = failure.__context__ = None
        raise failure.with_traceback(None)

    def _train(self, resume: str | None) -> Result:
        config, lines = checked(self._loaded, resume, self._name)
        output = ending.make_output(config.tracking.console, config.training_steps, is_main=os.environ["RANK"] == "0")
        for line in lines if _TORCH_CAME_LATER else [*lines, TORCH_CAME_FIRST]:
            output.note(line)
        program.raise_descriptor_limit()
        try:
            with quiet_libraries(), process_of(config, output, replace_group=self._replaces_group) as process:
                from colocated_grpo.launch.rank import train_on

                callbacks = self._callbacks
                folder = train_on(process, config, resume=resume, name=self._name, output=output, callbacks=callbacks)
                return process.world.from_main(lambda: read_result(folder))
        except AlreadyReported:
            output.close()
            raise
        except BaseException as error:
            ending.record_ending(output, error, [config.output_dir, resume])
            raise


def _run_to_resume(wanted: object) -> str | None:
    """Return "auto" for True, None for False and None, and a run folder as text. Raises ConfigError."""
    if wanted and not isinstance(wanted, bool | str | os.PathLike):
        raise ConfigError(f"resume={wanted!r}: must be a run folder, 'auto' or True")
    return AUTO if wanted is True else os.fspath(cast(str | Path, wanted)) if wanted else None


def read_result(folder: Path) -> Result:
    """Return the result of the completed or stopped run in `folder`."""
    summary = files.read_summary(folder)
    rows = list(files.read_rows(folder / files.METRICS_FILE))
    return Result(
        outcome=summary["state"],
        steps=summary["steps"],
        first_step=files.read_environment(folder)[-1]["first_step"],
        metrics=_last(rows, files.TRAIN),
        evaluation=_last(rows, files.EVALUATION),
        folder=folder,
        checkpoint=next(reversed(run_folder.complete_checkpoints(folder / run_folder.CHECKPOINTS)), None),
        model=next(reversed(files.exports(folder, files.FINAL)), None),
        best_model=next(reversed(files.exports(folder, files.BEST)), None),
    )


def _last(rows: list[files.Row], kind: str) -> dict[str, float]:
    """Return the metrics of the last step with rows of this kind. Each evaluation set has a row of its own."""
    chosen = [row for row in rows if row["kind"] == kind]
    last = [row for row in chosen if row["step"] == chosen[-1]["step"]]
    return {key: value for row in last for key, value in row.items() if key not in ("kind", "step")}
