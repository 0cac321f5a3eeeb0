"""Small SVG charts as text: lines and stacked bars with hover titles. Colours come from the page's CSS classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from colocated_grpo.tracking.text import as_html, number

WIDTH, HEIGHT = 560, 220
LEFT, RIGHT, TOP, BOTTOM = 70, 12, 10, 24
BUCKETS = 160
"""Points drawn at most; longer runs are averaged into this many, or a step would be too narrow to hover over."""
SMOOTH_FROM = 40
"""Shorter series are drawn as they are."""

FLATTEST = 4e-3
"""Least height of an axis as a share of its numbers: labels of a flatter one have more digits than the margin holds."""
TINY = 1e-100
"""Smaller numbers are zero to a chart."""

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    name: str
    points: Sequence[Point]
    """(step, value) by rising step, finite."""
    color: int = 0
    dots: bool = False
    """Sparse measurements: marked one by one and never smoothed."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Linear map from data to picture coordinates."""

    low_x: float
    high_x: float
    low_y: float
    high_y: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.low_x) / ((self.high_x - self.low_x) or 1.0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low_y) / ((self.high_y - self.low_y) or 1.0) * (HEIGHT - TOP - BOTTOM)


def line_chart(series: Sequence[Series]) -> str:
    """One <svg>; hovering a step shows every value there."""
    drawn = [replace(one, points=bucketed(one.points)) for one in series]
    values = [value for one in drawn for _, value in one.points]
    steps = [step for one in drawn for step, _ in one.points]
    ticks = nice_ticks(*_value_range(min(values), max(values)))
    frame = Frame(min(steps), max(steps), ticks[0], ticks[-1])
    body = [_axes(frame, ticks)] + [_line(frame, one) for one in drawn]
    hover: dict[float, list[str]] = {}
    for one in drawn:
        for step, value in one.points:
            hover.setdefault(step, []).append(f"{one.name}: {number(value)}")
    return _svg([*body, _hover_strips(frame, hover)])


def stacked_chart(layers: Sequence[Series]) -> str:
    """One <svg> of stacked bars, first series at the bottom; all series share their steps."""
    drawn = [replace(one, points=bucketed(one.points)) for one in layers]
    steps = [step for step, _ in drawn[0].points]
    totals = [math.fsum(one.points[place][1] for one in drawn) for place in range(len(steps))]
    ticks = nice_ticks(0.0, max(totals) or 1.0)
    half = 0.5 * (steps[1] - steps[0]) if len(steps) > 1 else 0.5
    frame = Frame(steps[0] - half, steps[-1] + half, 0.0, ticks[-1])
    place_for_one = (WIDTH - LEFT - RIGHT) / len(steps)
    width = place_for_one - 1 if place_for_one > 6 else place_for_one
    bars, hover = [], {}
    for place, step in enumerate(steps):
        base = 0.0
        for one in drawn:
            value = one.points[place][1]
            top, bottom = frame.y(base + value), frame.y(base)
            if value > 0:
                bars.append(_rectangle(frame.x(step) - width / 2, top, width, bottom - top, f"f{one.color}"))
            base += value
        named = [f"{one.name}: {number(one.points[place][1])}" for one in reversed(drawn) if one.points[place][1] > 0]
        hover[step] = [f"total: {number(totals[place])}", *named]
    return _svg([_axes(frame, ticks), *bars, _hover_strips(frame, hover)])


def bucketed(points: Sequence[Point]) -> list[Point]:
    """Means of at most BUCKETS runs of neighbouring points."""
    size = math.ceil(len(points) / BUCKETS)
    runs = [points[start : start + size] for start in range(0, len(points), max(size, 1))]
    return [(_mean([step for step, _ in run]), _mean([value for _, value in run])) for run in runs]


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Centred moving mean over a fifteenth of the points; half of the window is left at both ends."""
    reach = len(points) // 30
    means = []
    for place, (step, _) in enumerate(points):
        window = points[max(place - reach, 0) : place + reach + 1]
        means.append((step, _mean([value for _, value in window])))
    return means


def nice_ticks(low: float, high: float) -> list[float]:
    """Round numbers, 3 to 7 of them, from at most `low` to at least `high`."""
    size = max(abs(low), abs(high))
    span = high - low
    if span <= 1e-9 * size or size < TINY:
        span = size if size >= TINY else 1.0  # equal but for rounding: ticks this close could not be told apart
    unit = 10.0 ** math.floor(math.log10(span / 4))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if span / (unit * factor) <= 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [place * step for place in range(first, max(last, first + 1) + 1)]


def _value_range(low: float, high: float) -> tuple[float, float]:
    """From zero where zero is near: a curve that starts at its own minimum exaggerates every change."""
    if low >= 0 and low <= 0.6 * high:
        return 0.0, high
    lacks = FLATTEST * max(abs(low), abs(high)) - (high - low)
    return (low - lacks / 2, high + lacks / 2) if lacks > 0 else (low, high)


def _line(frame: Frame, series: Series) -> str:
    points = series.points
    if series.dots or len(points) == 1:
        return _path(frame, points, f"l{series.color}") + "".join(_dot(frame, point, series.color) for point in points)
    if len(points) < SMOOTH_FROM:
        return _path(frame, points, f"l{series.color}")
    return _path(frame, points, f"l{series.color} raw") + _path(frame, smoothed(points), f"l{series.color}")


def _dot(frame: Frame, point: Point, color: int) -> str:
    return f'<circle class="f{color}" cx="{frame.x(point[0]):.1f}" cy="{frame.y(point[1]):.1f}" r="3"/>'


def _path(frame: Frame, points: Sequence[Point], css: str) -> str:
    places = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
    return f'<polyline class="{css}" points="{places}"/>'


def _axes(frame: Frame, ticks: Sequence[float]) -> str:
    parts = []
    for tick in ticks:
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_tick(tick, ticks)}</text>')
    for tick in nice_ticks(frame.low_x, frame.high_x):
        if frame.low_x <= tick <= frame.high_x and tick == int(tick):
            parts.append(f'<text x="{frame.x(tick):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{tick:.0f}</text>')
    return "".join(parts)


def _tick(tick: float, ticks: Sequence[float]) -> str:
    """As many decimals as the distance between ticks needs; powers of ten for very small and very large ones."""
    largest, step = max(abs(ticks[0]), abs(ticks[-1])), ticks[1] - ticks[0]
    if largest >= 1e5 or largest < 1e-2:
        return f"{tick:.4g}" if abs(tick) > step / 2 else "0"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if not math.isclose(step * 10**decimals, round(step * 10**decimals)):
        decimals += 1
    return f"{tick:.{decimals}f}"


def _hover_strips(frame: Frame, hover: dict[float, list[str]]) -> str:
    """Invisible columns, each from halfway to the previous step to halfway to the next, with the values as tooltip."""
    steps = sorted(hover)
    centres = [frame.x(step) for step in steps]
    edges = [LEFT, *((one + other) / 2 for one, other in pairwise(centres)), WIDTH - RIGHT]
    strips = []
    for place, step in enumerate(steps):
        title = as_html("\n".join([f"step {step:g}", *hover[step]]))
        width = edges[place + 1] - edges[place]
        strips.append(_rectangle(edges[place], TOP, width, HEIGHT - TOP - BOTTOM, "hit", f"<title>{title}</title>"))
    return "".join(strips)


def _rectangle(x: float, y: float, width: float, height: float, css: str, inside: str = "") -> str:
    return f'<rect class="{css}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}">{inside}</rect>'


def _svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
