"""Write a config for your data: python -m colocated_grpo.tools.init questions.jsonl --model NAME --gpus N"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from colocated_grpo.environments.rows.files import READERS
from colocated_grpo.errors import RunError
from colocated_grpo.launch.arguments import visible_gpus
from colocated_grpo.runtime.program import OneLineParser, prepare_streams, set_up_logging
from colocated_grpo.runtime.verdict import USAGE_ERROR
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.inputs import check_inputs
from colocated_grpo.settings.loading import read_config
from colocated_grpo.tools.doctor.footprint import Placement
from colocated_grpo.tools.doctor.gpus import list_gpus, visible
from colocated_grpo.tools.doctor.results import GIB
from colocated_grpo.tools.init.page import config_text
from colocated_grpo.tools.init.plan import make_plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file. Returns 0, or 2 after printing a line about what is missing."""
    prepare_streams()
    options = _parser().parse_args(arguments)
    set_up_logging("INFO")
    try:
        text = _text(options)
        options.output.write_text(text, encoding="utf-8")
        check_inputs(read_config(options.output).config)
    except (ConfigError, RunError, OSError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return USAGE_ERROR
    with suppress(OSError):  # a closed console
        print(f"{text}\nwritten to {options.output}; the first lines are the next commands", flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m colocated_grpo.tools.init",
        description="Write a commented config for a data file, a model and a number of GPUs.",
    )
    parser.add_argument("data", type=Path, metavar="DATA", help=f"{', '.join(READERS)}: one question a row")
    parser.add_argument("--model", required=True, metavar="NAME", help="folder or Hugging Face name")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of this node; 0: the CPU (default: all visible)")
    parser.add_argument(
        "--gpu-memory", type=float, metavar="GIB", help="memory of one GPU (default: as nvidia-smi reports it)"
    )
    parser.add_argument("--reward", metavar="NAME", help="a built-in reward or file.py:function (default: by the data)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="YAML file (default: DATA.yaml in this folder)")
    return parser


def _text(options: argparse.Namespace) -> str:
    """Return the text of the config. Sets the options that were left out."""
    options.output = options.output or Path(options.data.stem + ".yaml")
    if options.output.exists():
        raise ConfigError(f"--output={str(options.output)!r}: exists already; choose another name, or delete it")
    options.gpus = visible_gpus(os.environ) if options.gpus is None else options.gpus
    plan = make_plan(options.data, options.model, options.reward, _placement(options))
    command = f"python run_colocated_grpo.py --gpus {options.gpus} --config {shlex.quote(str(options.output))}"
    heading = [f"Check it: {command} --dry-run", f"Train:    {command}", "Settings: docs/settings.md"]
    return config_text(plan, heading, options.output.parent)


def _placement(options: argparse.Namespace) -> Placement:
    if options.gpus < 0:
        raise ConfigError(f"--gpus={options.gpus}: must be at least 0")
    if options.gpus == 0:
        return Placement(ranks=1, on_gpu=False, device_bytes=psutil.virtual_memory().total)
    memory = int((options.gpu_memory or 0) * GIB)
    if not memory:
        known = [gpu.total for gpu in visible(list_gpus().gpus, os.environ)[: options.gpus] if gpu.total]
        memory = min(known, default=0)
    if not memory:
        raise ConfigError(
            f"--gpus={options.gpus}: no GPU is visible here; add --gpu-memory 80 for the machine that will train, or "
            "use the CPU with --gpus 0"
        )
    return Placement(ranks=options.gpus, on_gpu=True, device_bytes=memory)


if __name__ == "__main__":
    sys.exit(main())
