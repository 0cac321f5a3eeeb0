"""Which folder a run writes into, and which one it continues."""

from __future__ import annotations

import time
from pathlib import Path

from colocated_grpo.checkpoint import FOLDER, complete_checkpoints
from colocated_grpo.config.errors import ConfigError
from colocated_grpo.config.schema import Config

AUTO = "auto"


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


def _newest(output: Path, run_name: str | None, name: str) -> Path | None:
    if run_name is not None:
        return output / run_name
    runs = [run for run in output.glob(f"{name}-*") if (run / FOLDER).is_dir()]
    return max(runs, key=lambda run: run.stat().st_mtime, default=None)


def _existing(folder: Path) -> Path:
    if not complete_checkpoints(folder / FOLDER):
        raise ConfigError(f"--resume {folder}: no complete checkpoint in {folder / FOLDER}")
    return folder
