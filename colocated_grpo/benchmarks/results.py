"""What every benchmark leaves: a table for people and one JSON file, with where the figures come from."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from colocated_grpo.tracking.environment import describe_start

Row = Mapping[str, Any]
"""One line of a table: the name of each column and its value. Units are part of the names."""


def describe(benchmark: str, arguments: Sequence[str], *, ranks: int) -> dict[str, Any]:
    """Where a result comes from. Example: describe("sync", ["--gpus", "2"], ranks=2)"""
    start = describe_start(first_step=0)
    return {
        "benchmark": benchmark,
        "command": shlex.join(["python", "-m", f"colocated_grpo.benchmarks.{benchmark}", *arguments]),
        "commit": start["git"],
        "time": start["time"],
        "python": start["python"],
        "packages": start["packages"],
        "machine": start["machine"],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "ranks": ranks,
    }


def publish(result: Mapping[str, Any], file: Path | None) -> None:
    """Print the result (its 'rows' as a table, the rest of it that is flat as lines), and write it to `file` if given.

    result: `describe` plus the benchmark's own keys; 'rows' holds its figures, 'kernels' where the device's time went.
    """
    origin = [result["command"], f"commit {result['commit']}", f"{result['ranks']} x {result['gpu'] or 'CPU'}"]
    print(*origin, versions(result), sep="\n")
    for name, value in result.get("roofline", {}).items():
        if value is not None:
            print(f"{name} {number(value)}")
    print(*(table(result[name]) for name in ("rows", "kernels") if name in result), sep="\n", flush=True)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=1, default=str) + "\n")


def versions(result: Mapping[str, Any]) -> str:
    """One line with the versions that decide speed."""
    shown = {name: version for name, version in result["packages"].items() if name.startswith(("torch", "vllm"))}
    shown |= {name: result["packages"][name] for name in ("transformers", "trl") if name in result["packages"]}
    return ", ".join(f"{name} {version}" for name, version in {"python": result["python"], **shown}.items())


def table(rows: Sequence[Row]) -> str:
    """Aligned columns, one for each name in any row, in order of appearance. A single row is turned on its side."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, *([number(row.get(name)) for name in columns] for row in rows)]
    if len(rows) == 1:
        lines = [list(pair) for pair in zip(*lines, strict=True)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(lines[0]))]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def number(value: object) -> str:
    """Four significant digits: large numbers with separators, counts as they are, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
