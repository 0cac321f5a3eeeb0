"""Measured limits of the devices, all ranks at once: `python -m benchmarks.rates --gpus 2`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import main_in_ranks, rank_parser
from benchmarks.roofline import Roofline, measure_roofline
from colocated_grpo.runtime.distributed import World
from colocated_grpo.types import JsonObject


def main(arguments: Sequence[str] | None = None) -> int:
    return main_in_ranks("rates", rank_parser(__doc__), measure, arguments)


def measure(world: World, _options: argparse.Namespace) -> JsonObject:
    rates = measure_roofline(world.device).as_dict()
    return {"roofline": rates, "rows": []}


def measured_rates(file: Path, *, gpus: int, nproc: int) -> Roofline:
    """Return the rates, measured in separate processes so that all device memory is freed. Writes `file`."""
    command = [sys.executable, "-m", "benchmarks.rates", "--gpus", str(gpus), "--nproc", str(nproc)]
    subprocess.run([*command, "--json", str(file)], check=True)
    return Roofline(**json.loads(file.read_text())["roofline"])


if __name__ == "__main__":
    sys.exit(main())
