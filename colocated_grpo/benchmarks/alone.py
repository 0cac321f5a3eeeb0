"""Benchmarks of one part on one device, without ranks: the counterpart of `ranks.main_in_ranks`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from colocated_grpo.benchmarks.results import describe, publish
from colocated_grpo.benchmarks.roofline import Roofline, measure_roofline

Measure = Callable[[argparse.Namespace, torch.device, Roofline], dict[str, Any]]
"""The result's rows, and what else belongs to it."""


def main_alone(
    benchmark: str, arguments: Sequence[str] | None, parser: argparse.ArgumentParser, measure: Measure
) -> int:
    """Measure on the first CUDA device, else on the CPU, and publish. `parser` knows --json."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(arguments)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    roofline = measure_roofline(device)
    measured = measure(options, device, roofline)
    result = describe(benchmark, arguments, ranks=1)
    publish({**result, "roofline": roofline.as_dict(), **measured}, options.json)
    return 0
