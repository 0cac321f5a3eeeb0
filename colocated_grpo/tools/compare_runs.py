"""Compare two runs metric by metric: colocated-grpo compare-runs A B [--assert-equal]"""

import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from colocated_grpo.runtime.program import OneLineParser
from colocated_grpo.tracking import files
from colocated_grpo.tracking.text import number, printable

WALL_CLOCK = ("seconds/*", "tokens_per_second*", "decode_tail", "memory/*")
"""Metrics that differ between two runs of the same computation."""

Values = dict[int, float | None]
"""Step -> value; None where the value was not finite."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison. Returns 0, 1 if a metric differs under --assert-equal, or 2 if a run cannot be read."""
    parser = OneLineParser(prog="colocated-grpo compare-runs", description="Compare two runs metric by metric.")
    parser.add_argument("a", metavar="A", help="run folder")
    parser.add_argument("b", metavar="B", help="run folder")
    ignored = "metrics to ignore besides the wall-clock ones, for example 'mismatch/*'; may be repeated"
    parser.add_argument("--ignore", action="append", default=[], metavar="PATTERN", help=ignored)
    parser.add_argument("--assert-equal", action="store_true", help="exit with code 1 if a metric differs")
    options = parser.parse_args(arguments)
    try:
        a, b = (files.read_metrics(files.run_folder(run)) for run in (options.a, options.b))
    except files.RunFolderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    metrics = compare(a, b, ignore=(*WALL_CLOCK, *options.ignore))
    console = Console()
    for name, run in (("A", options.a), ("B", options.b)):
        console.print(Text(printable(f"{name}: {run}")))
    console.print(_table(metrics))
    unequal = sum(first_difference(*both) is not None for both in metrics.values())
    console.print(f"{len(metrics) - unequal} metrics equal, {unequal} differ", highlight=False)
    return 1 if options.assert_equal and unequal else 0


def compare(a: list[files.Row], b: list[files.Row], ignore: Sequence[str]) -> dict[str, tuple[Values, Values]]:
    """Return each metric's values in both runs, in order of appearance, unless it matches a pattern of `ignore`."""
    of_a, of_b = _by_metric(a), _by_metric(b)
    return {
        label: (of_a.get((label, key), {}), of_b.get((label, key), {}))
        for label, key in of_a | of_b
        if not any(fnmatchcase(key, pattern) for pattern in ignore)
    }


def first_difference(a: Values, b: Values) -> int | None:
    """Return the first step where the values differ or only one run has a value; None when the runs are equal."""
    # None is a value that was not finite, so a missing step needs another default.
    return next((step for step in sorted(a.keys() | b.keys()) if a.get(step, "") != b.get(step, "")), None)


def _by_metric(rows: list[files.Row]) -> dict[tuple[str, str], Values]:
    """Return (label, key) -> values by step."""
    table: dict[tuple[str, str], Values] = {}
    for row in rows:
        for key, value in row.items():
            if key not in ("kind", "step"):
                label = key if row["kind"] == files.TRAIN or key.startswith("held_out/") else f"{row['kind']}: {key}"
                table.setdefault((label, key), {})[row["step"]] = value
    return table


def _table(metrics: Mapping[str, tuple[Values, Values]]) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold cyan")
    table.add_column("metric", overflow="fold")
    for title in ("last A", "last B", "mean A", "mean B", "differs from"):
        table.add_column(title, justify="right")
    for metric, (a, b) in metrics.items():
        step = first_difference(a, b)
        (last_a, mean_a), (last_b, mean_b) = _last_and_mean(a), _last_and_mean(b)
        figures = (last_a, last_b, mean_a, mean_b)
        where = Text("equal", style="green") if step is None else Text(str(step), style="bold red")
        table.add_row(Text(printable(metric)), *map(number, figures), where)
    return table


def _last_and_mean(values: Values) -> tuple[float | None, float | None]:
    finite = [value for value in values.values() if value is not None]
    return values[max(values)] if values else None, fmean(finite) if finite else None


if __name__ == "__main__":
    sys.exit(main())
