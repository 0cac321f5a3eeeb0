"""Build report.html, one self-contained page about a run, from the files in its run folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from colocated_grpo.errors import RunError
from colocated_grpo.settings.secret_values import masked
from colocated_grpo.tracking import files
from colocated_grpo.tracking.charts import chart_sections
from colocated_grpo.tracking.games import read_games
from colocated_grpo.tracking.overview import header
from colocated_grpo.tracking.page import STYLE, section
from colocated_grpo.tracking.text import as_html
from colocated_grpo.tracking.transcripts import before_and_after, last_training_rollouts, latest_games
from colocated_grpo.types import JsonObject

REFRESH_SECONDS = 30
"""Time between two reports of a running run, and after which the browser loads the page again."""
MAX_SHARE = 0.01
"""Largest share of the run's time that is spent on writing them."""


class LiveReport:
    """Rewrites the report of a run that trains, less often the longer it takes."""

    def __init__(self, run_dir: Path, note: Callable[[str], None]) -> None:
        """note: shows the path of the first report."""
        self._run_dir = run_dir
        self._note: Callable[[str], None] | None = note
        self._due = 0.0

    def step(self) -> None:
        """Write the report if one is due."""
        if (begin := time.monotonic()) < self._due:
            return
        with suppress(OSError, RunError):  # a run does not end because of its report
            path = write_report(self._run_dir, running=True)
            if self._note is not None:
                self._note(f"report: {path}, rewritten while the run goes on")
                self._note = None
        end = time.monotonic()
        self._due = end + max(REFRESH_SECONDS, (end - begin) / MAX_SHARE)


def write_report(run_dir: Path, *, running: bool = False) -> Path:
    """Write report.html, replacing an older one, and return its path.

    running: a process is still training; the page then reloads itself. Raises RunFolderError if there are no metrics,
    unless the run has failed before its first step.
    """
    failed = not running and "error" in files.read_summary(run_dir)
    rows = files.read_metrics(run_dir, may_be_empty=failed)
    rollouts = files.read_rollouts(run_dir)
    config = files.read_config(run_dir)
    body = [
        header(run_dir, rows, running=running),
        *chart_sections(rows),
        before_and_after(rollouts),
        last_training_rollouts(rollouts),
        latest_games(read_games(run_dir)),
        _config_table(config),
        _starts(files.read_environment(run_dir)),
    ]
    path = run_dir / files.REPORT_FILE
    files.write_atomically(path, _page(run_dir.resolve().name, "\n".join(body), running=running))
    return path


def _page(title: str, body: str, *, running: bool) -> str:
    # The content security policy blocks scripts and requests: model output stays inert even if an escape is missed.
    refresh = f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">\n' if running else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
{refresh}<title>{as_html(title)}</title><style>{STYLE}</style></head>
<body><main>
{body}
</main></body></html>
"""


def _config_table(config: JsonObject) -> str:
    lines = _table_lines(files.flatten(masked(config)))
    return section("Configuration", _collapsed("all settings", lines))


def _starts(starts: list[JsonObject]) -> str:
    parts = []
    for start in starts:
        facts = {key: value for key, value in start.items() if key != "packages"} | start.get("packages", {})
        lines = _table_lines(facts.items())
        title = f"started at step {start.get('first_step', 0)}, {start.get('time', '')}"
        parts.append(_collapsed(title, lines))
    return section("Environment", "".join(parts)) if parts else ""


def _table_lines(pairs: Iterable[tuple[str, Any]]) -> str:
    return "".join(f"<tr><td>{as_html(key)}</td><td>{as_html(value)}</td></tr>" for key, value in pairs)


def _collapsed(title: str, table_lines: str) -> str:
    return f"<details><summary>{as_html(title)}</summary><table>{table_lines}</table></details>"
