"""The charts of the report. A metric that SECTIONS does not list gets a chart of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from colocated_grpo.tracking.files import TRAIN, Row
from colocated_grpo.tracking.page import section
from colocated_grpo.tracking.svg import Point, Series, line_chart, stacked_chart
from colocated_grpo.tracking.text import as_html, number

NUM_COLORS = 9
"""Number of page colours for named series; the next colour is for "other"."""
PHASES = ("generate", "train", "sync", "wait", "wake", "sleep", "freshness", "pack", "checkpoint", "evaluate")
NOT_A_METRIC = ("kind", "step")
HUGE = 1e100
"""Larger values are not drawn: they would overflow the axis arithmetic, and flatten all other points."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart to draw if its metrics were recorded."""

    title: str
    lines: dict[str, str]
    """Metric key -> name in the legend."""
    unit: str = ""
    """Shown after the title: the unit, or what is measured."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A drawn chart."""

    title: str
    unit: str
    series: list[Series]
    svg: str


SECTIONS = {
    "Learning": (
        Chart("Reward", {"reward": "training", "held_out/reward": "held-out"}, "mean over completions"),
        Chart("Reward standard deviation", {"reward_std": "training"}),
        Chart("Completion tokens", {"completion_tokens": "training", "held_out/completion_tokens": "held-out"}, "mean"),
        Chart("Truncated completions", {"truncated": "training", "held_out/truncated": "held-out"}, "fraction"),
        Chart("Entropy", {"entropy": "entropy"}, "nats per token"),
        Chart("Groups without reward variance", {"groups/constant": "training"}, "fraction"),
    ),
    "Stability": (
        Chart("Importance ratio", {"ratio": "mean"}, "policy / old policy"),
        Chart("Clip fraction", {"clip_fraction/low": "low", "clip_fraction/high": "high"}, "fraction of tokens"),
        Chart("Sampler-trainer KL", {"mismatch/kl": "k3"}),
        Chart(
            "Mean log-probability difference",
            {"mismatch/mean": "signed", "mismatch/abs": "absolute", "mismatch/on_policy": "absolute, on-policy"},
            "trainer - sampler",
        ),
        Chart("Largest log-probability difference", {"mismatch/max": "all"}, "|sampler - trainer|"),
        Chart("Effective sample size", {"mismatch/ess": "importance weights"}, "fraction of tokens"),
        Chart("Freshness", {"freshness/mean_diff": "|engine - policy|"}, "probe log-probabilities after a sync"),
        Chart("KL to the reference", {"kl": "k3"}),
        Chart("Gradient norm", {"grad_norm": "before clipping"}),
        Chart("Loss", {"loss": "loss"}),
        Chart(
            "Log-probability by sign of the advantage", {"logprob/positive": "positive", "logprob/negative": "negative"}
        ),
        Chart("Learning rate", {"lr": "lr"}),
        Chart("Staleness", {"staleness": "mean"}, "optimizer steps"),
    ),
    "Speed and memory": (
        Chart("Tokens per second", {"tokens_per_second": "all ranks"}),
        Chart("Device memory", {"memory/generate_gib": "generate", "memory/train_gib": "train"}, "GiB at phase end"),
        Chart(
            "Packing",
            {"prefix_reuse": "prefix reuse", "padding": "padding", "imbalance": "rank imbalance"},
            "fraction",
        ),
    ),
}


def chart_sections(rows: list[Row]) -> Iterator[str]:
    """Yield the HTML of every section with a chart, then a list of the metrics that stayed constant."""
    points = _points(rows)
    phases = _phase_chart(rows)
    named = {key for charts in SECTIONS.values() for chart in charts for key in chart.lines}
    parts = {key: key.removeprefix("reward/") for key in points if key.startswith("reward/")}
    rest = [key for key in points if key not in named | parts.keys() and not key.startswith("seconds/")]
    for title, charts in SECTIONS.items():
        drawings = [_drawing(chart, points) for chart in charts]
        if title == "Learning" and parts:
            drawings.insert(1, _drawing(Chart("Parts of the reward", parts), points))
        if title == "Speed and memory":
            drawings.insert(0, phases)
        yield _section(title, [drawing for drawing in drawings if drawing is not None])
    yield _section("More metrics", [drawing for key in rest if (drawing := _drawing(Chart(key, {key: key}), points))])
    yield _constant_metrics(points)


def _points(rows: list[Row]) -> dict[str, list[Point]]:
    """Return metric key -> its finite values, keys in order of first appearance."""
    points: dict[str, list[Point]] = {}
    for row in rows:
        for key, value in row.items():
            if key not in NOT_A_METRIC and value is not None and abs(value) < HUGE:
                points.setdefault(key, []).append((row["step"], value))
    return points


def _varies(points: list[Point]) -> bool:
    return len({value for _, value in points}) > 1


def _drawing(chart: Chart, points: dict[str, list[Point]]) -> Drawing | None:
    """Draw a chart, or return None when all its lines are constant."""
    series = [
        Series(name=name, points=points[key], color=index % NUM_COLORS, dots=key.startswith("held_out/"))
        for index, (key, name) in enumerate(chart.lines.items())
        if key in points
    ]
    if not any(_varies(list(line.points)) for line in series):
        return None
    return Drawing(chart.title, chart.unit, series, line_chart(series))


def _phase_chart(rows: list[Row]) -> Drawing | None:
    """Draw the seconds of each step by phase, known phases first, the remainder as "other"."""
    timed = [row for row in rows if row["kind"] == TRAIN and row.get("seconds/step") is not None]
    if not timed:
        return None
    measured = dict.fromkeys(key.removeprefix("seconds/") for row in timed for key in row if key.startswith("seconds/"))
    names = [name for name in PHASES if name in measured]
    names += [name for name in measured if name not in PHASES and name != "step"]
    layers = []
    for index, name in enumerate(names):
        seconds = [(row["step"], row.get(f"seconds/{name}") or 0.0) for row in timed]
        layers.append(Series(name=name, points=seconds, color=index % NUM_COLORS))
    in_phases = [sum(layer.points[index][1] for layer in layers) for index in range(len(timed))]
    other = [(row["step"], max(row["seconds/step"] - sum_, 0.0)) for row, sum_ in zip(timed, in_phases, strict=True)]
    layers.append(Series(name="other", points=other, color=NUM_COLORS))
    layers = [layer for layer in layers if any(value > 0 for _, value in layer.points)] or layers[-1:]
    return Drawing("Step time by phase", "seconds", layers, stacked_chart(layers))


def _section(title: str, drawings: list[Drawing]) -> str:
    if not drawings:
        return ""
    figures = "".join(map(_figure, drawings))
    return section(title, f'<div class="charts">{figures}</div>')


def _figure(drawing: Drawing) -> str:
    legend = "".join(
        f'<span><i class="b{line.color}"></i>{as_html(line.name)} <b>{number(line.points[-1][1])}</b></span>'
        for line in drawing.series
    )
    unit = f' <span class="quiet">{as_html(drawing.unit)}</span>' if drawing.unit else ""
    return f"<figure><figcaption><h3>{as_html(drawing.title)}{unit}</h3>{legend}</figcaption>{drawing.svg}</figure>"


def _constant_metrics(points: dict[str, list[Point]]) -> str:
    shown = {key: series for key, series in points.items() if not key.startswith("seconds/")}
    constant = [f"{key} = {number(series[0][1])}" for key, series in shown.items() if not _varies(series)]
    return f'<p class="quiet constant">Constant: {as_html(", ".join(constant))}.</p>' if constant else ""
