"""Which folder a run writes into, which one it continues, and that no two runs share one."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from colocated_grpo.config.errors import ConfigError
from colocated_grpo.config.inputs import first_difference, read_config_json, shape_of
from colocated_grpo.config.schema import Config
from colocated_grpo.runtime.checkpoint_folders import FOLDER, complete_checkpoints, saved_shape

AUTO = "auto"
LOCK_FILE = ".lock"
_held: list[TextIO] = []
"""Locks of this process. They are never given back: whatever ends the process ends them, a kill too."""


def choose_run_folder(config: Config, resume: str | None, name: str) -> Path:
    """The folder of this run. `name` heads new folders and tells which ones `--resume auto` may continue.

    Raises ConfigError where a named run does not exist, or a new one would mix with an old one.
    """
    output = Path(config.output_dir)
    if resume == AUTO:
        newest = _newest(output, config.run_name, name)
        if newest is not None:
            return newest
    elif resume is not None:
        return _existing(Path(resume))
    folder = output / (config.run_name or f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if complete_checkpoints(folder / FOLDER) and resume is None:
        raise ConfigError(
            f"run_name={config.run_name!r}: {folder} holds a run already; add --resume, or choose another name"
        )
    return folder


def check_resumed(config: Config, resume: str | None, name: str) -> None:
    """Raise ConfigError where the run cannot write into its folder, or continues one of another model.

    The weights' shapes must be those of the checkpoint. The model's name may be another: folders are moved, and what a
    run has begun with is in its checkpoint.
    """
    checkpoints = complete_checkpoints(choose_run_folder(config, resume, name) / FOLDER)
    if not checkpoints:
        return
    ours, theirs = shape_of(read_config_json(config.model)), saved_shape(checkpoints[-1])
    if (key := first_difference(ours, theirs)) is not None:
        raise ConfigError(
            f"model.name={config.model.name!r}: its {key} is {ours[key]}, that of the checkpoint {checkpoints[-1]} is "
            f"{theirs[key]}; a run is resumed with a model of the same shape"
        )


def claim(folder: Path) -> Path:
    """Make `folder` and lock it until this process ends. Raises ConfigError where another run is writing into it.

    Its absolute path, for a reward may change the working folder of the process.
    """
    folder = folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK_FILE).open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"output_dir: {folder} cannot be written ({error.strerror})") from None
    try:
        # a record lock, for a forked child (a process pool of a reward) does not inherit it and may live longer
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        lock.seek(0)
        raise ConfigError(f"{folder}: another run writes into it ({lock.read().strip()})") from None
    except OSError:
        return folder  # a file system without locks
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {os.uname().nodename}\n")
    lock.flush()
    _held.append(lock)
    return folder


@contextmanager
def removed_if_unused(folder: Path) -> Iterator[None]:
    """When the block raises, take away a claimed folder that holds nothing: a mistake in a config leaves no run."""
    try:
        yield
    except BaseException:
        if [path.name for path in folder.glob("*")] == [LOCK_FILE]:
            with suppress(OSError):  # every rank comes by here
                (folder / LOCK_FILE).unlink()
                folder.rmdir()
        raise


def _newest(output: Path, run_name: str | None, name: str) -> Path | None:
    if run_name is not None:
        return output / run_name
    own = re.compile(re.escape(name) + r"-\d{8}-\d{6}")  # grpo-large-20260101-000000 is no run of grpo.yaml
    runs = [run for run in output.glob("*") if own.fullmatch(run.name) and (run / FOLDER).is_dir()]
    # The run folder itself changes whenever a report is made anew.
    return max(runs, key=lambda run: (run / FOLDER).stat().st_mtime, default=None)


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise ConfigError(f"--resume={str(folder)!r}: no such run folder")
    if not complete_checkpoints(folder / FOLDER):
        raise ConfigError(f"--resume={str(folder)!r}: no complete checkpoint in {folder / FOLDER}")
    return folder
