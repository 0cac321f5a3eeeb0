"""Writers of a run's metrics, rollouts and ended games, which append to files of its folder."""

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

from colocated_grpo.errors import RunError
from colocated_grpo.summaries import advantage_of
from colocated_grpo.tracking import files
from colocated_grpo.tracking.files import Row
from colocated_grpo.types import Group, JsonObject, Rollout

HELD_OUT_ROLLOUTS = 16
"""Held-out prompts with a stored rollout: the same prompts at every evaluation, so that evaluations can be compared."""
Item = TypeVar("Item")
Decode = Callable[[Sequence[int]], str]
"""Converts token ids to text with special tokens."""


class RunWriter:
    """Append to metrics.jsonl and rollouts.jsonl.

    Rows of steps >= `first_step` are dropped on opening: they were written after the checkpoint that is resumed.
    """

    def __init__(
        self,
        run_dir: Path,
        first_step: int,
        rollouts_per_step: int,
        note: Callable[[str], None],
        decode: Decode | None = None,
    ) -> None:
        """decode: separates sampled from observed text in rollouts of several turns; None: stored as one text."""
        self.rollouts_per_step = rollouts_per_step
        self._run_dir = run_dir
        self._decode = decode
        files.keep_before(run_dir / files.METRICS_FILE, first_step, files.METRICS_ROW, note)
        files.keep_before(run_dir / files.ROLLOUTS_FILE, first_step, files.ROLLOUT_ROW, note)
        self._metrics = (run_dir / files.METRICS_FILE).open("a", encoding="utf-8")
        self._rollouts = (run_dir / files.ROLLOUTS_FILE).open("a", encoding="utf-8")

    def train(self, step: int, metrics: dict[str, float], groups: list[Group]) -> None:
        """Write the metrics of a training step, and rollouts evenly spaced from the worst to the best reward."""
        self._write(files.TRAIN, step, metrics, spread_by_reward(groups, self.rollouts_per_step))

    def evaluation(self, step: int, metrics: dict[str, float], groups: list[Group]) -> None:
        """Write the metrics of an evaluation, and the first sample of HELD_OUT_ROLLOUTS fixed prompts."""
        chosen = _evenly_spaced(sorted(groups, key=lambda group: group.prompt.index), HELD_OUT_ROLLOUTS)
        samples = [(group, 0) for group in chosen] if self.rollouts_per_step else []
        self._write(files.EVALUATION, step, metrics, samples)

    def close(self) -> None:
        self._metrics.close()
        self._rollouts.close()

    def _write(self, kind: str, step: int, metrics: dict[str, float], samples: list[tuple[Group, int]]) -> None:
        if not (self._run_dir / files.METRICS_FILE).exists():
            # A write to a deleted file succeeds and is lost. Stop now instead of training for nothing.
            raise RunError(f"{self._run_dir}: the run folder or its {files.METRICS_FILE} was deleted during the run")
        # Rollouts first: a kill between the two writes must not leave a metrics row without its rollouts.
        lines = [files.json_line(_rollout_row(kind, step, group, sample, self._decode)) for group, sample in samples]
        self._rollouts.write("".join(lines))
        self._rollouts.flush()
        row = {"kind": kind, "step": step} | {key: finite(value) for key, value in metrics.items()}
        self._metrics.write(files.json_line(row))
        self._metrics.flush()


class GameWriter:
    """Append ended games. No file is created before the first game has ended.

    Games of steps >= `first_step` are dropped on opening: they ended after the checkpoint that is resumed.
    """

    def __init__(self, run_dir: Path, first_step: int, note: Callable[[str], None]) -> None:
        self._folder = run_dir
        if (run_dir / files.GAMES_FILE).exists():
            files.keep_before(run_dir / files.GAMES_FILE, first_step, files.GAME_ROW, note)
        # Check the events separately: events are written before games, so a kill may leave events only.
        if (run_dir / files.EVENTS_FILE).exists():
            files.keep_before(run_dir / files.EVENTS_FILE, first_step, files.STEP_ROW, note)

    def write(self, step: int, games: Sequence[JsonObject]) -> None:
        """Append the games that ended in `step`. The files are closed again, so a killed run keeps every ended game."""
        if not games:
            return
        events = [
            {"step": step, "source": game["source"], **event} for game in games for event in game.get("events", ())
        ]
        ended = [{"step": step, **{key: value for key, value in game.items() if key != "events"}} for game in games]
        self._append(files.EVENTS_FILE, events)
        self._append(files.GAMES_FILE, ended)

    def _append(self, name: str, rows: Sequence[Row]) -> None:
        with (self._folder / name).open("a", encoding="utf-8") as file:
            file.writelines(map(files.json_line, rows))


def finite(value: float | None) -> float | None:
    # JSON has no NaN or infinity: strict parsers (browsers, jq, other languages) would reject the whole file.
    return None if value is None or not math.isfinite(value) else value


def _rollout_row(kind: str, step: int, group: Group, sample: int, decode: Decode | None) -> Row:
    rollout = group.rollouts[sample]
    row = {
        "kind": kind,
        "step": step,
        "prompt_index": group.prompt.index,
        "sample": sample,
        "source": group.prompt.source,
        "prompt": group.prompt.text,
        "answer": group.prompt.answer,
        "completion": rollout.text,
        "reward": finite(rollout.score.reward),
        "advantage": advantage_of(group, sample),
        "parts": {name: finite(value) for name, value in rollout.score.parts.items()},
        "error": rollout.score.error,
        "finish_reason": rollout.finish_reason,
        "completion_tokens": rollout.completion_tokens,
        "policy_version": rollout.policy_version,
    }
    turns = [] if decode is None else _turns(rollout, group.prompt.token_ids, decode)
    return row if all(turn["sampled"] for turn in turns) else row | {"turns": turns}


def _turns(rollout: Rollout, prompt: list[int], decode: Decode) -> list[JsonObject]:
    """Return the text after the prompt in parts that are either sampled or observed, with all template tokens.

    A sequence that begins with another prompt, as a sequence of an agent may, is shown from its first token.
    """
    turns = []
    for one in rollout.sequences:
        begin = one.prompt_length if one.token_ids[: one.prompt_length] == prompt else 0
        tokens = list(zip(one.loss_mask, one.token_ids, strict=True))[begin:]
        for sampled, part in groupby(tokens, key=itemgetter(0)):
            turns.append({"sampled": sampled, "text": decode([token for _, token in part])})
    return turns


def spread_by_reward(groups: list[Group], count: int) -> list[tuple[Group, int]]:
    """Return (group, sample index) of `count` rollouts, evenly spaced in reward order, worst and best included.

    A rollout without a reward sorts as the worst, so that failures are stored.
    """
    samples = [(group, sample) for group in groups for sample in range(len(group.rollouts))]

    def reward(sample: tuple[Group, int]) -> float:
        found = finite(sample[0].rollouts[sample[1]].score.reward)
        return -math.inf if found is None else found

    return _evenly_spaced(sorted(samples, key=reward), count)


def _evenly_spaced(items: list[Item], count: int) -> list[Item]:
    """Return at most `count` items including the first and the last; only the last when count is 1."""
    if count >= len(items):
        return items
    if count == 1:
        return items[-1:]
    return [items[index * (len(items) - 1) // (count - 1)] for index in range(count)]
