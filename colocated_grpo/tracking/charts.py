"""The charts of the report. Metrics that SECTIONS does not list are drawn by prefix, or in charts of their own."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from colocated_grpo.tracking import files, page
from colocated_grpo.tracking.text import as_html, number, with_error
from colocated_grpo.types import STDERR

MEANINGS = {
    "reward": "mean total reward (the weighted sum of the reward functions); completions without a reward are excluded",
    "reward/<name>": "mean of a reward function before its weight, of a part of a score, or of a value of log_metric",
    "reward_std": "standard deviation of the reward, or of one part, over all completions of the step (unbiased)",
    "reward_errors": "completions without a reward because scoring failed",
    "groups/constant": "fraction of groups whose rewards are all equal, or all missing; they give no learning signal",
    "sequences": "mean number of training sequences of an episode",
    "truncated": "fraction of completions cut at rollout.max_completion_tokens or for a repetition",
    "truncated/repetition": "fraction of completions that rollout.repetition_detection ended",
    "prompts_dropped": "prompts that are empty or longer than rollout.max_prompt_tokens",
    "staleness": "optimizer steps between the weights that sampled and the weights being trained",
    "loss": "the minimized objective; close to 0 because advantages cancel within a group, and no measure of progress",
    "loss/load_balancing": (
        "load-balancing loss without its coefficient; the experts per token if all are used equally, else higher"
    ),
    "kl": "KL estimate (k3) to the reference, or to the rollout policy with loss.kl.target: rollout",
    "ratio": "mean importance ratio, policy over the policy before this batch; 1 with one optimizer step per batch",
    "clip_fraction/low": "fractions of tokens that lose their gradient to a clip bound",
    "logprob/positive": "mean log-probability of the tokens with a positive, and with a negative advantage",
    "grad_norm": "gradient norm before clipping",
    "mismatch/kl": "KL estimate (k3) between the engine that sampled and the trainer",
    "mismatch/mean": "mean of trainer minus engine log-probability; close to 0 on-policy",
    "mismatch/max": "largest absolute difference of log-probabilities",
    "mismatch/plain": "mean absolute difference over plainly sampled tokens",
    "mismatch/worst": "largest mean absolute difference over the plainly sampled tokens of one completion",
    "mismatch/routes": "fraction of tokens, over the layers of the backward pass, whose experts the policy would have "
    "chosen otherwise",
    "mismatch/outside": "fraction of tokens that one side finds more than twice as likely as the other",
    "mismatch/ess": "effective sample size of the importance weights as a fraction; 1 is ideal",
    "correction/weight": "mean token weight applied by loss.correction",
    "seconds/step": "the curves leave out a first step that takes over twice as long as any other",
    "tokens_per_second": "prompt and completion tokens of all ranks over the whole step",
    "tokens_per_second/train": "tokens of trained groups over the train phase",
    "memory/generate_gib": "memory in use on rank 0's device by all processes, at the end of the phase",
    "prefix_reuse": "fraction of tokens saved because a prefix common to several sequences is computed once",
    "padding": "tokens of padding micro-batches over those of the trained groups",
    "imbalance": "computed tokens of the most loaded rank over the mean, minus 1",
}
NUM_COLORS = 9
"""Number of page colours for named series; the next colour is for "other"."""
PHASES = ("generate", "train", "sync", "wait", "wake", "sleep", "pack", "checkpoint", "evaluate")
NOT_A_METRIC = ("kind", "step")
PARTS = {"reward": "Parts of the reward", "held_out/reward": "Parts of the held-out reward"}
"""Metrics that are also recorded by part, as reward/format -> title."""
BY_ENVIRONMENT = {"reward": "Reward", "completion_tokens": "Completion tokens", "truncated": "Truncated completions"}
"""Metrics that are drawn with one line for each of several environments -> title."""
UNPLOTTED = ("seconds/", "env/", "held_out/env/", "reward_std/")
"""Metrics without a chart of their own: there may be dozens."""
TRAINER_PREFIXES = frozenset(
    ("atropos", "clip_fraction", "correction", "eval", "groups", "held_out", "hub", "logprob", "loss")
) | {"memory", "mismatch", "prompts_skipped", "resample", "tokens_per_second"}
"""Name prefixes of metrics that the trainer records. Other metrics come from environments."""
CONSTANT = 1e-3
"""Metrics that vary by at most this fraction of their largest value are listed, not drawn."""
HUGE = 1e100
"""Larger values are not drawn: they would overflow the axis arithmetic, and flatten all other points."""


def meaning(key: str) -> str:
    """Return the explanation of a metric; '' if there is none."""
    key = key.removeprefix("held_out/")
    return MEANINGS.get(key) or MEANINGS.get(f"{key.partition('/')[0]}/<name>", "")


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    lines: dict[str, str]
    """Metric key -> name in the legend."""
    unit: str = ""
    """Shown after the title: the unit or the quantity."""


SECTIONS = {
    "Learning": (
        Chart("Reward", {"reward": "training", "held_out/reward": "held-out"}, "mean over completions"),
        Chart("Reward standard deviation", {"reward_std": "training"}),
        Chart("Completion tokens", {"completion_tokens": "training", "held_out/completion_tokens": "held-out"}, "mean"),
        Chart("Extreme lengths", {"completion_tokens/min": "shortest", "completion_tokens/max": "longest"}, "tokens"),
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
            {"mismatch/mean": "signed", "mismatch/abs": "absolute", "mismatch/plain": "absolute, plain samples"},
            "trainer - sampler",
        ),
        Chart(
            "Largest log-probability difference",
            {"mismatch/max": "of one token", "mismatch/worst": "of one completion, on average"},
            "|sampler - trainer|",
        ),
        Chart("Effective sample size", {"mismatch/ess": "importance weights"}, "fraction of tokens"),
        Chart("KL to the reference", {"kl": "k3"}),
        Chart("Gradient norm", {"grad_norm": "before clipping"}),
        Chart("Loss", {"loss": "loss"}),
        Chart("Log-probability by sign of advantage", {"logprob/positive": "positive", "logprob/negative": "negative"}),
        Chart("Learning rate", {"lr": "lr"}),
        Chart("Staleness", {"staleness": "mean", "staleness/max": "oldest token"}, "optimizer steps"),
    ),
    "Speed and memory": (
        Chart(
            "Step time", {"seconds/step": "whole step", **{f"seconds/{name}": name for name in PHASES[:3]}}, "seconds"
        ),
        Chart("Tokens per second", {"tokens_per_second": "all ranks"}),
        Chart("Trained tokens per second", {"tokens_per_second/train": "all ranks"}),
        Chart("Decode steps in the tail", {"decode_tail": "rank 0"}, "fraction"),
        Chart("Device memory", {"memory/generate_gib": "generate", "memory/train_gib": "train"}, "GiB at phase end"),
        Chart("Prefix reuse", {"prefix_reuse": "saved"}, "fraction of tokens"),
        Chart("Padding and rank imbalance", {"padding": "padding", "imbalance": "rank imbalance"}, "fraction"),
    ),
}


DRAWN = frozenset(key for charts in SECTIONS.values() for chart in charts for key in chart.lines)


def chart_sections(rows: list[files.Row]) -> Iterator[str]:
    """Yield the HTML of every section with a chart, then a list of the metrics that have a single value."""
    points = _points(rows)
    errors = {key: dict(points.pop(key + STDERR)) for key in list(points) if key + STDERR in points}
    families = list(family_charts(points))
    named = DRAWN | {key for chart in families for key in chart.lines}
    rest = [key for key in points if key not in named and not key.startswith(UNPLOTTED)]
    for title, charts in SECTIONS.items():
        if title == "Learning":
            charts = (charts[0], *families, *charts[1:])
        yield _section(title, [_line_figure(chart, points, errors) for chart in charts])
    yield _section("More metrics", [_line_figure(Chart(key, {key: key}), points, errors) for key in rest])
    yield _constant_metrics(points)


def family_charts(keys: Iterable[str]) -> Iterator[Chart]:
    """Yield charts of metrics with a common prefix: of the reward, environments, evaluation sets and games."""
    families: dict[str, dict[str, str]] = {}
    for key in keys:
        first, _, name = key.partition("/")
        part_of = next((metric for metric in PARTS if key.startswith(f"{metric}/")), None)
        environment, _, metric = name.rpartition("/")
        if first == "env" and metric in BY_ENVIRONMENT:
            title, name = f"{BY_ENVIRONMENT[metric]} by environment", environment
        elif first == "eval" and re.fullmatch(r"mean|(pass|maj)@\d+", metric):
            title, name = f"Evaluation of {environment}", metric
        elif part_of is not None:
            title, name = PARTS[part_of], key.removeprefix(f"{part_of}/")
        elif first in TRAINER_PREFIXES or key.startswith(UNPLOTTED) or not name or key in DRAWN:
            continue
        else:  # of a game, or of the user's own code: town/win_rate/mafia -> town/win_rate, but town/turns alone
            title, name = key.rsplit("/", 1) if "/" in name else (key, name)
        families.setdefault(title, {})[key] = name
    for title, lines in families.items():
        pairs = list(lines.items())
        for part in (pairs[start : start + NUM_COLORS] for start in range(0, len(pairs), NUM_COLORS)):
            yield Chart(title, dict(part))


def phase_names(rows: Iterable[files.Row]) -> list[str]:
    """Return the phases that took time, known phases first."""
    timed = (key for row in rows for key in row if key.startswith("seconds/") and row[key])
    measured = dict.fromkeys(key.removeprefix("seconds/") for key in timed)
    names = [name for name in PHASES if name in measured]
    return names + [name for name in measured if name not in PHASES and name != "step"]


def _points(rows: list[files.Row]) -> dict[str, list[page.Point]]:
    """Return metric key -> its finite values, keys in order of first appearance."""
    points: dict[str, list[page.Point]] = {}
    for row in rows:
        for key, value in row.items():
            if key not in NOT_A_METRIC and value is not None and abs(value) < HUGE:
                points.setdefault(key, []).append((row["step"], value))
    return {key: _without_start(line) if key.startswith("seconds/") else line for key, line in points.items()}


def _without_start(seconds: list[page.Point]) -> list[page.Point]:
    """Leave out a first step that takes over twice as long as any other: compilation would flatten all other steps."""
    longest = max((value for _, value in seconds[1:]), default=HUGE)
    return seconds[1:] if seconds[0][1] > 2 * longest else seconds


def _varies(points: list[page.Point]) -> bool:
    """Return True if the values differ by more than CONSTANT of the largest."""
    values = [value for _, value in points]
    return max(values) - min(values) > CONSTANT * max(map(abs, values))


def _line_figure(chart: Chart, points: dict[str, list[page.Point]], errors: dict[str, dict[float, float]]) -> str:
    """Return a chart as HTML; '' when all its lines are constant."""
    series = [
        page.Series(
            name=name,
            points=points[key],
            color=index % NUM_COLORS,
            dots=key.startswith(("held_out/", "eval/")),
            errors=errors.get(key, {}),
        )
        for index, (key, name) in enumerate(chart.lines.items())
        if key in points
    ]
    if not any(_varies(list(line.points)) for line in series):
        return ""
    explained = "; ".join(dict.fromkeys(filter(None, map(meaning, filter(points.get, chart.lines)))))
    explanation = f'<p class="meaning">{as_html(explained)}</p>' if explained else ""
    unit = f' <span class="quiet">{as_html(chart.unit)}</span>' if chart.unit else ""
    last = ((line, *line.points[-1]) for line in series)
    entries = (legend_entry(line.color, line.name, with_error(y, line.errors.get(x))) for line, x, y in last)
    legend = "".join(entries)
    caption = f"<figcaption><h3>{as_html(chart.title)}{unit}</h3>{explanation}{legend}</figcaption>"
    return f"<figure>{caption}{page.line_chart(series)}</figure>"


def _section(title: str, figures: Iterable[str]) -> str:
    shown = "".join(figures)
    return page.section(title, f'<div class="charts">{shown}</div>') if shown else ""


def legend_entry(color: int, name: str, value: str) -> str:
    return f'<span><i class="b{color}"></i>{as_html(name)} <b>{value}</b></span>'


def _constant_metrics(points: dict[str, list[page.Point]]) -> str:
    shown = {key: series for key, series in points.items() if not key.startswith(("seconds/", *UNPLOTTED))}
    constant = [f"{key} = {number(series[0][1])}" for key, series in shown.items() if not _varies(series)]
    title = f"<summary>Metrics with a single value ({len(constant)})</summary>"
    opened = " open" * (2 * len(constant) > len(shown))  # after a single step nothing else shows the metrics
    return f'<details class="quiet"{opened}>{title}{as_html(", ".join(constant))}</details>' if constant else ""
