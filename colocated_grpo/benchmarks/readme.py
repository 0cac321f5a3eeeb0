"""README's tables, from the files of docs/results: `python -m colocated_grpo.benchmarks.readme`.

What `benchmarks.step` and `benchmarks.growth` left in files that begin with `step_` and `growth_` decides every figure;
nothing is typed by hand.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path("docs") / "results"
STEP_HEAD = (
    "| | TRL step | our step | faster | generate / train / sync | MFU | TRL memory, generate / train | our memory |",
    "|---|---|---|---|---|---|---|---|",
)
GROWTH_HEAD = (
    "| | completions | longest | tokens | generate | train | step | us/token | tokens/s, times the first |",
    "|---|---|---|---|---|---|---|---|---|",
)
AXES = ("completions", "length", "gpus")


def main(root: Path = ROOT) -> int:
    readme = root / "README.md"
    readme.write_text(with_tables(readme.read_text(), root))
    return 0


def with_tables(text: str, root: Path) -> str:
    """The text of a README with what stands between each table's markers made anew.

    Raises ValueError without both markers of each.
    """
    for name, lines in {"whole steps": step_lines(root), "growth": growth_lines(root)}.items():
        begin, end = markers(name)
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"README.md: needs the two lines {begin!r} and {end!r}, in this order")
        table = "\n".join(["", *lines, "", ""]) if lines else ""
        text = "".join([before, begin, "\n", table, end, after])
    return text


def markers(name: str) -> tuple[str, str]:
    return f"<!-- {name}: written by python -m colocated_grpo.benchmarks.readme -->", f"<!-- end of {name} -->"


def step_lines(root: Path) -> list[str]:
    """Smallest model first. None where no file holds a whole step."""
    steps = [(file, result) for file, result in read_results(root, "step") if "ours" in result]
    steps.sort(key=lambda one: (one[1]["parameters"], one[1]["ranks"]))
    return [*STEP_HEAD, *(step_line(file, result) for file, result in steps)] if steps else []


def growth_lines(root: Path) -> list[str]:
    """One table for all axes: the sizes of each file, smallest first, under its name."""
    files = sorted(read_results(root, "growth"), key=lambda one: AXES.index(one[1]["axis"]))
    rows = [growth_line(file, result, row) for file, result in files for row in result["rows"]]
    return [*GROWTH_HEAD, *rows] if rows else []


def read_results(root: Path, kind: str) -> list[tuple[Path, dict[str, Any]]]:
    """Files of docs/results that begin with the kind, by name, with what they hold."""
    files = sorted((root / RESULTS).glob(f"{kind}_*.json"))
    return [(file.relative_to(root), json.loads(file.read_text())) for file in files]


def growth_line(file: Path, result: Mapping[str, Any], row: Mapping[str, float]) -> str:
    cells = [
        f"[{result['shape']}, {row['ranks']} x {result['gpu'] or 'CPU'}]({file.as_posix()})",
        f"{row['completions']:,}",
        f"{row['longest']:,}",
        f"{row['tokens']:,.0f}",
        *(seconds(row[f"{phase} s"]) for phase in ("generate", "train", "step")),
        f"{row['step us/token']:.1f}",
        f"{row['tokens/s x']:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def step_line(file: Path, result: Mapping[str, Any]) -> str:
    """One row. A dash stands for what the file does not hold."""
    ours = result["ours"]["median"]
    peer = result["peer"]["median"] if result.get("peer") else {}
    device = result["gpu"] or "CPU"
    cells = [
        f"[{result['work']['shape']}, {result['ranks']} x {device}]({file.as_posix()})",
        seconds(peer.get("seconds/step")),
        seconds(ours["seconds/step"]),
        factor(result["speedup"].get("seconds/step")),
        " / ".join(seconds(ours[f"seconds/{phase}"]) for phase in ("generate", "train", "sync")),
        f"{100 * ours['mfu']:.0f} %",
        memory(peer),
        memory(ours),
    ]
    return f"| {' | '.join(cells)} |"


def seconds(value: float | None) -> str:
    """Milliseconds below a tenth of a second."""
    if value is None:
        return "-"
    return f"{1e3 * value:.1f} ms" if value < 0.1 else f"{value:.1f} s"


def factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} x"


def memory(median: Mapping[str, float]) -> str:
    """In use on the device, by everybody, as generation ends and as training ends."""
    used = [median.get(f"memory/{phase}_gib") for phase in ("generate", "train")]
    return " / ".join("-" if gib is None else f"{gib:.0f} GiB" for gib in used)


if __name__ == "__main__":
    sys.exit(main())
