"""Output of every benchmark: a printed table and one JSON file, both with the versions and machine they come from."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from colocated_grpo.tracking.tracker import describe_start
from colocated_grpo.types import JsonObject

Row = Mapping[str, Any]
"""One line of a table: column name -> value. Column names include the unit."""
RESULTS = Path(__file__).parent.parent / "docs" / "results"
PEER_PACKAGES = ("liger-kernel",)
"""Packages that only the peer uses; their versions are recorded as well."""


def describe(benchmark: str, arguments: Sequence[str], *, ranks: int) -> JsonObject:
    """Return the origin of a result: command, commit, versions, device.

    Example: describe("sync", ["--gpus", "2"], ranks=2)
    """
    start = describe_start(first_step=0)
    return {
        "benchmark": benchmark,
        "command": shlex.join(["python", "-m", f"benchmarks.{benchmark}", *arguments]),
        "commit": start["git"],
        "time": start["time"],
        "python": start["python"],
        "packages": start["packages"] | _installed(PEER_PACKAGES),
        "machine": start["machine"],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "ranks": ranks,
    }


def _installed(packages: Sequence[str]) -> dict[str, str]:
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def publish(result: Mapping[str, Any], file: Path | None) -> None:
    """Print the result's origin, its roofline and its tables, and write all of it to `file` if given.

    result: `describe` plus the benchmark's own keys. 'rows' holds its figures, 'kernels' the device time by kernel.
    """
    origin = [result["command"], f"commit {result['commit']}", f"{result['ranks']} x {result['gpu'] or 'CPU'}"]
    print(*origin, versions(result), sep="\n")
    for name, value in result.get("roofline", {}).items():
        if value is not None:
            print(f"{name} {number(value)}")
    print(*(table(result[name]) for name in ("rows", "kernels") if name in result), sep="\n", flush=True)
    if file is not None:
        print(*since_kept(result, RESULTS / file.name), sep="\n", flush=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=1, default=str) + "\n")


def since_kept(result: Mapping[str, Any], kept: Path) -> list[str]:
    """Return one line for each row that was measured before on the same devices. kept: the result in docs/results.

    The git history of `kept` has the earlier ones.
    """
    if not kept.exists():
        return []
    former = json.loads(kept.read_text())
    if (former.get("gpu"), former.get("ranks")) != (result["gpu"], result["ranks"]):
        return []
    pairs = zip(former.get("rows", ()), result.get("rows", ()), strict=False)
    return [
        f"{label(row)}: {number(now)} s, {now / then - 1:+.1%} since commit {str(former['commit'])[:8]}"
        for before, row in pairs
        if label(before) == label(row) and (now := seconds_of(row)) and (then := seconds_of(before))
    ]


def label(row: Row) -> str:
    """Return the row's texts, which say what was measured."""
    return " ".join(value for value in row.values() if isinstance(value, str))


def seconds_of(row: Row) -> float | None:
    """Return what the row took; None if it has no such figure. Rows of `benchmarks.step` compare one figure each."""
    if str(row.get("figure", "")).startswith("seconds"):
        return row["ours"]
    return row.get("seconds")


def versions(result: Mapping[str, Any]) -> str:
    """Return one line with the versions that affect speed."""
    packages = result["packages"]
    shown = {name: version for name, version in packages.items() if name.startswith(("torch", "vllm"))}
    shown |= {name: packages[name] for name in ("transformers", "trl", *PEER_PACKAGES) if name in packages}
    return ", ".join(f"{name} {version}" for name, version in {"python": result["python"], **shown}.items())


def table(rows: Sequence[Row]) -> str:
    """Return aligned columns, one for each name in any row, in order of appearance. A single row is transposed."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, *([number(row.get(name)) for name in columns] for row in rows)]
    if len(rows) == 1:
        lines = [list(pair) for pair in zip(*lines, strict=True)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(lines[0]))]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def number(value: object) -> str:
    """Format with four significant digits; thousands separators from 1,000 up; integers in full; '' for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
