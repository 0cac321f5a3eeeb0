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


def draw(run_dir: Path, width: int) -> str:
    """Return the console after the last step of the run as SVG, without the web fonts that rich refers to."""
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
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
