"""The result of a run, read from its folder."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from pathlib import Path

from colocated_grpo.runtime.run_folder import CHECKPOINTS, complete_checkpoints
from colocated_grpo.tracking import files

EXPORTS = ("final_model", "final_adapter")
BESTS = ("best_model", "best_adapter")
REPORT_HEIGHT = 600


@dataclass(frozen=True, kw_only=True)
class Result:
    """Figures and files of an ended run. In a notebook it shows the run's report."""

    outcome: str
    """finished, or stopped by a signal; the checkpoint of a stopped run continues with resume="auto"."""
    steps: int
    """Completed steps of the whole run, those before a resume included."""
    metrics: dict[str, float] = field(repr=False)
    """Metrics of the last training step, by the names of metrics.jsonl."""
    evaluation: dict[str, float] = field(repr=False)
    """Metrics of the last evaluation."""
    folder: Path
    """The run folder."""
    checkpoint: Path | None
    """The newest complete checkpoint."""
    model: Path | None
    """The exported model, or the adapter of a run with policy.lora; None for a stopped run."""
    best_model: Path | None
    """The model, or the adapter, of the best evaluation, if the run kept one."""

    def _repr_html_(self) -> str:
        report = self.folder / files.REPORT_FILE
        if not report.is_file():
            return f"<pre>{html.escape(repr(self))}</pre>"
        page = html.escape(report.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" sandbox style="width: 100%; height: {REPORT_HEIGHT}px; border: 0"></iframe>'


def read_result(folder: Path) -> Result:
    """Return the result of the ended run in `folder`."""
    summary = files.read_summary(folder)
    rows = list(files.read_rows(folder / files.METRICS_FILE))
    exports, bests = ([path for name in names if (path := folder / name).is_dir()] for names in (EXPORTS, BESTS))
    return Result(
        outcome=summary["state"],
        steps=summary["steps"],
        metrics=_last(rows, files.TRAIN),
        evaluation=_last(rows, files.EVALUATION),
        folder=folder,
        checkpoint=next(reversed(complete_checkpoints(folder / CHECKPOINTS)), None),
        model=next(reversed(exports), None),
        best_model=next(reversed(bests), None),
    )


def _last(rows: list[files.Row], kind: str) -> dict[str, float]:
    chosen = [row for row in rows if row["kind"] == kind]
    return {key: value for key, value in chosen[-1].items() if key not in ("kind", "step")} if chosen else {}
