"""Build report.html, a self-contained page about a run, from the files in its folder: colocated-grpo report RUN"""

import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median_high

from colocated_grpo.errors import RunError
from colocated_grpo.runtime import program, run_folder
from colocated_grpo.settings.errors import masked
from colocated_grpo.tracking import charts, files, page, transcripts
from colocated_grpo.tracking.text import Note, as_html, duration, figure, number
from colocated_grpo.types import STDERR, JsonObject

REFRESH_SECONDS = 30
"""Interval at which the report of a running run is rewritten and the browser reloads it."""
MAX_SHARE = 0.01
"""Maximum share of the run's time spent on writing reports."""
NO_END = "did not end properly"
NO_END_ADVICE = "Its processes were killed, or the machine went down. --resume auto continues from the last checkpoint."
SMALLEST_SHARE = 0.005
"""Phases below this share of the time are part of "other"."""
MIN_STEPS = 8
"""Fewer steps give no estimate of the noise."""
MAX_WINDOW = 20
"""Largest number of steps averaged at either end."""
CLEAR = 2.0
"""Changes above this many standard errors are called a change."""
MOSTLY = 0.5
"""Share of groups without signal above which the sentence suggests a change."""
OFTEN_CUT = 0.2
"""Share of truncated completions above which the sentence names truncation."""


class LiveReport:
    """Rewrites the report of a run that trains. The longer a rewrite takes, the less often it is done."""

    def __init__(self, run_dir: Path, note: Note) -> None:
        """note: shows the path of the first report."""
        self._run_dir = run_dir
        self._note: Note | None = note
        self._due = 0.0

    def step(self) -> None:
        if (begin := time.monotonic()) < self._due:
            return
        with suppress(OSError, RunError):  # a failed report must not end the run
            path = write_report(self._run_dir, running=True)
            if self._note is not None:
                self._note(f"report: {path}, rewritten while the run goes on")
                self._note = None
        end = time.monotonic()
        self._due = end + max(REFRESH_SECONDS, (end - begin) / MAX_SHARE)


def write_report(run_dir: Path, *, running: bool = False) -> Path:
    """Write report.html, replacing an older report, and return the path. running: the page reloads itself.

    Raises RunFolderError if there are no metrics, unless the run has failed before its first step.
    """
    failed = not running and "error" in files.read_summary(run_dir)
    rows = files.read_metrics(run_dir, may_be_empty=failed)
    rollouts, config = files.read_rollouts(run_dir), files.read_config(run_dir)
    body = [
        header(run_dir, rows, running=running),
        *charts.chart_sections(rows),
        transcripts.before_and_after(rollouts),
        transcripts.last_training_rollouts(rollouts),
        transcripts.latest_games(files.read_games(run_dir)),
        page.section("Configuration", _collapsed("all settings", files.flatten(masked(config)))),
        _starts(files.read_environment(run_dir)),
    ]
    path = run_dir / files.REPORT_FILE
    files.write_atomically(path, _page(run_dir.resolve().name, "\n".join(body), running=running))
    return path


def _page(title: str, body: str, *, running: bool) -> str:
    # The content security policy blocks scripts and requests: model output stays inert even if an escape is missed.
    refresh = f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">\n' if running else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
{refresh}<title>{as_html(title)}</title><style>{page.STYLE}</style></head>
<body><main>
{body}
</main></body></html>
"""


def _starts(starts: list[JsonObject]) -> str:
    parts = []
    for start in starts:
        facts = {key: value for key, value in start.items() if key != "packages"} | start.get("packages", {})
        title = f"started at step {start.get('first_step', 0)}, {start.get('time', '')}"
        parts.append(_collapsed(title, facts.items()))
    return page.section("Environment", "".join(parts)) if parts else ""


def _collapsed(title: str, pairs: Iterable[tuple[str, object]]) -> str:
    """Return a table that opens on a click. pairs: its lines."""
    lines = "".join(f"<tr><td>{as_html(key)}</td><td>{as_html(value)}</td></tr>" for key, value in pairs)
    return f"<details><summary>{as_html(title)}</summary><table>{lines}</table></details>"


def header(run_dir: Path, rows: list[files.Row], *, running: bool) -> str:
    """Return the HTML above the charts. running: a process is still training."""
    summary, config = files.read_summary(run_dir), files.read_config(run_dir)
    train = [row for row in rows if row["kind"] == files.TRAIN]
    model = dict(files.flatten(config)).get("model.name", "")
    state = "running" if running else summary.get("state") or NO_END
    if running:
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        state += f", steps done: {len(train)}; this page is of {now} and reloads itself"
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
    ).replace("+- ", "+-&NoBreak;&nbsp;")  # a browser would break the line after the hyphen


def _banner(summary: JsonObject) -> str:
    """Return the red box of a run that has failed, was killed, or has no recorded end; '' for other runs."""
    if not summary:
        return _box(f"The run {NO_END}.", NO_END_ADVICE)
    if "error" not in summary:
        return ""
    facts = {"where": "", "step": "step ", "rank": "rank ", "exit_code": "exit code "}
    shown = ", ".join(f"{name}{summary[key]}" for key, name in facts.items() if summary.get(key) is not None)
    return _box(str(summary["error"]), f"{shown}. The console's text is in run.log.")


def _box(title: str, text: str) -> str:
    return f'<div class="failure" role="alert"><strong>{as_html(title)}</strong><span>{as_html(text)}</span></div>'


def _tiles(rows: list[files.Row], training_steps: int | None) -> Iterator[tuple[str, str, str]]:
    """Yield the tiles: name, value, note below."""
    if held_out := files.first_and_last(rows, "held_out/reward"):
        errors = _values(held_out, "held_out/reward" + STDERR)
        notes = [f"step {_change(_values(held_out, 'step'))}", *([f"+- {_change(errors)}"] if errors else [])]
        yield "held-out reward", _change(_values(held_out, "held_out/reward")), ", ".join(notes)
    train = [row for row in rows if row["kind"] == files.TRAIN]
    if rewards := _values(train, "reward"):
        window = _window(rewards)
        where = f"means of {window} steps" if window > 1 else "first and last step"
        yield "training reward", _change(_ends(rewards)), where
    yield "steps", str(len(train)), f"of {training_steps}" if training_steps else ""
    if seconds := _values(train, "seconds/step"):
        yield "training time", duration(sum(seconds)), f"{number(median_high(seconds))} s per step (median)"
    if speed := _values(train, "tokens_per_second"):
        yield "tokens per second", number(median_high(speed)), "median"
    if memory := [gib for key in ("memory/generate_gib", "memory/train_gib") for gib in _values(train, key)]:
        yield "device memory", f"{number(max(memory))} GiB", "highest at a phase end, rank 0"


def _change(values: Iterable[float]) -> str:
    """Return 'first -> last', or one number where both are shown as the same."""
    return " -> ".join(dict.fromkeys(map(number, values)))


def _time_bar(train: Sequence[files.Row]) -> str:
    """Return one bar with the share of each phase in the time of all steps."""
    timed = [row for row in train if row.get("seconds/step")]
    if not (total := sum(row["seconds/step"] for row in timed)):
        return ""
    names = charts.phase_names(timed)
    shares = {name: sum(row.get(f"seconds/{name}") or 0.0 for row in timed) / total for name in names}
    shown = {name: share for name, share in shares.items() if share >= SMALLEST_SHARE}
    colors = {name: index % charts.NUM_COLORS for index, name in enumerate(shown)} | {"other": charts.NUM_COLORS}
    if (other := 1 - sum(shown.values())) >= SMALLEST_SHARE:
        shown["other"] = other
    bars = "".join(
        f'<i class="b{colors[name]}" style="width:{share:.2%}" title="{as_html(name)} {share:.1%}"></i>'
        for name, share in shown.items()
    )
    legend = "".join(charts.legend_entry(colors[name], name, f"{share:.0%}") for name, share in shown.items())
    content = f'<div class="card"><div class="bar">{bars}</div><p class="legend">{legend}</p></div>'
    return page.section("Where the time goes", content)


def _values(rows: Sequence[files.Row], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]


def verdict(rows: Sequence[files.Row]) -> str:
    """Return the sentence for the top of the report; '' without training steps."""
    train = [row for row in rows if row["kind"] == files.TRAIN]
    if not train:
        return ""
    rewards, kl = _values(train, "reward"), _values(train, "kl")
    if kl and not rewards:  # distillation
        return f"{_learning(kl, 'KL to the reference')}."
    parts = [_learning(rewards, "training reward")]
    if (held_out := files.first_and_last(rows, "held_out/reward")) and held_out[0]["step"] < held_out[1]["step"]:
        before, after = (figure(row, "held_out/reward") for row in held_out)
        parts.append(f"held-out reward {before} -> {after}")
    shares = _values(train, "groups/constant")
    # A higher limit would not help the completions that repeat themselves.
    known = [row for row in train if row.get("truncated") is not None]
    cut = [row["truncated"] - (row.get("truncated/repetition") or 0.0) for row in known]
    latest_cut, latest_constant = (_ends(values)[1] if values else 0.0 for values in (cut, shares))
    if shares:
        parts.append(f"{fmean(shares):.0%} of the groups had no signal (equal rewards)")
    # Cut completions usually get equal rewards: other prompts would not help.
    if latest_cut > OFTEN_CUT:
        advice = "raise rollout.max_completion_tokens, or ask for shorter answers"
        parts.append(f"{latest_cut:.0%} of the completions were cut at the end: {advice}")
    elif latest_constant > MOSTLY:
        parts[-1] += f", {latest_constant:.0%} at the end: prompts of another difficulty would teach more"
    return "; ".join(parts) + "."


def _learning(values: Sequence[float], name: str) -> str:
    """Compare the means of the first and the last steps with the scatter from one step to the next."""
    if not values:
        return "No completion has a reward"
    if len(values) < MIN_STEPS:
        return f"{len(values)} step{'s' * (len(values) > 1)}: too few to tell learning from noise"
    window, (before, after) = _window(values), _ends(values)
    # Use differences of neighbours: unlike the standard deviation, their scatter does not count the trend as noise.
    variance = fmean((b - a) ** 2 for a, b in pairwise(values)) / 2
    error = math.sqrt(2 * variance / window)
    change = after - before
    if abs(change) <= CLEAR * error:
        how = f"The {name} has not changed beyond its noise"
    else:
        how = f"The {name} has {'risen' if change > 0 else 'fallen'}"
    moved = f"{number(before)} -> {number(after)}, {change:+.3g} with a standard error of {error:.2g}"
    return f"{how} over {len(values)} steps: {moved} (means of {window} steps)"


def _window(values: Sequence[float]) -> int:
    """Return the number of steps that are averaged at either end."""
    return max(1, min(MAX_WINDOW, len(values) // 4))


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the means over the first and the last steps: a single step is noisy."""
    window = _window(values)
    return fmean(values[:window]), fmean(values[-window:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Rebuild the report of a finished, killed or still training run. Returns 0, or 2 if the run cannot be read."""
    parser = program.OneLineParser(prog="colocated-grpo report", description="Rebuild report.html of a run.")
    parser.add_argument("run", help="run folder")
    try:
        folder = files.run_folder(parser.parse_args(arguments).run)
        print(write_report(folder, running=run_folder.is_locked(folder)))
    except files.RunFolderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
