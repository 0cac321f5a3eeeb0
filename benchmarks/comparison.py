"""Our figures, TRL's and the device's limits side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from benchmarks.peer import SetupName
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
RESULT_KEYS: dict[SetupName, str] = {"tuned": "peer", "defaults": "peer_defaults"}
"""Key of each TRL setup in a result. In files from before the tuned setup, 'peer' holds the defaults and no 'setup'."""


class Summary(TypedDict):
    """Medians over the measured steps, and the rows of all steps."""

    median: Medians
    steps: list[StepRow]


class PeerSummary(Summary):
    """Summary of a TRL run, with its configuration."""

    setup: SetupName
    arguments: JsonObject
    """All arguments of GRPOConfig and GRPOTrainer, keyed by these two names."""
    trained_parameters: int
    """Counted by TRL."""
    tries: list[JsonObject]
    """Configurations tried before and including the measured one; empty for the defaults."""
    notes: list[str]
    """Where this run differs from the setup's definition."""


def comparison(ours: Summary, peers: Mapping[SetupName, PeerSummary], bounds: Mapping[str, float]) -> JsonObject:
    """Return the result keys 'ours', 'peer', 'peer_defaults', 'speedup', 'speedup_defaults' and 'rows'.

    A setup of TRL that did not run is None, and its speedup is empty.
    """
    mine = ours["median"]
    theirs = {name: peer["median"] for name, peer in peers.items()}
    rows = []
    for figure in SHOWN:
        if not any(figure in medians for medians in (mine, *theirs.values())):
            continue
        row: JsonObject = {"figure": figure, "ours": mine.get(figure)}
        for name, medians in theirs.items():
            row[f"TRL {name}"] = medians.get(figure)
            row[f"{name}/ours"] = ratio(medians.get(figure), mine.get(figure))
        rows.append({**row, "at least": bounds.get(figure)})
    result: JsonObject = {"ours": ours}
    for name, key in RESULT_KEYS.items():
        result[key] = peers.get(name)
        result[key.replace("peer", "speedup")] = speedup(mine, theirs.get(name, {}))
    return {**result, "rows": rows}


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
