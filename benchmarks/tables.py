"""The tables of measurements in the docs, from docs/results: `python -m benchmarks.tables`.

`step_*.json` are results of `benchmarks.step`, `growth_*.json` of `benchmarks.growth`. Every figure comes from a file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from colocated_grpo.types import JsonObject

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("docs/results")
PAGE = Path("docs/measurements.md")
STEP_COLUMNS = (
    "Model and GPUs",
    "Step, ours",
    "Step, TRL",
    "Generate / train / sync, ours",
    "Generate / score + train / sync, TRL",
    "GPU memory at a phase's end, ours",
    "GPU memory at a phase's end, TRL",
)
GROWTH_COLUMNS = (
    "Model and GPUs",
    "Completions per step",
    "Longest completion",
    "Tokens per step",
    "Generate",
    "Train",
    "Step",
    "us per token",
    "Tokens/s, first row of the file = 1",
)
AXES = ("completions", "length", "gpus")
NOT_MEASURED = "-"


class ResultFile(NamedTuple):
    """A result and its path, relative to the page."""

    path: Path
    content: JsonObject


def main(root: Path = ROOT) -> int:
    (root / PAGE).write_text(with_tables(root))
    return 0


def with_tables(root: Path) -> str:
    """Return the text of the page with new tables between their markers. Raises ValueError if a marker is missing."""
    text = (root / PAGE).read_text()
    for name, lines in (("whole steps", step_lines(root)), ("growth", growth_lines(root))):
        begin, end = markers(name)
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"{PAGE}: needs the two lines {begin!r} and {end!r}, in this order")
        text = "".join([before, begin, "\n", "\n".join(["", *lines, "", ""]) if lines else "", end, after])
    return text


def markers(name: str) -> tuple[str, str]:
    return f"<!-- {name}: written by python -m benchmarks.tables -->", f"<!-- end of {name} -->"


def step_lines(root: Path) -> list[str]:
    """Return the table of whole steps, smallest model first; [] without results."""
    files = [file for file in read_results(root, "step") if "ours" in file.content]
    files.sort(key=lambda file: (file.content["parameters"], file.content["ranks"]))
    return table(STEP_COLUMNS, [step_cells(file) for file in files])


def growth_lines(root: Path) -> list[str]:
    """Return one table for all axes, with each file's sizes in increasing order; [] without results."""
    files = sorted(read_results(root, "growth"), key=lambda file: AXES.index(file.content["axis"]))
    return table(GROWTH_COLUMNS, [growth_cells(file, row) for file in files for row in file.content["rows"]])


def read_results(root: Path, kind: str) -> list[ResultFile]:
    """Return the results whose file names begin with `kind`, sorted by name, with paths relative to the page."""
    files = sorted((root / RESULTS).glob(f"{kind}_*.json"))
    return [ResultFile(file.relative_to((root / PAGE).parent), json.loads(file.read_text())) for file in files]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; [] without rows."""
    if not rows:
        return []
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]


def growth_cells(file: ResultFile, row: Mapping[str, float]) -> list[str]:
    return [
        f"[{file.content['shape']}, {row['ranks']} x {file.content['gpu'] or 'CPU'}]({file.path.as_posix()})",
        f"{row['completions']:,}",
        f"{row['longest']:,}",
        f"{row['tokens']:,.0f}",
        *(seconds(row[f"{phase} s"]) for phase in ("generate", "train", "step")),
        f"{row['step us/token']:.1f}",
        f"{row['tokens/s x']:.2f}",
    ]


def step_cells(file: ResultFile) -> list[str]:
    result = file.content
    ours = result["ours"]["median"]
    peer = result["peer"]["median"] if result.get("peer") else {}
    return [
        f"[{trained_model(result)}, {result['ranks']} x {result['gpu'] or 'CPU'}]({file.path.as_posix()})",
        seconds(ours["seconds/step"]),
        with_ratio(peer, ours),
        phases(ours),
        phases(peer),
        memory_in_use(ours),
        memory_in_use(peer),
    ]


def trained_model(result: JsonObject) -> str:
    """Return the model's shape, and the rank of the adapter if one was trained. Older results have no 'lora'."""
    lora = result.get("lora")
    return result["work"]["shape"] + (f", LoRA of rank {lora['r']}" if lora else "")


def with_ratio(peer: Mapping[str, float], ours: Mapping[str, float]) -> str:
    """Return the peer's step time, and its ratio to ours."""
    if not peer:
        return NOT_MEASURED
    return f"{seconds(peer['seconds/step'])} ({peer['seconds/step'] / ours['seconds/step']:.1f} x)"


def phases(median: Mapping[str, float]) -> str:
    """Return the time of generation, training and weight sync.

    TRL's training includes its 'score' phase, the forward pass for the log-probabilities of the rollouts before the
    update. Our trainer skips that pass on-policy.
    """
    if not median:
        return NOT_MEASURED
    training = median["seconds/train"] + median.get("seconds/score", 0.0)
    return " / ".join(seconds(value) for value in (median["seconds/generate"], training, median["seconds/sync"]))


def seconds(value: float) -> str:
    """Return seconds, or milliseconds below a tenth of a second."""
    return f"{1e3 * value:.1f} ms" if value < 0.1 else f"{value:.1f} s"


def memory_in_use(median: Mapping[str, float]) -> str:
    """Return the device memory used by all processes at the end of generation or training, whichever is larger."""
    used = [median[name] for name in ("memory/generate_gib", "memory/train_gib") if name in median]
    return f"{max(used):.0f} GiB" if used else NOT_MEASURED


if __name__ == "__main__":
    sys.exit(main())
