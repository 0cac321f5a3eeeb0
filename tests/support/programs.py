"""Programs that train with Trainer, as functions that one forked process, or each of several ranks, calls."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from colocated_grpo import ConfigError, RunError, Trainer
from colocated_grpo.api.trainer import Result
from colocated_grpo.policy.optimizers import learning_rate
from colocated_grpo.runtime.run_folder import LOCK_FILE
from colocated_grpo.tracking import files
from tests.support.training_runs import settings

ROWS = [{"prompt": f"{number} {number + 1}", "answer": str(number)} for number in range(40)]
HELD_OUT = [{"prompt": "7 8", "answer": "7"}, {"prompt": "9 9", "answer": "9"}]
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def without_launcher() -> Generator[None]:
    """Hide from a forked rank that something has started it, for programs that are started alone."""
    hidden = {name: os.environ.pop(name) for name in (*RANK_VARIABLES, "TORCHELASTIC_USE_AGENT_STORE")}
    try:
        yield
    finally:
        os.environ.update(hidden)


def arguments(model: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """Return the arguments of a Trainer whose run takes a few seconds, without rewards."""
    base = settings(model, output_dir=str(output), training_steps=3, **changes)
    del base["environments"]
    return base | {"model": model, "train_dataset": ROWS, "eval_datasets": HELD_OUT}


class Recorder:
    """A callback that records every event, and a reward function that records the threads that it runs in."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.threads: set[str] = set()
        self.handler_in_run: Any = None

    def __call__(self, completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        self.threads.add(threading.current_thread().name.partition("_")[0])
        return [sum(map(str.isdigit, text)) / (1 + len(text)) for text in completions]

    def on_evaluate(self, state: Any) -> None:
        self.events.append(("evaluate", state.step))

    def on_step_end(self, state: Any) -> None:
        self.handler_in_run = signal.getsignal(signal.SIGINT)
        self.events.append(("step", state.step))
        state.log({"double": 2 * state.metrics["reward"]})

    def on_checkpoint(self, state: Any) -> None:
        self.events.append(("checkpoint", int(state.checkpoint.name.removeprefix("step_"))))

    def on_end(self, state: Any) -> None:
        self.events.append((state.outcome, state.step))


class Interrupt:
    """A callback that interrupts the run in its first step, as Ctrl-C does."""

    def __init__(self, times: int) -> None:
        self.times = times

    def on_step_end(self, state: Any) -> None:
        for _ in range(self.times):
            signal.raise_signal(signal.SIGINT)


class Steer:
    """A callback that changes the learning rate after the first step and ends the run after the second."""

    def on_step_end(self, state: Any) -> None:
        if state.step == 0:
            state.set_learning_rate(1e-5)
        else:
            state.stop()


def broken(completions: list[str], **columns: Any) -> list[float]:
    raise KeyError("no such answer")


def four_runs(model: Path, output: Path) -> dict[str, Any]:
    """Train, resume, fail and be interrupted in one process that no launcher has prepared. Returns what was seen."""
    with without_launcher():
        return _four_runs(model, output)


def _four_runs(model: Path, output: Path) -> dict[str, Any]:
    handler, excepthook = signal.getsignal(signal.SIGINT), sys.excepthook
    recorder = Recorder()
    base = arguments(model, output)
    result = Trainer(reward_funcs=[recorder], callbacks=[recorder], **base).train()
    seen: dict[str, Any] = {
        "result": result,
        "report": result._repr_html_(),
        "events": recorder.events,
        "threads": recorder.threads,
        "replaced": recorder.handler_in_run is not handler,
        "config": yaml.safe_load((result.folder / "config.yaml").read_text()),
    }
    longer = base | {"training_steps": 4}
    seen["resumed"] = Trainer(reward_funcs=[recorder], **longer).train(resume="auto")
    seen["errors"] = [
        error_of(Trainer(reward_funcs=broken, **base | {"run_name": "fails"})),
        error_of(Trainer(reward_funcs=recorder, **base)),
    ]
    interrupted = Trainer(reward_funcs=recorder, callbacks=[Interrupt(1)], **base | {"run_name": "stops"})
    seen["interrupted"] = interrupted.train()
    try:
        Trainer(reward_funcs=recorder, callbacks=[Interrupt(2)], **base | {"run_name": "ends"}).train()
    except KeyboardInterrupt as error:
        seen["second interrupt"] = [frame.f_locals for frame in _frames(error) if frame.f_code.co_name == "train_on"]
    seen["left"] = {
        "variables": [name for name in RANK_VARIABLES if name in os.environ],
        "group": dist.is_initialized(),
        "handler": signal.getsignal(signal.SIGINT) is handler,
        "excepthook": sys.excepthook is excepthook,
        "locks": [line for line in Path("/proc/self/fd").iterdir() if os.path.realpath(line).endswith(LOCK_FILE)],
        "threads": [thread.name for thread in threading.enumerate() if thread.name in ("watchdog", "signs of life")],
    }
    return seen


def fail_after_the_engine(model: Path, output: Path) -> dict[str, Any]:
    """Begin a run whose build fails behind the engine. Returns what it leaves in the process.

    model: one that the engine does not store as its checkpoint does.
    """
    from vllm.distributed import parallel_state

    output.mkdir()
    (output / "code.py").write_text(CODE)
    (output / "rows.jsonl").write_text('{"prompt": "1 2", "answer": "1"}\n' * 40)
    entry = {"name": str(output / "rows.jsonl")}
    environments = [
        {**entry, "type": "dataset", "rewards": [{"name": f"{output / 'code.py'}:reward", "run_in": "process"}]},
        {**entry, "type": "agent", "program": f"{output / 'code.py'}:play"},
    ]
    base = settings(model, output_dir=str(output / "runs"), weights="shared", environments=environments)
    with without_launcher():
        error = error_of(Trainer(**base))
    process = psutil.Process()
    return {
        "error": error[:2],
        "engine": parallel_state._WORLD is not None,
        "reward processes": [each.pid for each in process.children() if "rewards.workers" in " ".join(each.cmdline())],
        "ports": [one.laddr.port for one in process.net_connections() if one.status == psutil.CONN_LISTEN],
        "threads": [one.name for one in threading.enumerate() if one.name == "http"],
    }


CODE = """
def reward(completions, **columns):
    return [0.0] * len(completions)

async def play(item, base_url, api_key):
    return 0.0
"""


def error_of(trainer: Trainer) -> tuple[str, str, list[str]]:
    """Return type and text of the error that ends the run, and the functions in its traceback."""
    try:
        trainer.train()
    except (ConfigError, RunError) as error:
        assert error.__cause__ is None and error.__context__ is None
        return type(error).__name__, str(error), [frame.f_code.co_name for frame in _frames(error)]
    return "none", "", []


def _frames(error: BaseException) -> list[Any]:
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return frames


def steered(model: Path, output: Path) -> dict[str, Any]:
    """Train on this rank with a callback on rank 0 alone, and with several datasets to evaluate."""
    callbacks = [Steer()] if os.environ["RANK"] == "0" else []
    given = arguments(model, output, checkpoint={"every": 1})
    given["eval_datasets"] = {"two": HELD_OUT, "three": [*HELD_OUT, ROWS[3]]}
    trainer = Trainer(reward_funcs=Recorder(), callbacks=callbacks, **given)
    result = trainer.train()
    scheduled = [learning_rate(trainer.config.policy, step, 3) for step in range(2)]
    return {
        "steps": result.steps,
        "lr": result.metrics["lr"],
        "scheduled": scheduled,
        "folder": result.folder,
        "evaluated": {tuple(name.split("/")[:2]) for row in evaluations(result.folder) for name in row if "/" in name},
        "of_result": {tuple(name.split("/")[:2]) for name in result.evaluation if "/" in name},
    }


def trained_twice(model: Path, output: Path) -> list[float]:
    """Train two equal runs in one process of torchrun. Returns the rewards of their only steps."""
    base = arguments(model, output, evaluation={"every": 0}, rollout={"prompts_per_step": 2, "group_size": 2})
    given = base | {"reward_funcs": Recorder(), "eval_datasets": None, "training_steps": 1}
    return [Trainer(**given | {"run_name": name}).train().metrics["reward"] for name in ("first", "second")]


def ended_by_a_callback(given: dict[str, Any]) -> Result:
    """Train on this rank until a callback ends the run after its second step."""
    return Trainer(callbacks=[Steer()], **given).train()


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return [row for row in files.read_metrics(folder) if row["kind"] == files.EVALUATION]


class StopAtTwo(TrainerCallback):
    """A callback of transformers that records the beginnings of steps, and ends the run after the second."""

    def __init__(self) -> None:
        self.begun: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.begun.append(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_training_stop = state.global_step == 2


def ported(model: Path, output: Path) -> dict[str, Any]:
    """Train as a script of TRL does, with its objects, and return what it reads from its trainer afterwards."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}!{% endfor %}"
    given = arguments(model, output, rollout={"stop": ["99"]}) | {"model": AutoModelForCausalLM.from_pretrained(model)}
    os.environ.pop("HF_TOKEN", None)
    printed = io.StringIO()
    with without_launcher():
        trainer = Trainer(reward_funcs=Recorder(), processing_class=tokenizer, **given)
        trainer.add_callback(stop := StopAtTwo())
        taken = trainer.train()
        trainer.save_model(output / "saved")
        with redirect_stdout(printed):
            trainer.push_to_hub(dataset_name="rows")
            trainer.accelerator.print("done")
            trainer.end()
        try:
            other_rows = str(trainer.evaluate(ROWS))
        except RunError as error:
            other_rows = str(error)
    return {
        "saved": {path.name for path in (output / "saved").iterdir()},
        "template": AutoTokenizer.from_pretrained(output / "saved").chat_template,
        "history": trainer.state.log_history,
        "begun": stop.begun,
        "steps": trainer.state.global_step,
        "evaluated": trainer.evaluate(),
        "printed": printed.getvalue().splitlines(),
        "eos": trainer.processing_class.eos_token,
        "taken": taken,
        "other_rows": other_rows,
        "prompts": trainer.config.rollout.prompts_per_step,
        "trained": type(trainer.accelerator.unwrap_model(trainer.model)).__name__,
    }


def scored_by_a_model(model: Path, reward_model: Path, output: Path) -> Result:
    """Train for two steps with the rewards of a script of TRL: a reward model, by its folder, and a function."""
    given = arguments(model, output) | {"training_steps": 2, "args": {"reward_weights": [1.0, 0.5]}}
    messages = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    given |= {"train_dataset": messages, "eval_datasets": None}

    def short(completions: list[Any], **columns: Any) -> list[float]:
        return [float(len(completion[0]["content"]) < 6) for completion in completions]

    with without_launcher():
        return Trainer(reward_funcs=[str(reward_model), short], **given).train()
