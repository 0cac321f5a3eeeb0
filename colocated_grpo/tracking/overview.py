"""The top of the report: name, state, error, verdict, tiles, and where the time goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from colocated_grpo.tracking import files
from colocated_grpo.tracking.charts import NUM_COLORS, phase_colors, phase_names
from colocated_grpo.tracking.files import Row
from colocated_grpo.tracking.page import section
from colocated_grpo.tracking.text import as_html, duration, number
from colocated_grpo.tracking.verdict import verdict
from colocated_grpo.types import JsonObject

NO_END = "did not end properly"
NO_END_ADVICE = "Its processes were killed, or the machine went down. --resume auto continues from the last checkpoint."
SMALLEST_SHARE = 0.005
"""Phases below this share of the time are part of "other"."""


def header(run_dir: Path, rows: list[Row], *, running: bool) -> str:
    """Return the HTML above the charts. running: a process is still training."""
    summary, config = files.read_summary(run_dir), files.read_config(run_dir)
    train = [row for row in rows if row["kind"] == files.TRAIN]
    model = dict(files.flatten(config)).get("model.name", "")
    state = "running" if running else summary.get("state") or summary.get("outcome") or NO_END
    if running:
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        state += f", {len(train)} steps done; this page is of {now} and reloads itself"
    tiles = "".join(
        f'<div class="tile"><span>{name}</span><strong>{value}</strong><small>{note}</small></div>'
        for name, value, note in (map(as_html, tile) for tile in _tiles(rows, config.get("training_steps")))
    )
    sentence = verdict(rows)
    return "".join(
        [
            f"<h1>{as_html(run_dir.resolve().name)}</h1>",
            f'<p class="quiet">{as_html(" - ".join(filter(None, [model, state])))}</p>',
            "" if running else _banner(summary),
            f'<p class="verdict">{as_html(sentence)}</p>' if sentence else "",
            f'<div class="tiles">{tiles}</div>',
            _time_bar(train),
        ]
    )


def _banner(summary: JsonObject) -> str:
    """Return the red box of a run that has failed, was killed, or has no recorded end; '' for others."""
    if not summary:
        return _box(f"The run {NO_END}.", NO_END_ADVICE)
    if "error" not in summary:
        return ""
    facts = {
        "where": summary.get("where"),
        "step": summary.get("step"),
        "rank": summary.get("rank"),
        "exit code": summary.get("exit_code"),
    }
    shown = ", ".join(
        f"{name} {value}" if name != "where" else str(value) for name, value in facts.items() if value is not None
    )
    return _box(str(summary["error"]), f"{shown}. The console's text is in run.log.")


def _box(title: str, text: str) -> str:
    return f'<div class="failure" role="alert"><strong>{as_html(title)}</strong><span>{as_html(text)}</span></div>'


def _tiles(rows: list[Row], training_steps: int | None) -> Iterator[tuple[str, str, str]]:
    """Yield the tiles: name, value, note below."""
    held_out = files.first_and_last(rows, "held_out/reward")
    if held_out is not None:
        first, last = held_out
        change = f"{number(first['held_out/reward'])} -> {number(last['held_out/reward'])}"
        yield "held-out reward", change, f"steps {first['step']} to {last['step']}"
    train = [row for row in rows if row["kind"] == files.TRAIN]
    if reward := files.first_and_last(train, "reward"):
        before, after = (number(row["reward"]) for row in reward)
        yield "training reward", f"{before} -> {after}", "first and last step"
    yield "steps", str(len(train)), f"of {training_steps}" if training_steps else ""
    seconds = _values(train, "seconds/step")
    if seconds:
        yield "training time", duration(sum(seconds)), f"{number(_median(seconds))} s per step (median)"
    if speed := _values(train, "tokens_per_second"):
        yield "tokens per second", number(_median(speed)), "median"
    if memory := [gib for key in ("memory/generate_gib", "memory/train_gib") for gib in _values(train, key)]:
        yield "device memory", f"{number(max(memory))} GiB", "highest at a phase end, rank 0"


def _time_bar(train: Sequence[Row]) -> str:
    """Return one bar with the share of each phase in the time of all steps."""
    timed = [row for row in train if row.get("seconds/step")]
    total = sum(row["seconds/step"] for row in timed)
    if not total:
        return ""
    shares = {name: sum(row.get(f"seconds/{name}") or 0.0 for row in timed) / total for name in phase_names(timed)}
    colors = phase_colors(timed) | {"other": NUM_COLORS}
    shown = {name: share for name, share in shares.items() if share >= SMALLEST_SHARE}
    if (other := 1 - sum(shown.values())) >= SMALLEST_SHARE:
        shown["other"] = other
    bars = "".join(
        f'<i class="b{colors[name]}" style="width:{share:.2%}" title="{as_html(name)} {share:.1%}"></i>'
        for name, share in shown.items()
    )
    legend = "".join(
        f'<span><i class="b{colors[name]}"></i>{as_html(name)} <b>{share:.0%}</b></span>'
        for name, share in shown.items()
    )
    return section(
        "Where the time goes", f'<div class="card"><div class="bar">{bars}</div><p class="legend">{legend}</p></div>'
    )


def _values(rows: Sequence[Row], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
