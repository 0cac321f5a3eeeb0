"""The picture of `benchmarks.timeline`, from its JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.learn_report import COLORS, LEFT, RIGHT, TEXT, WIDTH, axes
from colocated_grpo.tracking.page import nice_ticks
from colocated_grpo.types import JsonObject

TOP, PLOT, PANEL = 66, 110, 190
BLUE, ORANGE = COLORS.values()


def decoding(steps: Sequence[JsonObject]) -> dict[str, float]:
    """Return the decode steps, and the mean of the completions that run in one."""
    changes = [(running, count) for step in steps for _, running, count in step["running"]]
    decoded = sum(count for _, count in changes)
    return {"decode steps": decoded, "mean running": sum(running * count for running, count in changes) / decoded}


def picture(timelines: Mapping[str, Sequence[JsonObject]]) -> str:
    """Return an SVG with a panel for each timeline, on equal axes."""
    end = max(steps[-1]["step"][1] - steps[0]["step"][0] for steps in timelines.values())
    most = max(running for steps in timelines.values() for step in steps for _, running, _ in step["running"])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {PANEL * len(timelines) + 30}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{TEXT}"><title>Running completions</title>'
    ]
    for place, (color, label) in enumerate([(BLUE, "running completions"), (ORANGE, "training")]):
        x = LEFT + 170 * place
        parts.append(f'<rect x="{x}" y="8" width="18" height="10" fill="{color}" fill-opacity="0.4"/>')
        parts.append(f'<text x="{x + 24}" y="17">{label}</text>')
    parts.append(f'<path d="M{LEFT + 270} 6V20" stroke="{TEXT}"/><text x="{LEFT + 278}" y="17">start of a step</text>')
    for place, (name, steps) in enumerate(timelines.items()):
        panel = _panel(name, steps, end, nice_ticks(0.0, most))
        parts.append(f'<g transform="translate(0 {PANEL * place})">{panel}</g>')
    return "".join([*parts, "</svg>\n"])


def _panel(name: str, steps: Sequence[JsonObject], end: float, ticks: Sequence[float]) -> str:
    began, means = steps[0]["step"][0], decoding(steps)

    def x(second: float) -> float:
        return LEFT + (second - began) / end * (WIDTH - LEFT - RIGHT)

    def y(running: float) -> float:
        return TOP + PLOT - running / ticks[-1] * PLOT

    counts = f"{means['decode steps']:,} decode steps of {means['mean running']:.1f} completions on average"
    parts = [
        f'<text x="{LEFT}" y="{TOP - 24}" font-size="14">{name.capitalize()} partial rollouts: {counts}</text>',
        axes(lambda second: x(began + second), y, ticks, end, "seconds", WIDTH),
    ]
    for step in steps:
        trained, ended = step["train"]
        area = "".join(f"H{x(second):.1f}V{y(running):.1f}" for second, running, _ in step["running"])
        parts += [
            f'<path d="M{x(step["step"][0]):.1f} {TOP - 14}V{TOP + PLOT}" stroke="{TEXT}"/>',
            f'<path d="M{x(step["generate"][0]):.1f} {y(0):.1f}{area}H{x(step["generate"][1]):.1f}V{y(0):.1f}Z" '
            f'fill="{BLUE}" fill-opacity="0.4" stroke="{BLUE}"/>',
            f'<rect x="{x(trained):.1f}" y="{TOP}" width="{x(ended) - x(trained):.1f}" height="{PLOT}" '
            f'fill="{ORANGE}" fill-opacity="0.4" stroke="{ORANGE}"/>',
        ]
    return "".join(parts)
