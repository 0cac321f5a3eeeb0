"""Weights from the policy into the engine: `python -m colocated_grpo.benchmarks.sync --shape qwen3-1.7b --gpus 2`.

The planned sync, beside one all-gather and one copy of the same bytes measured in the same run, and beside the engine's
own `load_weights`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from colocated_grpo.benchmarks.ranks import config_of, main_in_ranks, model_folder, model_name, rank_parser
from colocated_grpo.benchmarks.roofline import (
    Roofline,
    copy_seconds,
    gather_seconds,
    measure_roofline,
    median_seconds,
    meet,
    seconds_of,
)
from colocated_grpo.policy.model import read_model_config
from colocated_grpo.policy.policy import Policy
from colocated_grpo.runtime.distributed import World

MAX_NUM_SEQS = 16
"""Enough for an engine that only receives weights: its start is not measured here."""


def main(arguments: Sequence[str] | None = None) -> int:
    return main_in_ranks("sync", parser(), measure, arguments)


def parser() -> argparse.ArgumentParser:
    parser = rank_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    return parser


def measure(world: World, options: argparse.Namespace) -> dict[str, Any]:
    # vLLM takes seconds to import, which --help need not wait for.
    from colocated_grpo.build.policy import build_engine, copy_into

    roofline = measure_roofline(world.device)
    with model_folder(options, world) as folder:
        config = config_of(folder, options, engine={"max_num_seqs": MAX_NUM_SEQS})
        policy = Policy(config, read_model_config(config.model, folder), folder, world)
        engine = build_engine(config, policy, folder, world)
    engine.wake("weights")
    planned = copy_into(engine, policy.parameters(), world)
    first = seconds_of(planned.sync, world.device, repeats=1, warmup=0, align=lambda: meet(world.device))[0]
    seconds = slowest_median(planned.sync, world, options.repeats)
    loading = copy_into(engine, policy.parameters(), world, planned=False)
    load_seconds = slowest_median(loading.sync, world, max(3, options.repeats // 3))
    dtype = next(engine.model.parameters()).dtype
    moved = policy.num_parameters() * dtype.itemsize
    bare = bare_seconds(moved, world)
    engine.sleep()
    engine.close()
    row = {
        "shape": model_name(options),
        "path": planned.path,
        "seconds": seconds,
        **bare,
        "ratio": seconds / sum(bare.values()),
        "load_weights_seconds": load_seconds,
        "first_seconds": first,
        "bytes": moved,
        "floor_seconds": floor_seconds(moved, policy.num_parameters(), roofline, world.size),
    }
    return {"dtype": str(dtype), "roofline": roofline.as_dict(), "rows": [row]}


def slowest_median(work: Callable[[], object], world: World, repeats: int) -> float:
    """Median seconds of collective work, of the slowest rank."""
    own = median_seconds(work, world.device, repeats=repeats, warmup=1, align=lambda: meet(world.device))
    return max(world.gather_objects(own))


def bare_seconds(size: int, world: World) -> dict[str, float]:
    """One all-gather whose result has `size` bytes on every rank, and one copy of it. Collective."""
    own = torch.zeros(-(-size // world.size), dtype=torch.uint8, device=world.device)
    gathered = torch.empty(world.size * own.numel(), dtype=torch.uint8, device=world.device)
    gather = max(world.gather_objects(gather_seconds(gathered, own))) if world.size > 1 else 0.0
    del own
    copy = max(world.gather_objects(copy_seconds(torch.empty_like(gathered), gathered)))
    return {"gather_seconds": gather, "copy_seconds": copy}


def floor_seconds(moved: int, parameters: int, roofline: Roofline, ranks: int) -> float:
    """What the rates allow: own fp32 rows cast, those of the others received, all of them copied into the engine."""
    cast = 4 * parameters / ranks + moved / ranks
    return (
        roofline.seconds_for_bytes(cast)
        + roofline.seconds_for_gather(moved * (ranks - 1) / ranks)
        + roofline.seconds_for_bytes(2 * moved)
    )


if __name__ == "__main__":
    sys.exit(main())
