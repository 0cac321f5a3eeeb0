"""Build report.html, one self-contained page about a run, from the files in its run folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from colocated_grpo.config.secret_values import masked
from colocated_grpo.tracking import files
from colocated_grpo.tracking.charts import chart_sections
from colocated_grpo.tracking.files import Row
from colocated_grpo.tracking.games import read_games, title
from colocated_grpo.tracking.page import STYLE, section
from colocated_grpo.tracking.text import as_html, duration, number
from colocated_grpo.types import JsonObject

HELD_OUT_SHOWN = 8
TRAINING_ROLLOUTS_SHOWN = 6
GAMES_SHOWN = 6
MAX_TEXT_LENGTH = 6000
"""Characters shown of a prompt or completion; rollouts.jsonl has the full text."""
MAX_GAME_LENGTH = 30_000
"""Characters shown of a transcript; games.jsonl has the full text."""


def write_report(run_dir: Path) -> Path:
    """Write report.html, replacing an older one, and return its path. Raises RunFolderError if there are no metrics."""
    rows = files.read_metrics(run_dir)
    rollouts = files.read_rollouts(run_dir)
    body = [
        _header(run_dir, rows),
        *chart_sections(rows),
        _before_after(rollouts),
        _last_training_rollouts(rollouts),
        _games(read_games(run_dir)),
        _config_table(files.read_config(run_dir)),
        _starts(files.read_environment(run_dir)),
    ]
    path = run_dir / files.REPORT_FILE
    files.write_atomically(path, _page(run_dir.resolve().name, "\n".join(body)))
    return path


def _page(title: str, body: str) -> str:
    # The content security policy blocks scripts and requests: model output stays inert even if an escape is missed.
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{as_html(title)}</title><style>{STYLE}</style></head>
<body><main>
{body}
</main></body></html>
"""


def _header(run_dir: Path, rows: list[Row]) -> str:
    summary = files.read_summary(run_dir)
    config = files.read_config(run_dir)
    model = dict(files.flatten(config)).get("model.name", "")
    outcome = summary.get("outcome", "still running, or killed")
    title = f'<h1>{as_html(run_dir.resolve().name)}</h1><p class="quiet">{as_html(model)} - {as_html(outcome)}</p>'
    tiles = "".join(
        f'<div class="tile"><span>{name}</span><strong>{value}</strong><small>{note}</small></div>'
        for name, value, note in (map(as_html, tile) for tile in _tiles(rows, config.get("training_steps")))
    )
    return f'{title}<div class="tiles">{tiles}</div>'


def _tiles(rows: list[Row], training_steps: int | None) -> Iterator[tuple[str, str, str]]:
    """Yield the tiles at the top of the page: name, value, note below."""
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


def _before_after(rollouts: list[Row]) -> str:
    """Show the first HELD_OUT_SHOWN held-out prompts, in prompt order, at the first and the last evaluation."""
    held_out = [row for row in rollouts if row["kind"] == files.EVALUATION]
    if not held_out:
        return ""
    first, last = held_out[0]["step"], held_out[-1]["step"]
    before = {row["prompt_index"]: row for row in held_out if row["step"] == first}
    after = {row["prompt_index"]: row for row in held_out if row["step"] == last}
    prompts = sorted(before.keys() & after.keys())[:HELD_OUT_SHOWN]
    if first == last:
        cards = "".join(_card(_prompt(before[index]), [before[index]]) for index in prompts)
        return section(f"Held-out rollouts at step {first}", cards)
    cards = "".join(_card(_prompt(before[index]), [before[index], after[index]]) for index in prompts)
    return section(f"Held-out rollouts before and after (steps {first} and {last})", cards)


def _last_training_rollouts(rollouts: list[Row]) -> str:
    train = [row for row in rollouts if row["kind"] == files.TRAIN]
    if not train:
        return ""
    step = train[-1]["step"]
    shown = [row for row in train if row["step"] == step][::-1][:TRAINING_ROLLOUTS_SHOWN]
    cards = "".join(_card(_prompt(row), [row]) for row in shown)
    return section(f"Training rollouts of step {step}, from best to worst", cards)


def _games(games: list[Row]) -> str:
    """Show the latest games, newest first: seats, winner and transcript."""
    if not games:
        return ""
    shown = games[::-1][:GAMES_SHOWN]
    parts = "".join(
        f"<details><summary>{as_html(title(game))}</summary>{_seats(game.get('seats', []))}"
        f'<pre class="game">{_shortened(game.get("transcript", ""), MAX_GAME_LENGTH)}</pre></details>'
        for game in shown
    )
    return section(f"Games (latest {len(shown)} of {len(games)})", parts)


def _seats(seats: list[Row]) -> str:
    if not seats:
        return ""
    head = "".join(f"<th>{as_html(name)}</th>" for name in seats[0])
    lines = ("".join(f"<td>{as_html(value)}</td>" for value in seat.values()) for seat in seats)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _card(prompt: str, rollouts: list[Row]) -> str:
    sides = "".join(_rollout(row) for row in rollouts)
    return f'<article class="card">{prompt}<div class="sides n{len(rollouts)}">{sides}</div></article>'


def _prompt(row: Row) -> str:
    label = f'<div class="label">{as_html(row["source"])}, prompt {row["prompt_index"]}</div>'
    return f'{label}<pre class="prompt">{_shortened(row["prompt"])}</pre>'


def _rollout(row: Row) -> str:
    facts = [f"step {row['step']}", f"{row['completion_tokens']} tokens", row["finish_reason"]]
    facts += [f"{name} {number(value)}" for name, value in row["parts"].items()]
    if row["error"]:
        facts.append(row["error"])
    return (
        f'<div><div class="label"><b class="reward">{number(row["reward"])}</b> {as_html(" | ".join(facts))}</div>'
        f"<pre>{_shortened(row['completion'])}</pre></div>"
    )


def _config_table(config: JsonObject) -> str:
    lines = _table_lines(files.flatten(masked(config)))
    return section("Configuration", _collapsed("all settings", lines))


def _starts(starts: list[JsonObject]) -> str:
    parts = []
    for start in starts:
        facts = {key: value for key, value in start.items() if key != "packages"} | start.get("packages", {})
        lines = _table_lines(facts.items())
        title = f"started at step {start.get('first_step', 0)}, {start.get('time', '')}"
        parts.append(_collapsed(title, lines))
    return section("Environment", "".join(parts)) if parts else ""


def _table_lines(pairs: Iterable[tuple[str, Any]]) -> str:
    return "".join(f"<tr><td>{as_html(key)}</td><td>{as_html(value)}</td></tr>" for key, value in pairs)


def _collapsed(title: str, table_lines: str) -> str:
    return f"<details><summary>{as_html(title)}</summary><table>{table_lines}</table></details>"


def _shortened(text: str, limit: int = MAX_TEXT_LENGTH) -> str:
    omitted = len(text) - limit
    if omitted <= 0:
        return as_html(text)
    return f'{as_html(text[:limit])}<i class="quiet"> ... {omitted} more characters</i>'


def _values(rows: list[Row], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
