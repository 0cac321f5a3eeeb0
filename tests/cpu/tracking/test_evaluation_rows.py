"""Evaluation sets on the console and in the report."""

from __future__ import annotations

from pathlib import Path

from colocated_grpo.tracking import files
from colocated_grpo.tracking.charts import chart_sections
from tests.support.tracked_run import TrackedRun, groups_of


def test_a_set_is_one_line_on_the_console_and_one_chart_in_the_report(tmp_path: Path) -> None:
    run = TrackedRun(tmp_path).train()
    for step in (0, 6):
        row = {f"eval/aime/{name}": 0.25 + step / 10 for name in ("mean", "pass@1", "pass@8", "maj@8")}
        run.tracker.evaluation(
            step, row | {"eval/aime/mean_stderr": 0.05 + step, "eval/aime/length": 9.0}, groups_of(0)
        )
    run.finish()
    assert "evaluation of aime, step 0:  mean 0.250 (+-0.050)  pass@1 0.250  pass@8" in run.printed
    assert "held-out evaluation, step 6:  reward 0.800" in run.printed
    page = "".join(chart_sections(files.read_metrics(tmp_path)))
    assert page.count("Evaluation of aime") == 1
    assert "eval/aime/mean" not in page
    assert "eval/aime/length = 9" in page, "a metric that stays constant is listed"
    [before, *_] = [row for row in files.read_metrics(tmp_path) if "held_out/reward" in row]
    assert "eval/aime/mean" not in before
