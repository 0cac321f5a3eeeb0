"""Tell two runs apart, metric by metric: python -m colocated_grpo.tools.compare_runs A B [--assert-equal]"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from colocated_grpo.tracking import files
from colocated_grpo.tracking.files import Row, RunFolderError
from colocated_grpo.tracking.text import number, printable

WALL_CLOCK = ("seconds/*", "tokens_per_second*", "memory/*")
"""What differs between two runs of the same computation."""

Values = dict[int, float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One metric of two runs; a metric that one run lacks has no values there."""

    metric: str
    a: Values
    b: Values
    """Step -> value; None where the value was not finite."""

    @property
    def first_step(self) -> int | None:
        """The first step where the runs differ, counting a step that only one of them has; None when they are equal."""
        steps = sorted(self.a.keys() | self.b.keys())
        return next((step for step in steps if self._at(self.a, step) != self._at(self.b, step)), None)

    @staticmethod
    def _at(values: Values, step: int) -> tuple[bool, float | None]:
        # Present-but-not-finite and absent are different things, and both are None in a plain .get.
        return step in values, values.get(step)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 when --assert-equal is given and a metric differs; 2 when a run cannot be read."""
    options = _parser().parse_args(arguments)
    try:
        a, b = (files.read_metrics(files.run_folder(run)) for run in (options.a, options.b))
    except RunFolderError as error:
        print(error, file=sys.stderr)
        return 2
    differences = compare(a, b, ignore=(*WALL_CLOCK, *options.ignore))
    console = Console()
    console.print(_table(differences))
    unequal = [one for one in differences if one.first_step is not None]
    console.print(f"{len(differences) - len(unequal)} metrics equal, {len(unequal)} differ", highlight=False)
    return 1 if options.assert_equal and unequal else 0


def compare(a: list[Row], b: list[Row], ignore: Sequence[str]) -> list[Difference]:
    """Every metric of either run that matches no pattern, in order of appearance."""
    by_metric_a, by_metric_b = _by_metric(a), _by_metric(b)
    metrics = dict.fromkeys([*by_metric_a, *by_metric_b])
    return [
        Difference(metric=label, a=by_metric_a.get((label, key), {}), b=by_metric_b.get((label, key), {}))
        for label, key in metrics
        if not any(fnmatchcase(key, pattern) for pattern in ignore)
    ]


def _by_metric(rows: list[Row]) -> dict[tuple[str, str], Values]:
    """(label, key) -> values by step."""
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
    for one in differences:
        step = one.first_step
        figures = [_last(one.a), _last(one.b), _mean(one.a), _mean(one.b)]
        where = Text("equal", style="green") if step is None else Text(str(step), style="bold red")
        table.add_row(Text(printable(one.metric)), *map(number, figures), where)
    return table


def _last(values: Values) -> float | None:
    return values[max(values)] if values else None


def _mean(values: Values) -> float | None:
    finite = [value for value in values.values() if value is not None]
    return sum(finite) / len(finite) if finite else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="compare_runs", description="Tell two runs apart, metric by metric.")
    parser.add_argument("a", metavar="A", help="run folder")
    parser.add_argument("b", metavar="B", help="run folder")
    ignored = "metrics to leave out beside the wall-clock ones, for example 'mismatch/*'; may be repeated"
    parser.add_argument("--ignore", action="append", default=[], metavar="PATTERN", help=ignored)
    parser.add_argument("--assert-equal", action="store_true", help="exit with 1 when a metric differs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
