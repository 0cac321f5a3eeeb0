"""Checks of the run: settings, the files and functions they name, the run folder, Weights & Biases."""

from __future__ import annotations

import fcntl
import json
import netrc
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from colocated_grpo.environments.registry import check_names
from colocated_grpo.runtime.run_folder import (
    CHECKPOINTS,
    LOCK_FILE,
    STATE_FILE,
    check_resumed,
    choose_run_folder,
    complete_checkpoints,
)
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.inputs import check_inputs
from colocated_grpo.settings.rules import remarks
from colocated_grpo.settings.schema import Config
from colocated_grpo.tools.doctor.results import Finding, failed, failed_line, ok, skipped, warning
from colocated_grpo.tools.doctor.subject import Subject

WANDB_URL = "https://api.wandb.ai"
DCP_METADATA = ".metadata"


def check_settings(subject: Subject) -> Finding:
    """Report invalid settings, and valid ones by which engine and policy compute different probabilities."""
    if subject.config_errors:
        return failed(
            "; ".join(subject.config_errors), "correct the setting (colocated_grpo/settings/schema.py has all)"
        )
    if subject.config is None:
        return skipped("no --config: only the machine is checked")
    lines = [*_quantized(subject.config), *remarks(subject.config)]
    if lines:
        return warning("; ".join(lines), "leave the settings out, unless you want their effect")
    return ok(f"{subject.launch.config} is valid for {subject.ranks} ranks")


def _quantized(config: Config) -> Iterator[str]:
    quantization = config.engine.args.get("quantization")
    if quantization is not None:
        yield f"engine.args.quantization={quantization}: the engine's weights differ from the policy's"


def check_files(subject: Subject, config: Config) -> Finding:
    """Look up the data files, functions and classes that the settings name."""
    lines: list[str] = []
    for check in (check_names, check_inputs):
        try:
            check(config)
        except ConfigError as error:
            lines += str(error).splitlines()
    lines = [line for line in dict.fromkeys(lines) if line not in subject.model.error.splitlines()]
    if not lines:
        return ok("all files and functions exist")
    if len(lines) == 1:
        return failed_line(lines[0], "correct the name")
    return failed(" | ".join(lines), "correct the names")


def check_run_folder(subject: Subject, config: Config) -> Finding:
    """Check what a resumed run continues from, and that no other run uses its folder."""
    launch = subject.launch
    try:
        folder = choose_run_folder(config, launch.resume, subject.run_name)
        check_resumed(config, launch.resume, subject.run_name)
    except ConfigError as error:
        return failed_line(str(error).splitlines()[0], "--resume auto, or another --run_name")
    if holder := _lock_holder(folder / LOCK_FILE):
        return failed(f"{folder}: in use by another run ({holder})", "stop that process, or another --run_name")
    checkpoints = complete_checkpoints(folder / CHECKPOINTS)
    if not checkpoints:
        return ok("a new run")
    if damage := damaged(checkpoints[-1]):
        return failed(
            f"checkpoint {checkpoints[-1]}: {damage}", f"mv {checkpoints[-1]} {folder}/damaged, then --resume {folder}"
        )
    return ok(f"continues from {checkpoints[-1]}")


def _lock_holder(file: Path) -> str:
    """Return the process that holds the lock of a run folder; empty if there is none."""
    try:
        with file.open("r+", encoding="utf-8") as stream:
            try:
                fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                return stream.read().strip() or "unknown process"
    except OSError:
        pass
    return ""


def damaged(checkpoint: Path) -> str:
    """Return what is wrong with the files of a checkpoint; empty if they can be read. Tensors are not read."""
    try:
        json.loads((checkpoint / STATE_FILE).read_text())["step"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{STATE_FILE} cannot be read ({type(error).__name__})"
    for name in (DCP_METADATA, *(file.name for file in checkpoint.glob("*.distcp"))):
        file = checkpoint / name
        if not file.is_file() or file.stat().st_size == 0:
            return f"{name} is missing or empty"
    return "" if any(checkpoint.glob("*.distcp")) else "no tensor files (*.distcp)"


def check_wandb(subject: Subject, config: Config) -> Finding:
    """Look for the key of Weights & Biases."""
    mode = subject.environment.get("WANDB_MODE")
    if config.tracking.wandb != "online" or mode in ("offline", "disabled"):
        return skipped(f"tracking.wandb={config.tracking.wandb}" + (f", WANDB_MODE={mode}" if mode else ""))
    if subject.environment.get("WANDB_API_KEY"):
        return ok("logged in by WANDB_API_KEY")
    host = urlsplit(subject.environment.get("WANDB_BASE_URL", WANDB_URL)).hostname or ""
    if _in_netrc(host, subject.environment):
        return ok(f"logged in to {host}")
    return failed(f"tracking.wandb=online: no key for {host}", "wandb login, or --tracking.wandb offline")


def _in_netrc(host: str, environment: Mapping[str, str]) -> bool:
    home = environment.get("HOME", os.path.expanduser("~"))
    for file in filter(None, (environment.get("NETRC"), f"{home}/.netrc", f"{home}/_netrc")):
        try:
            if netrc.netrc(file).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
