"""Our figures, the peer's and the device's limits side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHOWN = (
    "seconds/step", "seconds/generate", "seconds/score", "seconds/pack", "seconds/train", "seconds/sync",
    "seconds/wake", "seconds/sleep", "seconds/freshness", "seconds/start", "tokens", "tokens_per_second_per_gpu", "mfu",
    "padding", "imbalance", "memory/generate_gib", "memory/generate_torch_gib", "memory/train_gib",
    "memory/train_torch_gib", "prompt_tokens", "completion_tokens",
)  # fmt: skip
LESS_IS_BETTER = ("seconds/", "memory/")


def comparison(ours: Mapping[str, Any], peer: Mapping[str, Any] | None, bounds: Mapping[str, float]) -> dict[str, Any]:
    """The keys `ours`, `peer`, `speedup` and `rows` of a result. `peer` is None where none ran to its end."""
    theirs = peer["median"] if peer else {}
    rows = [
        {
            "figure": name,
            "ours": ours["median"].get(name),
            "peer": theirs.get(name),
            "peer/ours": ratio(theirs.get(name), ours["median"].get(name)),
            "at least": bounds.get(name),
        }
        for name in SHOWN
        if name in ours["median"] or name in theirs
    ]
    return {"ours": ours, "peer": peer, "speedup": speedup(ours["median"], theirs), "rows": rows}


def speedup(ours: Mapping[str, float], peer: Mapping[str, float]) -> dict[str, float]:
    """How many times less time and memory, or more throughput, than the peer; for each figure that both have."""
    factors = {}
    for name in SHOWN:
        less = name.startswith(LESS_IS_BETTER)
        if not less and name not in ("tokens_per_second_per_gpu", "mfu"):
            continue
        factor = ratio(peer.get(name), ours.get(name)) if less else ratio(ours.get(name), peer.get(name))
        if factor is not None:
            factors[name] = factor
    return factors


def ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None
