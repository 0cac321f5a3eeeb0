"""Parts of report.html: its style, sections, and charts as SVG."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from colocated_grpo.tracking.text import as_html, with_error

STYLE = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
WIDTH, HEIGHT = 440, 200
LEFT, RIGHT, TOP, BOTTOM = 70, 12, 10, 24
MAX_POINTS = 160
"""Longer series are averaged down to this many points; with more points, a step would be too narrow to hover over."""
MIN_POINTS_TO_SMOOTH = 12
"""Shorter series are drawn without smoothing."""

MIN_RELATIVE_SPAN = 4e-3
"""Minimum span of an axis relative to its values: labels of a shorter span have more digits than the margin."""
TINY = 1e-100
"""Smaller values are treated as 0."""

Point = tuple[float, float]


def section(title: str, content: str) -> str:
    """Return a section with a heading. `content` is HTML, `title` is plain text."""
    return f"<section><h2>{as_html(title)}</h2>{content}</section>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line or one layer of a chart."""

    name: str
    points: Sequence[Point]
    """(step, value) in ascending order of step, all finite."""
    color: int = 0
    """Index of the page's colour classes."""
    dots: bool = False
    """Sparse measurements: every point is marked, and the line is not smoothed."""
    errors: Mapping[float, float] = field(default_factory=dict)
    """Step -> standard error of the value, drawn as a bar."""


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
    """Return one <svg>. Hovering over a step shows all its values."""
    drawn = [replace(line, points=downsample(line.points)) for line in series]
    values = [end for line in drawn for step, value in line.points for end in _span(value, line.errors.get(step))]
    steps = [step for line in drawn for step, _ in line.points]
    ticks = nice_ticks(*_value_range(min(values), max(values)))
    frame = Frame(min(steps), max(steps), ticks[0], ticks[-1])
    body = [_axes(frame, ticks)] + [_line(frame, line) for line in drawn]
    hover: dict[float, list[str]] = {}
    for line in drawn:
        for step, value in line.points:
            hover.setdefault(step, []).append(f"{line.name}: {with_error(value, line.errors.get(step))}")
    parts = "".join([*body, _hover_strips(frame, hover)])
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{parts}</svg>'


def downsample(points: Sequence[Point]) -> list[Point]:
    """Return at most MAX_POINTS points, each the mean of a run of neighbours."""
    size = math.ceil(len(points) / MAX_POINTS)
    runs = [points[start : start + size] for start in range(0, len(points), max(size, 1))]
    return [(fmean(step for step, _ in run), fmean(value for _, value in run)) for run in runs]


def smooth(points: Sequence[Point]) -> list[Point]:
    """Return the centred moving mean over a tenth of the points, at least 5; the window halves at both ends."""
    reach = max(2, len(points) // 20)
    windows = (points[max(index - reach, 0) : index + reach + 1] for index in range(len(points)))
    return [(step, fmean(value for _, value in window)) for (step, _), window in zip(points, windows, strict=True)]


def nice_ticks(low: float, high: float) -> list[float]:
    """Return 3 to 7 round numbers, the first at most `low` and the last at least `high`."""
    size = max(abs(low), abs(high))
    span = high - low
    if span <= 1e-9 * size or size < TINY:
        span = size if size >= TINY else 1.0  # equal up to rounding: labels of such close ticks would be identical
    unit = 10.0 ** math.floor(math.log10(span / 4))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if span / (unit * factor) <= 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def _value_range(low: float, high: float) -> tuple[float, float]:
    """Return the range of an axis. It starts at 0 if `low` is near 0: a cut axis would exaggerate every change."""
    if 0 <= low <= 0.6 * high:
        return 0.0, high
    missing = MIN_RELATIVE_SPAN * max(abs(low), abs(high)) - (high - low)
    return (low - missing / 2, high + missing / 2) if missing > 0 else (low, high)


def _line(frame: Frame, series: Series) -> str:
    points = series.points
    if series.dots or len(points) == 1:
        centres = (f'cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}"' for x, y in points)
        dots = (f'<circle class="f{series.color}" {centre} r="3"/>' for centre in centres)
        spans = [(x, _span(y, series.errors[x])) for x, y in points if x in series.errors]
        bars = (_path(frame, [(x, low), (x, high)], f"l{series.color} raw") for x, (low, high) in spans)
        return "".join([_path(frame, points, f"l{series.color}"), *bars, *dots])
    if len(points) < MIN_POINTS_TO_SMOOTH:
        return _path(frame, points, f"l{series.color}")
    return _path(frame, points, f"l{series.color} raw") + _path(frame, smooth(points), f"l{series.color}")


def _span(value: float, error: float | None) -> Point:
    return value - (error or 0.0), value + (error or 0.0)


def _path(frame: Frame, points: Sequence[Point], css: str) -> str:
    coordinates = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
    return f'<polyline class="{css}" points="{coordinates}"/>'


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
    """Format a tick with as many decimals as the tick distance needs; in powers of ten if very small or very large."""
    largest, step = max(abs(ticks[0]), abs(ticks[-1])), ticks[1] - ticks[0]
    if largest >= 1e6 or largest < 1e-2:
        return f"{tick:.4g}" if abs(tick) > step / 2 else "0"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if not math.isclose(step * 10**decimals, round(step * 10**decimals)):
        decimals += 1
    return f"{tick:,.{decimals}f}"


def _hover_strips(frame: Frame, hover: dict[float, list[str]]) -> str:
    """Return invisible columns with the values as tooltip; each reaches halfway to the neighbouring steps."""
    steps = sorted(hover)
    centres = [frame.x(step) for step in steps]
    edges = [LEFT, *((left + right) / 2 for left, right in pairwise(centres)), WIDTH - RIGHT]
    strips = []
    for step, (left, right) in zip(steps, pairwise(edges), strict=True):
        title = as_html("\n".join([f"step {step:g}", *hover[step]]))
        size = f'x="{left:.1f}" y="{TOP:.1f}" width="{right - left:.1f}" height="{HEIGHT - TOP - BOTTOM:.1f}"'
        strips.append(f'<rect class="hit" {size}><title>{title}</title></rect>')
    return "".join(strips)
