"""Turns a program's process into a rank for the duration of one run."""

import gc
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from colocated_grpo.errors import RunError
from colocated_grpo.launch.cli import join_ranks
from colocated_grpo.runtime import program, run_folder
from colocated_grpo.settings.schema import Config
from colocated_grpo.tracking.ending import RunOutput

if TYPE_CHECKING:
    from colocated_grpo.launch.rank import RankProcess

STOPPING = (
    "\nstopping: the run saves a checkpoint at the next safe point, and train() returns; interrupt again to end at once"
)


_had_sleeping_engine = threading.Event()
"""Set once a run with `engine.sleep` has begun in this process."""


def set_library_variables() -> bool:
    """Set the variables that libraries read on import. Returns False if torch is already imported."""
    for name, value in program.library_environment("INFO").items():
        os.environ.setdefault(name, value)
    return "torch" not in sys.modules


def in_notebook() -> bool:
    """Return True in a kernel of Jupyter, which renders HTML; False in IPython's terminal."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def program_name() -> str:
    """Return the name of the running script without its suffix; 'notebook' if there is none."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return "notebook" if file is None or in_notebook() else Path(file).stem


@contextmanager
def rank_variables() -> Generator[None]:
    """Set torchrun's variables for a single rank unless torchrun or srun has started this process."""
    if threading.current_thread() is not threading.main_thread():
        raise RunError("Trainer.train() was called in another thread; only the main thread receives stop signals")
    # A notebook in a SLURM job is a separate program, not a task of the job.
    single = in_notebook() and "RANK" not in os.environ
    variables = program.rank_environment({} if single else os.environ)
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        if problem := program.environment_problem(os.environ):
            raise RunError(problem)
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def process_of(config: Config, output: RunOutput, *, replace_group: bool) -> Generator["RankProcess"]:
    """Make this process a rank for the block. replace_group: leave another library's process group, else an error."""
    import torch
    import torch.distributed as dist

    from colocated_grpo.launch.rank import start_rank

    sleeps = torch.cuda.is_available() and config.engine.placement == "colocated" and config.engine.sleep
    if sleeps and _had_sleeping_engine.is_set():
        rule = "vLLM has one sleeping engine in a process, and this process had one"
        advice = "start a new process (in a notebook: restart the kernel), or set it to false"
        raise RunError(f"engine.sleep=true: {rule}; {advice}")
    if dist.is_initialized():
        if not replace_group:
            rule = "this process is in a process group already; Trainer.train() makes its own, one run at a time"
            raise RunError(f"torch.distributed: {rule}")
        dist.destroy_process_group()
    deterministic, excepthook = torch.are_deterministic_algorithms_enabled(), sys.excepthook
    process = start_rank(config, join_ranks(output), output)
    process.stop.listen()
    if sleeps:
        _had_sleeping_engine.set()
    try:
        with _second_interrupt(process):
            yield process
        process.close()
    except BaseException as error:
        process.abandon()
        _forget_frames(error)
        raise
    finally:
        del process
        run_folder.unlock_folders()
        torch.use_deterministic_algorithms(deterministic)
        sys.excepthook = excepthook  # else each process group adds "[rank0]: " to the lines of later errors
        gc.unfreeze()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@contextmanager
def _second_interrupt(process: "RankProcess") -> Generator[None]:
    """A first Ctrl-C stops the run, a second raises KeyboardInterrupt. Not under torchrun, which may repeat one."""
    stop_handler = signal.getsignal(signal.SIGINT)
    if "TORCHELASTIC_RUN_ID" in os.environ or not callable(stop_handler):
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if process.stop.requested():
            raise KeyboardInterrupt
        stop_handler(number, frame)
        with suppress(RuntimeError, OSError):  # RuntimeError: the interrupted code was writing to the stream itself
            print(STOPPING, file=sys.stderr, flush=True)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, stop_handler)


def _forget_frames(error: BaseException | None) -> None:
    """Clear the local variables in an error's frames: notebooks keep errors, and with them the model, in memory."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@contextmanager
def quiet_libraries() -> Generator[None]:
    """Hide log lines and warnings of library imports that a user cannot act on."""
    for library in ("vllm", "bitsandbytes"):
        if logging.getLogger(library).level == logging.NOTSET:
            logging.getLogger(library).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
