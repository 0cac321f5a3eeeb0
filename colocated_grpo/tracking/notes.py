"""Lines that the tracker prints: the banner, evaluations, one completion, scoring errors, oversized updates."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from colocated_grpo.settings.secret_values import masked
from colocated_grpo.tracking import files
from colocated_grpo.tracking.text import number
from colocated_grpo.tracking.transcripts import one_line
from colocated_grpo.types import Group, JsonObject, Score

PROMPT_CHARACTERS, COMPLETION_CHARACTERS = 80, 240
STDERR = "_stderr"
"""Suffix of a metric's standard error."""
LOWEST_LOSS = -10.0
HIGHEST_RATIO = 2.0
STEPS = 3


def typical_completion(groups: Sequence[Group]) -> str | None:
    """Return the completion with the median reward, its prompt and its reward, as one line; None without a reward."""
    scored = [
        (rollout.score.reward, group.prompt, rollout)
        for group in groups
        for rollout in group.rollouts
        if rollout.score.reward is not None and math.isfinite(rollout.score.reward)
    ]
    if not scored:
        return None
    reward, prompt, rollout = sorted(scored, key=lambda one: one[0])[len(scored) // 2]
    answer = one_line(rollout.text, COMPLETION_CHARACTERS)
    return f"reward {number(reward)}: {' '.join(prompt.text.split())[-PROMPT_CHARACTERS:]} -> {answer}"


class ScoringErrors:
    """Remembers which environments have been reported. The metrics count every error."""

    def __init__(self) -> None:
        self._reported: set[tuple[str, bool]] = set()

    def check(self, step: int, groups: Sequence[Group]) -> Iterator[str]:
        """Yield a line for each environment with the first unreadable answers, or the first failed rewards."""
        scores: dict[str, list[Score]] = {}
        for group in groups:
            scores.setdefault(group.prompt.source, []).extend(rollout.score for rollout in group.rollouts)
        for name, own in scores.items():
            for failed in (False, True):
                raised = [score for score in own if (score.failed if failed else score.unscorable)]
                if not raised or (name, failed) in self._reported:
                    continue
                self._reported.add((name, failed))
                what = "made a scorer raise and got no credit from it (metric unscorable"
                if failed:
                    what = "have no reward, because scoring failed (metric reward_errors"
                yield (
                    f"step {step}: {len(raised)} of {len(own)} completions of {name} {what}; shown once); the first: "
                    f"{raised[0].error}"
                )


class StabilityWatch:
    """Counts consecutive steps out of bounds. Each period of such steps is reported once."""

    def __init__(self) -> None:
        self._count = 0

    def check(self, row: Mapping[str, float]) -> str | None:
        """Return a warning at the third step in a row that is out of bounds; else None."""
        loss, ratio = row.get("loss", 0.0), row.get("ratio", 1.0)
        self._count = self._count + 1 if loss < LOWEST_LOSS or ratio > HIGHEST_RATIO else 0
        if self._count != STEPS:
            return None
        return (
            f"warning: loss={number(loss)}, ratio={number(ratio)}: for {STEPS} steps the loss was below "
            f"{LOWEST_LOSS:g} or the ratio above {HIGHEST_RATIO:g}, so updates are too large; lower policy.lr, add "
            "policy.warmup_steps, or check that clipping is on (loss.clip_low, loss.clip_high)"
        )


def banner_facts(settings: JsonObject, facts: dict[str, str], run_dir: Path) -> dict[str, str]:
    """Return the banner's lines: from the settings, with the trainer's `facts` after the model."""
    rollout, batch, policy = settings["rollout"], settings["batch"], settings["policy"]
    updates = batch["minibatches"] * batch["epochs"]
    scale, tokens = settings["advantage"]["scale"], batch["max_tokens_per_micro_batch"]
    kl = settings["loss"]["kl"]
    penalty = f", {kl['coef']:g} x KL to {kl['model'] or kl['target']}" if kl["coef"] else ""
    return {
        "model": settings["model"]["name"],
        **facts,
        "environments": ", ".join(environment["name"] for environment in settings["environments"]),
        "loss": f"{settings['loss']['type']}, advantages scaled by {scale}{penalty}, lr {policy['lr']:g}",
        "batch": (
            f"{rollout['prompts_per_step']} prompts x {rollout['group_size']} completions, {updates} optimizer "
            f"step{'s' if updates > 1 else ''}, micro-batches of {tokens} tokens"
        ),
        "steps": str(settings["training_steps"]),
        "run folder": str(run_dir),
    }


def evaluation_line(step: int, row: dict[str, float]) -> str:
    """Return the metrics of one evaluation in a line, each followed by its standard error."""
    base, *rest = next(iter(row), "").split("/")
    prefix = "held_out/" if base == "held_out" else f"{base}/{rest[0]}/"  # of a set: eval/<name>/
    name = "held-out evaluation" if base == "held_out" else f"evaluation of {rest[0]}"
    errors = {key: f" (+-{number(row[key + STDERR])})" for key in row if key + STDERR in row}
    shown = [key for key in row if not key.endswith(STDERR)]
    shown = [key for key in shown if not key.startswith("held_out/env/") or key.endswith("/reward")]
    parts = (f"{key.removeprefix(prefix)} {number(row[key])}{errors.get(key, '')}" for key in shown)
    return "  ".join([f"{name}, step {step}:", *parts])


def changed_settings(before: JsonObject, after: JsonObject) -> list[str]:
    """Describe settings that are in both configurations with different values."""
    old = dict(files.flatten(before))
    changed = [(key, value) for key, value in files.flatten(after) if old.get(key, value) != value]
    return [f"{key} {masked(old[key], key)} -> {masked(value, key)}" for key, value in changed]
