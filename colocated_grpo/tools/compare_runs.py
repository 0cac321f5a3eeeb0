"""Compare two runs metric by metric: colocated-grpo compare-runs A B [--assert-equal]"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One metric of runs A and B. `a` or `b` is empty when that run does not have the metric."""

    metric: str
    a: Values
    b: Values

    @property
    def first_step(self) -> int | None:
        """First step where the values differ or only one run has a value; None when the runs are equal."""
        # None is a value that was not finite, so a missing step needs another default.
        steps = sorted(self.a.keys() | self.b.keys())
        return next((step for step in steps if self.a.get(step, "") != self.b.get(step, "")), None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison. Returns 0, 1 if a metric differs under --assert-equal, or 2 if a run cannot be read."""
    options = _parser().parse_args(arguments)
    try:
        a, b = (files.read_metrics(files.run_folder(run)) for run in (options.a, options.b))
    except files.RunFolderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    differences = compare(a, b, ignore=(*WALL_CLOCK, *options.ignore))
    console = Console()
    for name, run in (("A", options.a), ("B", options.b)):
        console.print(Text(printable(f"{name}: {run}")))
    console.print(_table(differences))
    unequal = [difference for difference in differences if difference.first_step is not None]
    console.print(f"{len(differences) - len(unequal)} metrics equal, {len(unequal)} differ", highlight=False)
    return 1 if options.assert_equal and unequal else 0


def compare(a: list[files.Row], b: list[files.Row], ignore: Sequence[str]) -> list[Difference]:
    """Compare every metric of either run that matches no pattern of `ignore`, in order of appearance."""
    by_metric_a, by_metric_b = _by_metric(a), _by_metric(b)
    metrics = dict.fromkeys([*by_metric_a, *by_metric_b])
    return [
        Difference(metric=label, a=by_metric_a.get((label, key), {}), b=by_metric_b.get((label, key), {}))
        for label, key in metrics
        if not any(fnmatchcase(key, pattern) for pattern in ignore)
    ]


def _by_metric(rows: list[files.Row]) -> dict[tuple[str, str], Values]:
    """Return (label, key) -> values by step."""
    table: dict[tuple[str, str], Values] = {}
    for row in rows:
        for key, value in row.items():
            if key not in ("kind", "step"):
                label = key if row["kind"] == files.TRAIN or key.startswith("held_out/") else f"{row['kind']}: {key}"
                table.setdefault((label, key), {})[row["step"]] = value
    return table


def _table(differences: list[Difference]) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold cyan")
    table.add_column("metric", overflow="fold")
    for title in ("last A", "last B", "mean A", "mean B", "differs from"):
        table.add_column(title, justify="right")
    for difference in differences:
        step, a, b = difference.first_step, difference.a, difference.b
        (last_a, mean_a), (last_b, mean_b) = _last_and_mean(a), _last_and_mean(b)
        figures = (last_a, last_b, mean_a, mean_b)
        where = Text("equal", style="green") if step is None else Text(str(step), style="bold red")
        table.add_row(Text(printable(difference.metric)), *map(number, figures), where)
    return table


def _last_and_mean(values: Values) -> tuple[float | None, float | None]:
    finite = [value for value in values.values() if value is not None]
    return values[max(values)] if values else None, fmean(finite) if finite else None


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="colocated-grpo compare-runs", description="Compare two runs metric by metric.")
    parser.add_argument("a", metavar="A", help="run folder")
    parser.add_argument("b", metavar="B", help="run folder")
    ignored = "metrics to ignore besides the wall-clock ones, for example 'mismatch/*'; may be repeated"
    parser.add_argument("--ignore", action="append", default=[], metavar="PATTERN", help=ignored)
    parser.add_argument("--assert-equal", action="store_true", help="exit with code 1 if a metric differs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
