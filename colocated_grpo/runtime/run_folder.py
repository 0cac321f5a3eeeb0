"""The run folder: selection for a new or resumed run, lock, and checkpoints.

Imports no torch: the launcher checks `--resume` with these functions.
"""

import fcntl
import json
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from colocated_grpo.errors import ConfigError
from colocated_grpo.runtime.checksums import seal_is_broken
from colocated_grpo.settings.config_json import first_difference, read_config_json, shape_of
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.training import trained_shape
from colocated_grpo.types import JsonObject

AUTO = "auto"
LOCK_FILE = ".lock"
CHECKPOINTS = "checkpoints"
STATE_FILE = "trainer.json"
"""JSON file of a checkpoint, beside the tensor files: step, policy version, the trainer's state, and the checksums of
the other files. The last entry of this file is its own checksum, so that state and checksums are replaced together."""
FILES = "files"
"""Key in STATE_FILE: checksums by file name."""
FORMAT = 2
"""Version of the checkpoint format. Raise it with every change that an older reader would misread, or that makes older
checkpoints unreadable."""
SEAL = "checksum"
"""Key of the last entry of STATE_FILE."""
MODEL_SHAPE = "model_shape"
"""Key in the trainer's state: entries of the model's config.json that determine weight shapes, and `trained_shape`."""
CHECKPOINT_NAME = re.compile(r"step_(\d{6,})")
"""Folders with other names (step_best, step_000003 copy) belong to the user. No run resumes from or deletes them."""
_locks: list[TextIO] = []
"""Open lock files. They stay open until the process exits. Any kind of exit releases the locks."""


def choose_run_folder(output: Path, run_name: str | None, resume: str | None, prefix: str) -> Path:
    """Return the folder of this run: `resume` if it is a folder, else a folder in `output`.

    prefix: name prefix of new folders, and of the folders considered by `--resume auto` without a `run_name`.

    Raises ConfigError if the run to resume does not exist, or if a new run would overwrite an existing one.
    """
    if resume == AUTO:
        if (newest := newest_run(output, run_name, prefix)) is not None:
            return _without_links(newest)
    elif resume is not None:
        given = Path(resume)
        if not given.is_dir():
            raise ConfigError(f"--resume={resume!r}: no such run folder")
        if not complete_checkpoints(given / CHECKPOINTS):
            hint = f"; give the run folder, {given.parents[1]}" if given.parent.name == CHECKPOINTS else ""
            raise ConfigError(f"--resume={resume!r}: no complete checkpoint in {given / CHECKPOINTS}{hint}")
        return _without_links(given)
    folder = output / (run_name or f"{prefix}-{time.strftime('%Y%m%d-%H%M%S')}")
    if complete_checkpoints(folder / CHECKPOINTS) and resume is None:
        advice = "add --resume, or choose another name"
        raise ConfigError(f"run_name={run_name!r}: {folder} already contains a run; {advice}")
    return folder


def check_resumed(config: Config, resume: str | None, name: str) -> None:
    """Raise ConfigError if the run has no valid folder, or if the checkpoint has another shape or trained weights.

    Only shapes are compared, not names: a model's folder may have moved, and the checkpoint provides the weights.
    """
    folder = choose_run_folder(Path(config.output_dir), config.run_name, resume, name)
    if not (checkpoints := complete_checkpoints(folder / CHECKPOINTS)):
        return
    shape, saved = shape_of(read_config_json(config.model)), saved_shape(checkpoints[-1])
    if (key := first_difference(shape, saved)) is not None:
        raise ConfigError(
            f"model.name={config.model.name!r}: {key} is {shape[key]}, but {saved[key]} in the checkpoint "
            f"{checkpoints[-1]}; resume with a model of the same shape"
        )
    trained = trained_shape(config.policy)
    if (key := first_difference(trained, saved)) is not None:
        raise ConfigError(
            f"{key}={trained[key]}: the checkpoint {checkpoints[-1]} has {saved[key]}; resume with the value that the "
            "run began with"
        )


def lock_folder(folder: Path) -> Path:
    """Create `folder`, lock it until this process ends, and return its absolute path.

    The path is absolute because a reward may change the working folder. Raises ConfigError if another process has the
    lock. On a file system without locks, the folder is not locked.
    """
    folder = folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK_FILE).open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"output_dir: cannot write to {folder} ({error.strerror})") from None
    try:
        # A record lock: forked children, such as a reward's process pool, do not inherit it and may outlive the rank.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        lock.seek(0)
        raise ConfigError(f"{folder}: in use by another run ({lock.read().strip()})") from None
    except OSError:
        return folder
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {os.uname().nodename}\n")
    lock.flush()
    _locks.append(lock)
    return folder


def unlock_folders() -> None:
    """Release all locks, for a process that continues after its run."""
    while _locks:
        _locks.pop().close()


def is_locked(folder: Path) -> bool:
    """Return True if another process's run uses the folder. Call this from another process than the run's.

    A call from the run's own process would release the run's lock. The test acquires a free lock for a moment. A run
    that starts in this moment would be rejected.
    """
    try:
        with (folder / LOCK_FILE).open(encoding="utf-8") as lock:
            fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:  # no lock file, or a file system without locks
        return False
    return False


def remove_if_unused(folder: Path) -> None:
    """Remove a run folder that contains only its lock file. Every rank may call this; one call succeeds."""
    if [path.name for path in folder.glob("*")] == [LOCK_FILE]:
        with suppress(OSError):
            (folder / LOCK_FILE).unlink()
            folder.rmdir()


def saved_checkpoints(folder: Path) -> list[Path]:
    """Return the folders named like a checkpoint, oldest first, complete or not."""
    saved = [path for path in folder.glob("step_*") if CHECKPOINT_NAME.fullmatch(path.name)]
    return sorted(saved, key=lambda path: int(path.name.removeprefix("step_")))


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first. Their contents are not checked."""
    return [path for path in saved_checkpoints(folder) if (path / STATE_FILE).exists()]


def read_record(checkpoint: Path) -> JsonObject:
    """Return the contents of a checkpoint's STATE_FILE. Raises OSError or ValueError if the file is damaged."""
    text = (checkpoint / STATE_FILE).read_text(encoding="utf-8")
    try:
        record = json.loads(text)
    except RecursionError:
        raise ValueError(f"{STATE_FILE} is nested too deeply") from None
    if not isinstance(record, dict):
        raise ValueError(f"{STATE_FILE} is not an object")
    if seal_is_broken(text):
        raise ValueError(f"{STATE_FILE} differs from its checksum")
    return record


def saved_shape(checkpoint: Path) -> JsonObject:
    """Return the model shape recorded in a checkpoint; empty if the record is missing or unreadable.

    Damage is reported by `Checkpoints.restore`, which reads checkpoints until it finds an intact one.
    """
    try:
        return dict(read_record(checkpoint)["state"][MODEL_SHAPE])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _without_links(folder: Path) -> Path:
    """Return `folder`. Raises ConfigError if it contains a symbolic link: a resumed run rewrites its files."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_symlink():
            problem = f"--resume: {path} is a symbolic link, through which the run would write elsewhere"
            raise ConfigError(f"{problem}; replace it by the file or folder that it leads to")
    return folder


def runs_of(output: Path, name: str) -> list[Path]:
    """Return the runs whose names were made from `name`. grpo-large-20260101-000000 is not a run of grpo.yaml."""
    pattern = re.compile(re.escape(name) + r"-\d{8}-\d{6}")
    return [run for run in output.glob("*") if pattern.fullmatch(run.name)]


def newest_run(output: Path, run_name: str | None, name: str) -> Path | None:
    """Return the run with the newest checkpoints. A run folder's own time changes when its report is rebuilt."""
    if run_name:  # an empty name, as of an unset variable, would be the folder of all runs
        return output / run_name
    runs = [run for run in runs_of(output, name) if complete_checkpoints(run / CHECKPOINTS)]
    return max(runs, key=lambda run: (run / CHECKPOINTS).stat().st_mtime, default=None)
