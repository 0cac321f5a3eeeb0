"""Tables and the picture of `benchmarks.learn`, from JSON files."""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.tables import table
from colocated_grpo.tracking.page import nice_ticks, smooth
from colocated_grpo.tracking.text import as_html
from colocated_grpo.types import JsonObject

RESULTS = Path("docs/results")
PICTURE = Path("docs/images/learning.svg")
WINDOW = 20
"""Steps of one column of the table."""
SCORES = "scores_"
SHARED_KEYS = ("commit", "python", "packages", "machine", "gpu", "ranks", "work")
"""Keys that a collected file has once, copied from the first run; 'work' without its seed."""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, GAP = 860, 300, 48, 14, 56, 44, 44
COLORS = {"ours": "#3b82f6", "TRL": "#ea6a1f"}
"""Medium brightness: readable on white and on black, as is the text."""
TEXT, GRID = "#7d8590", "#7d859055"


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    collecting = commands.add_parser("collect", help="write docs/results/learn_*.json")
    collecting.add_argument("--out", type=Path, required=True, help="folder of the runs' JSON files")
    collecting.add_argument("--results", type=Path, default=RESULTS)
    collecting.set_defaults(command=collect)
    printing = commands.add_parser("table", help="print the tables")
    printing.add_argument("files", type=Path, nargs="+", help="files of `collect`")
    printing.add_argument("--reach", type=float, default=0.8, help="reward whose wall seconds are shown")
    printing.set_defaults(command=print_tables)
    drawing = commands.add_parser("draw", help="draw one file of `collect`")
    drawing.add_argument("file", type=Path)
    drawing.add_argument("--image", type=Path, default=PICTURE)
    drawing.add_argument("--title", help="default: the work")
    drawing.set_defaults(command=draw)


def read_runs(folder: Path) -> dict[str, JsonObject]:
    """Return the results of `learn run` in a folder by name, without those of tuning."""
    contents = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    return {
        name: content
        for name, content in contents.items()
        if content.get("benchmark") == "learn" and not name.startswith("tuned-")
    }


def scores_file(folder: Path, model: str) -> Path:
    return folder / f"{SCORES}{model}.json"


def collect(options: argparse.Namespace) -> int:
    """Write one file for each work: its runs, their held-out scores, and how TRL was tuned."""
    works: dict[str, dict[str, JsonObject]] = defaultdict(dict)
    for name, result in read_runs(options.out).items():
        works["_".join(name.split("_")[:-2])][name] = result
    for work, runs in works.items():
        first = next(iter(runs.values()))
        file = scores_file(options.out, first["work"]["model"])
        scores: JsonObject = json.loads(file.read_text()) if file.exists() else {}
        tuning = options.out / f"tuned_{work}.json"
        content = {
            "benchmark": "learn",
            **{key: first[key] for key in SHARED_KEYS},
            "work": {key: value for key, value in first["work"].items() if key not in ("seed", "parallel")},
            "start_held_out": scores.get(first["work"]["task"]),
            "tuning": json.loads(tuning.read_text()) if tuning.exists() else None,
            "runs": [
                {
                    **{key: run[key] for key in ("command", "time", "trainer", "label", "start_seconds")},
                    **{key: run["work"][key] for key in ("seed", "parallel")},
                    "configuration": run["configuration"],
                    "held_out": scores.get(name),
                    "steps": [{key: _short(value) for key, value in row.items()} for row in run["steps"]],
                }
                for name, run in runs.items()
            ],
        }
        target = options.results / f"learn_{work}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(content, indent=1) + "\n")
        print(target)
    return 0


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def trainer_name(run: Mapping[str, str]) -> str:
    """Return the trainer's name in tables and pictures, with TRL's setup where several were run."""
    return "ours" if run["trainer"] == "ours" else " ".join(filter(None, ["TRL", run["label"]]))


def by_trainer(runs: Sequence[JsonObject]) -> dict[str, list[JsonObject]]:
    groups: dict[str, list[JsonObject]] = defaultdict(list)
    for run in runs:
        groups[trainer_name(run)].append(run)
    return groups


def print_tables(options: argparse.Namespace) -> int:
    for file in options.files:
        content = json.loads(file.read_text())
        print(f"{file.name}: {describe_work(content)}", *table_lines(content, options.reach), "", sep="\n")
    return 0


def describe_work(content: JsonObject) -> str:
    work = content["work"]
    return f"{work['model']}, {work['task']}, {work['mode']}, {work['prompts']} x {work['group_size']} completions"


def table_lines(content: JsonObject, reach: float) -> list[str]:
    """Return a Markdown table with a row for each trainer. Figures of several seeds: mean and half of their range.

    Rewards are of all runs, seconds only of those that had the device to themselves.
    """
    groups = by_trainer(content["runs"])
    steps = min(len(run["steps"]) for run in content["runs"])
    windows = [(first, min(first + WINDOW, steps)) for first in range(0, steps, WINDOW)]
    columns = ["Trainer", "Seeds", *(f"Steps {first}-{last - 1}" for first, last in windows)]
    columns += ["Held out", "Greedy", "Start", "Step, median", f"To reward {reach:g}"]
    rows = []
    for name, runs in groups.items():
        alone = [run for run in runs if run["parallel"] == 1]
        scores = [run["held_out"] for run in runs if run["held_out"]]
        times = [seconds for run in alone if (seconds := seconds_to(run["steps"], reach)) is not None]
        rows.append(
            [
                name,
                f"{len(runs)}",
                *(spread([window_mean(run["steps"], *window) for run in runs]) for window in windows),
                spread([score["sampled"]["mean"] for score in scores]),
                spread([score["greedy"]["mean"] for score in scores]),
                spread([run["start_seconds"] for run in alone], " s", 0),
                spread([statistics.median(row["seconds"] for row in run["steps"]) for run in alone], " s", 2),
                spread(times, " s", 0) if len(times) == len(alone) else "not reached",
            ]
        )
    if start := content["start_held_out"]:
        held_out = [f"{start[key]['mean']:.3f}" for key in ("sampled", "greedy")]
        rows.append(["start model", "", *("" for _ in windows), *held_out, "", "", ""])
    return table(columns, rows)


def spread(values: Sequence[float], unit: str = "", digits: int = 3) -> str:
    """Return the mean, and half of the range of several values; '-' for none."""
    if not values:
        return "-"
    mean = f"{statistics.mean(values):.{digits}f}"
    half = f" +- {(max(values) - min(values)) / 2:.{digits}f}" if len(values) > 1 else ""
    return mean + half + unit


def window_mean(steps: Sequence[JsonObject], first: int, last: int) -> float:
    return statistics.mean(row["reward"] for row in steps[first:last])


def seconds_to(steps: Sequence[JsonObject], reward: float) -> float | None:
    """Return the wall seconds from the start of the first step until the smoothed reward reaches `reward`."""
    for wall, value in smooth([(row["wall"], row["reward"]) for row in steps]):
        if value >= reward:
            return wall
    return None


def draw(options: argparse.Namespace) -> int:
    content = json.loads(options.file.read_text())
    options.image.parent.mkdir(parents=True, exist_ok=True)
    options.image.write_text(picture(content, options.title or describe_work(content)))
    print(options.image)
    return 0


Curve = list[tuple[float, float, float, float]]
"""x, and the mean, smallest and largest reward over seeds."""


def picture(content: JsonObject, title: str) -> str:
    """Return an SVG with reward against step and against wall seconds, and a band over seeds.

    The second panel has only runs that had the device to themselves.
    """
    groups = {name: runs for name, runs in by_trainer(content["runs"]).items() if name in COLORS}
    by_step = {name: curve([_points(run, "step") for run in runs]) for name, runs in groups.items()}
    alone = {name: [run for run in runs if run["parallel"] == 1] for name, runs in groups.items()}
    by_wall = {name: curve([_points(run, "wall") for run in runs]) for name, runs in alone.items() if runs}
    panels = [(by_step, "step"), *([(by_wall, "seconds of training")] if by_wall else [])]
    width = (WIDTH - (len(panels) - 1) * GAP) / len(panels)
    top = max(high for curves, _ in panels for points in curves.values() for *_, high in points)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{TEXT}"><title>{as_html(title)}</title>',
        f'<text x="{LEFT}" y="18" font-size="14">Reward: {as_html(title)}</text>',
    ]
    for index, (name, runs) in enumerate(groups.items()):
        x = LEFT + 150 * index
        parts.append(f'<rect x="{x}" y="31" width="18" height="4" rx="2" fill="{COLORS[name]}"/>')
        seeds = f"{len(runs)} seed{'s' if len(runs) > 1 else ''}"
        parts.append(f'<text x="{x + 24}" y="38">{name}, {seeds}</text>')
    for index, (curves, label) in enumerate(panels):
        parts.append(f'<g transform="translate({index * (width + GAP):.1f} 0)">{_panel(curves, label, width, top)}</g>')
    return "".join([*parts, "</svg>\n"])


def _points(run: JsonObject, axis: str) -> list[tuple[float, float]]:
    steps = run["steps"]
    places = [float(index) for index in range(len(steps))] if axis == "step" else [row["wall"] for row in steps]
    return smooth(list(zip(places, (row["reward"] for row in steps), strict=True)))


def curve(seeds: Sequence[Sequence[tuple[float, float]]]) -> Curve:
    """Return mean, minimum and maximum of several curves at the x of the first, up to the end of the shortest."""
    end = min(points[-1][0] for points in seeds)
    merged = []
    for x, _ in seeds[0]:
        if x <= end:
            values = [interpolated(points, x) for points in seeds]
            merged.append((x, statistics.mean(values), min(values), max(values)))
    return merged


def interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return the value of a curve at x, linear between its points and constant before the first."""
    former = points[0]
    for point in points:
        if point[0] >= x:
            width = point[0] - former[0]
            weight = (x - former[0]) / width if width else 1.0
            return former[1] + max(0.0, weight) * (point[1] - former[1])
        former = point
    return former[1]


def _panel(curves: Mapping[str, Curve], label: str, width: float, top: float) -> str:
    ticks = nice_ticks(0.0, top)
    end = max(points[-1][0] for points in curves.values()) or 1.0

    def x(value: float) -> float:
        return LEFT + value / end * (width - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / ticks[-1] * (HEIGHT - TOP - BOTTOM)

    parts = [axes(x, y, ticks, end, label, width)]
    for name, points in curves.items():
        color = COLORS[name]
        upper = [f"{x(place):.1f},{y(high):.1f}" for place, _, _, high in points]
        lower = [f"{x(place):.1f},{y(low):.1f}" for place, _, low, _ in reversed(points)]
        parts.append(f'<polygon points="{" ".join(upper + lower)}" fill="{color}" fill-opacity="0.22"/>')
        line = " ".join(f"{x(place):.1f},{y(mean):.1f}" for place, mean, _, _ in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2.2"/>')
    return "".join(parts)


def axes(
    x: Callable[[float], float],
    y: Callable[[float], float],
    ticks: Sequence[float],
    end: float,
    label: str,
    width: float,
) -> str:
    """Return lines at the ticks of y, numbers of both axes and the label of x. Axis x goes from 0 to `end`."""
    parts = []
    for tick in ticks:
        parts.append(f'<path d="M{LEFT} {y(tick):.1f}H{width - RIGHT:.1f}" stroke="{GRID}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    for tick in nice_ticks(0.0, end):
        if tick <= end * 1.001:
            parts.append(f'<text x="{x(tick):.1f}" y="{y(0) + 18:g}" text-anchor="middle">{tick:.4g}</text>')
    middle = (LEFT + width - RIGHT) / 2
    parts.append(f'<text x="{middle:.1f}" y="{y(0) + 38:g}" text-anchor="middle">{label}</text>')
    return "".join(parts)
