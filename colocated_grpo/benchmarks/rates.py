"""The measured limits of the devices, all ranks at once: `python -m colocated_grpo.benchmarks.rates --gpus 2`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colocated_grpo.benchmarks.ranks import main_in_ranks, rank_parser
from colocated_grpo.benchmarks.roofline import Roofline, measure_roofline
from colocated_grpo.runtime.distributed import World


def main(arguments: Sequence[str] | None = None) -> int:
    return main_in_ranks("rates", rank_parser(__doc__), measure, arguments)


def measure(world: World, _options: argparse.Namespace) -> dict[str, Any]:
    rates = measure_roofline(world.device).as_dict()
    return {"roofline": rates, "rows": []}


def measured_rates(file: Path, *, gpus: int, nproc: int) -> Roofline:
    """Measured in processes of its own, so that nothing of it stays on the devices. Writes `file`."""
    command = [sys.executable, "-m", "colocated_grpo.benchmarks.rates", "--gpus", str(gpus), "--nproc", str(nproc)]
    subprocess.run([*command, "--json", str(file)], check=True)
    return Roofline(**json.loads(file.read_text())["roofline"])


if __name__ == "__main__":
    sys.exit(main())
