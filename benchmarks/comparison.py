"""Our figures, TRL's and the device's limits side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from benchmarks.throughput import Medians, StepRow
from colocated_grpo.types import JsonObject

SHOWN = (
    "seconds/step", "seconds/generate", "seconds/score", "seconds/pack", "seconds/train", "seconds/sync",
    "seconds/wake", "seconds/sleep", "seconds/start", "tokens", "tokens_per_second_per_gpu", "mfu",
    "padding", "imbalance", "memory/generate_gib", "memory/generate_torch_gib", "memory/train_gib",
    "memory/train_torch_gib", "prompt_tokens", "completion_tokens",
)  # fmt: skip
LESS_IS_BETTER = ("seconds/", "memory/")
MORE_IS_BETTER = ("tokens_per_second_per_gpu", "mfu")


class Summary(TypedDict):
    """Medians over the measured steps, and the rows of all steps."""

    median: Medians
    steps: list[StepRow]


class PeerSummary(Summary):
    """Summary of a TRL run, with its configuration."""

    arguments: JsonObject
    """All arguments of GRPOConfig and GRPOTrainer, keyed by these two names."""
    trained_parameters: int
    """Counted by TRL."""
    tries: list[JsonObject]
    """Configurations tried before and including the measured one."""
    notes: list[str]
    """What the arguments do not say."""


def comparison(ours: Summary, peer: PeerSummary | None, bounds: Mapping[str, float]) -> JsonObject:
    """Return the result keys 'ours', 'peer', 'speedup' and 'rows'. peer: None if TRL did not run."""
    mine = ours["median"]
    theirs: Medians = {} if peer is None else peer["median"]
    rows = []
    for figure in SHOWN:
        if figure not in {**mine, **theirs}:
            continue
        row: JsonObject = {"figure": figure, "ours": mine.get(figure)}
        if peer is not None:
            row |= {"TRL": theirs.get(figure), "TRL/ours": ratio(theirs.get(figure), mine.get(figure))}
        rows.append({**row, "at least": bounds.get(figure)})
    return {"ours": ours, "peer": peer, "speedup": speedup(mine, theirs), "rows": rows}


def speedup(ours: Mapping[str, float], peer: Mapping[str, float]) -> Medians:
    """Return our advantage in each common figure: peer / ours for time and memory, ours / peer for throughput."""
    factors = {}
    for name in SHOWN:
        if name.startswith(LESS_IS_BETTER):
            factor = ratio(peer.get(name), ours.get(name))
        elif name in MORE_IS_BETTER:
            factor = ratio(ours.get(name), peer.get(name))
        else:
            continue
        if factor is not None:
            factors[name] = factor
    return factors


def ratio(over: float | None, under: float | None) -> float | None:
    """Return over / under, or None if a number is missing or `under` is zero."""
    return over / under if over is not None and under else None
