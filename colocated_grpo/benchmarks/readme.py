"""README's table of whole steps, from the files of docs/results: `python -m colocated_grpo.benchmarks.readme`.

What `benchmarks.step --json docs/results/step_....json` left decides every figure; nothing is typed by hand.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path("docs") / "results"
BEGIN = "<!-- whole steps: written by python -m colocated_grpo.benchmarks.readme -->"
END = "<!-- end of whole steps -->"
HEAD = (
    "| | TRL step | our step | faster | generate / train / sync | MFU | TRL memory, generate / train | our memory |",
    "|---|---|---|---|---|---|---|---|",
)


def main(root: Path = ROOT) -> int:
    readme = root / "README.md"
    readme.write_text(with_table(readme.read_text(), root))
    return 0


def with_table(text: str, root: Path) -> str:
    """The text of a README with what stands between the markers made anew. Raises ValueError without both markers."""
    before, found, rest = text.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not (found and closed):
        raise ValueError(f"README.md: needs the two lines {BEGIN!r} and {END!r}, in this order")
    return "".join([before, BEGIN, "\n", table(root), END, after])


def table(root: Path) -> str:
    """Smallest model first. Empty where no file holds a whole step."""
    results = [(file, json.loads(file.read_text())) for file in sorted((root / RESULTS).glob("step_*.json"))]
    steps = [(file, result) for file, result in results if "ours" in result]
    steps.sort(key=lambda one: (one[1]["parameters"], one[1]["ranks"]))
    if not steps:
        return ""
    return "\n".join(["", *HEAD, *(line(file.relative_to(root), result) for file, result in steps), "", ""])


def line(file: Path, result: Mapping[str, Any]) -> str:
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
