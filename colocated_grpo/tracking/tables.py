"""Completions of a step as a table, in the trackers that have tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from colocated_grpo.tracking.files import spread_by_reward
from colocated_grpo.types import Group

TITLE = "completions"
LONGEST_TEXT = 10_000
"""Characters of a prompt or a completion; the middle of a longer one is left out."""
LEFT_OUT = "\n[...]\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table of completions."""

    columns: list[str]
    rows: list[list[Any]]
    """Text, numbers or None."""


def completions_table(step: int, groups: list[Group], count: int) -> Table:
    """Return at most `count` completions of a step, evenly spaced from the worst to the best reward.

    Columns: step, prompt, completion, reward, the parts of the reward, environment and finish_reason.
    """
    chosen = [(group, group.rollouts[sample]) for group, sample in spread_by_reward(groups, count)]
    parts = list(dict.fromkeys(name for _, rollout in chosen for name in rollout.score.parts))
    columns = ["step", "prompt", "completion", "reward", *(f"reward/{part}" for part in parts)]
    rows = [
        [
            step,
            _bounded(group.prompt.text),
            _bounded(rollout.text),
            _finite(rollout.score.reward),
            *(_finite(rollout.score.parts.get(part)) for part in parts),
            group.prompt.source,
            rollout.finish_reason,
        ]
        for group, rollout in chosen
    ]
    return Table(columns=[*columns, "environment", "finish_reason"], rows=rows)


def _bounded(text: str) -> str:
    if len(text) > LONGEST_TEXT:
        half = (LONGEST_TEXT - len(LEFT_OUT)) // 2
        text = text[:half] + LEFT_OUT + text[-half:]
    return text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate cannot be sent


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _wandb(tracker: Any, step: int, table: Table) -> None:
    import wandb

    columns: list[Any] = table.columns
    rows: list[Any] = table.rows
    tracker.log({TITLE: wandb.Table(columns=columns, data=rows), "step": step})


def _trackio(tracker: Any, step: int, table: Table) -> None:
    import pandas
    import trackio  # pyrefly: ignore[missing-import]  # of the user's choice

    tracker.log({TITLE: trackio.Table(dataframe=pandas.DataFrame(table.rows, columns=table.columns))}, step=step)


def _swanlab(tracker: Any, step: int, table: Table) -> None:
    import swanlab  # pyrefly: ignore[missing-import]

    rows = [["" if cell is None else cell for cell in row] for row in table.rows]
    tracker.log({TITLE: swanlab.echarts.Table().add(table.columns, rows)}, step=step)


def _mlflow(tracker: Any, _step: int, table: Table) -> None:
    import mlflow  # pyrefly: ignore[missing-import]

    columns = {name: [row[place] for row in table.rows] for place, name in enumerate(table.columns)}
    # One file, to which MLflow appends: it lists a run's tables in a tag, which has room for some eighty names.
    mlflow.log_table(columns, f"{TITLE}.json", run_id=tracker.tracker.info.run_id)


def _clearml(tracker: Any, step: int, table: Table) -> None:
    tracker.log_table(TITLE, columns=table.columns, data=table.rows, step=step)


def _comet(tracker: Any, step: int, table: Table) -> None:
    tracker.tracker.log_table(f"{TITLE}_{step:06d}.csv", tabular_data=table.rows, headers=table.columns)


WRITERS: dict[str, Callable[[Any, int, Table], None]] = {
    "wandb": _wandb,
    "trackio": _trackio,
    "swanlab": _swanlab,
    "mlflow": _mlflow,
    "clearml": _clearml,
    "comet_ml": _comet,
}
"""Name of a tracker of accelerate -> what sends a table to it. Aim and TensorBoard have no tables."""
