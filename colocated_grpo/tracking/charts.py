"""Which metrics become which chart of the report; a metric that no chart names gets one of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from colocated_grpo.tracking.files import TRAIN, Row
from colocated_grpo.tracking.page import section
from colocated_grpo.tracking.svg import Point, Series, line_chart, stacked_chart
from colocated_grpo.tracking.text import as_html, number

COLORS = 9
PHASES = ("generate", "train", "sync", "wake", "sleep", "freshness", "pack", "checkpoint", "evaluate")
NOT_A_METRIC = ("kind", "step")
HUGE = 1e100
"""Not drawn from here on: the arithmetic of an axis would overflow, and one such point flattens every other."""


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    lines: dict[str, str]
    """Metric key -> name in the legend."""
    about: str = ""


@dataclass(frozen=True, slots=True)
class Drawing:
    title: str
    about: str
    series: list[Series]
    svg: str


SECTIONS = {
    "Learning": (
        Chart("Reward", {"reward": "training", "held_out/reward": "held-out"}, "mean over completions"),
        Chart("Spread of rewards", {"reward_std": "standard deviation"}),
        Chart("Completion length", {"completion_tokens": "tokens", "held_out/completion_tokens": "held-out"}),
        Chart("Truncated completions", {"truncated": "training", "held_out/truncated": "held-out"}, "share"),
        Chart("Entropy", {"entropy": "entropy"}, "nats a token"),
        Chart("Groups without reward variance", {"groups/constant": "share"}, "share"),
    ),
    "Stability": (
        Chart("Ratio", {"ratio": "mean"}, "policy / old policy"),
        Chart("Clip fraction", {"clip_fraction/low": "low", "clip_fraction/high": "high"}, "share of tokens"),
        Chart("KL of sampler and trainer", {"mismatch/kl": "k3"}),
        Chart("Mean log-probability difference", {"mismatch/abs": "|sampler - trainer|"}),
        Chart("Largest log-probability difference", {"mismatch/max": "|sampler - trainer|"}),
        Chart("Effective sample size", {"mismatch/ess": "share"}, "of the importance weights"),
        Chart("Freshness", {"freshness/mean_diff": "|engine - policy|"}, "of the probe, after the sync"),
        Chart("KL penalty", {"kl": "k3"}),
        Chart("Gradient norm", {"grad_norm": "before clipping"}),
        Chart("Loss", {"loss": "loss"}),
        Chart("Learning rate", {"lr": "lr"}),
        Chart("Staleness", {"staleness": "optimizer steps"}),
    ),
    "Speed and memory": (
        Chart("Tokens per second", {"tokens_per_second": "all ranks"}),
        Chart("Memory in use", {"memory/generate_gib": "generate", "memory/train_gib": "train"}, "GiB as a phase ends"),
    ),
}


def chart_sections(rows: list[Row]) -> Iterator[str]:
    """HTML of every section that has something to show. Metrics that never move are listed instead of drawn."""
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
    yield _still(points)


def _points(rows: list[Row]) -> dict[str, list[Point]]:
    """Metric key -> its finite measurements, keys in the order in which they first appear."""
    points: dict[str, list[Point]] = {}
    for row in rows:
        for key, value in row.items():
            if key not in NOT_A_METRIC and value is not None and abs(value) < HUGE:
                points.setdefault(key, []).append((row["step"], value))
    return points


def _moves(points: list[Point]) -> bool:
    return len({value for _, value in points}) > 1


def _drawing(chart: Chart, points: dict[str, list[Point]]) -> Drawing | None:
    """None when no line of the chart moves."""
    series = [
        Series(name=name, points=points[key], color=place % COLORS, dots=key.startswith("held_out/"))
        for place, (key, name) in enumerate(chart.lines.items())
        if key in points
    ]
    if not any(_moves(list(one.points)) for one in series):
        return None
    return Drawing(chart.title, chart.about, series, line_chart(series))


def _phase_chart(rows: list[Row]) -> Drawing | None:
    """Seconds of each step by phase, known phases first; what no phase claims is 'other'."""
    timed = [row for row in rows if row["kind"] == TRAIN and row.get("seconds/step") is not None]
    if not timed:
        return None
    measured = dict.fromkeys(key.removeprefix("seconds/") for row in timed for key in row if key.startswith("seconds/"))
    names = [name for name in PHASES if name in measured]
    names += [name for name in measured if name not in PHASES and name != "step"]
    layers = []
    for place, name in enumerate(names):
        seconds = [(row["step"], row.get(f"seconds/{name}") or 0.0) for row in timed]
        layers.append(Series(name=name, points=seconds, color=place % COLORS))
    claimed = [sum(layer.points[place][1] for layer in layers) for place in range(len(timed))]
    other = [(row["step"], max(row["seconds/step"] - sum_, 0.0)) for row, sum_ in zip(timed, claimed, strict=True)]
    layers.append(Series(name="other", points=other, color=COLORS))
    layers = [layer for layer in layers if any(value > 0 for _, value in layer.points)] or layers[-1:]
    return Drawing("Seconds a step, by phase", "", layers, stacked_chart(layers))


def _section(title: str, drawings: list[Drawing]) -> str:
    if not drawings:
        return ""
    figures = "".join(map(_figure, drawings))
    return section(title, f'<div class="charts">{figures}</div>')


def _figure(drawing: Drawing) -> str:
    legend = "".join(
        f'<span><i class="b{one.color}"></i>{as_html(one.name)} <b>{number(one.points[-1][1])}</b></span>'
        for one in drawing.series
    )
    about = f' <span class="quiet">{as_html(drawing.about)}</span>' if drawing.about else ""
    return f"<figure><figcaption><h3>{as_html(drawing.title)}{about}</h3>{legend}</figcaption>{drawing.svg}</figure>"


def _still(points: dict[str, list[Point]]) -> str:
    shown = {key: series for key, series in points.items() if not key.startswith("seconds/")}
    still = [f"{key} = {number(series[0][1])}" for key, series in shown.items() if not _moves(series)]
    return f'<p class="quiet still">Never moved: {as_html(", ".join(still))}.</p>' if still else ""
