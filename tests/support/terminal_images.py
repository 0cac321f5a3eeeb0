"""Draw the live console of a run as docs/images/terminal_*.svg: python -m tests.support.terminal_images RUN"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from colocated_grpo.tracking import files
from colocated_grpo.tracking.console import LiveDisplay
from tests.support.paths import ROOT

WIDTHS = (80, 120, 160)
FOLDER = ROOT / "docs/images"


def lines_above(run_dir: Path) -> list[str]:
    """Return the lines that scroll above the table: of the run's start, and the last evaluation and completion."""
    log = (run_dir / "run.log").read_text(encoding="utf-8").replace(f"{run_dir.resolve().parents[1]}/", "").splitlines()
    lines = [line for line in log if not line.startswith(("---", "step")) and not line.endswith("...")]
    first = next(number for number, line in enumerate(lines) if line.startswith("held-out"))
    evaluations, completions = ([line for line in lines if line.startswith(name)] for name in ("held-out", "  reward"))
    return [*lines[:first], evaluations[-1], completions[-1]]


def draw(run_dir: Path, width: int) -> str:
    """Return the console after the last step of the run as SVG, without the web fonts that rich refers to."""
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in lines_above(run_dir):
        console.print(line, markup=False, highlight=False)
    rows = files.read_metrics(run_dir)
    steps = files.read_config(run_dir)["training_steps"]
    display = LiveDisplay(console, steps)
    held_out: dict[str, float] = {}
    for row in rows:
        numbers = {key: value for key, value in row.items() if key not in ("kind", "step") and value is not None}
        if row["kind"] == files.EVALUATION:
            held_out = numbers
        else:
            display.step(row["step"], held_out | numbers)
    console.print(display._render())
    svg = console.export_svg(title=f"{width} columns")
    return re.sub(r"@font-face\s*\{.*?\}", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for width in WIDTHS:
        (FOLDER / f"terminal_{width}.svg").write_text(draw(Path(sys.argv[1]), width), encoding="utf-8")
