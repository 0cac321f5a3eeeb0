"""Weight sync from policy to engine: `python -m benchmarks.sync --shape qwen3-1.7b --gpus 2`.

Times the planned sync, one plain all-gather and one plain copy of the same bytes, the comparison of all bytes after a
sync (check_seconds), and the engine's own `load_weights`.
With `--policy.lora.rank 32` it also times the merge of the adapter (publish_seconds).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import torch

from benchmarks.harness import config_of, main_in_ranks, model_folder, model_name, rank_parser
from benchmarks.roofline import (
    Roofline,
    barrier,
    copy_seconds,
    gather_seconds,
    measure_roofline,
    median_seconds,
    seconds_of,
)
from colocated_grpo.policy.model import read_model_config
from colocated_grpo.policy.policy import Policy
from colocated_grpo.runtime.distributed import World
from colocated_grpo.types import JsonObject

MAX_NUM_SEQS = 16
"""Small, because this engine only receives weights."""


def main(arguments: Sequence[str] | None = None) -> int:
    return main_in_ranks("sync", parser(), measure, arguments)


def parser() -> argparse.ArgumentParser:
    parser = rank_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    return parser


def measure(world: World, options: argparse.Namespace) -> JsonObject:
    # Imported here because they import vLLM, which takes seconds and is needed in the ranks only.
    from colocated_grpo.assembly.engines import build_engine, engine_spec
    from colocated_grpo.weights.colocated import ColocatedSync
    from colocated_grpo.weights.transport import TransportCheck

    roofline = measure_roofline(world.device)
    with model_folder(options, world) as folder:
        config = config_of(folder, options, engine={"max_num_seqs": MAX_NUM_SEQS})
        policy = Policy(config, read_model_config(config.model, folder), folder, world)
        engine = build_engine(engine_spec(config, folder, world.size, world.device), policy, world)
    engine.wake("weights")
    published, conversion = policy.weights.published(), policy.model.conversion
    planned = ColocatedSync(published, engine, conversion, world, check_every=0)
    first = seconds_of(planned.sync, world.device, repeats=1, warmup=0, align=lambda: barrier(world.device))[0]
    seconds = slowest_median(planned.sync, world, options.repeats)
    publish_seconds = slowest_median(policy.weights.publish, world, options.repeats)
    engine.transforms_weights = True  # a new sync then uses the engine's own loader
    loading = ColocatedSync(published, engine, conversion, world, check_every=0)
    load_seconds = slowest_median(loading.sync, world, max(3, options.repeats // 3))
    dtype = next(engine.model.parameters()).dtype
    check_seconds = None
    if planned.plan is not None:
        planned.sync()
        check = TransportCheck(published, planned.plan, dtype, world)
        check_seconds = slowest_median(check.verify, world, options.repeats)
    moved = policy.num_parameters() * dtype.itemsize
    bare = bare_seconds(moved, world)
    engine.sleep()
    engine.close()
    row = {
        "shape": model_name(options),
        "path": "views" if planned.plan is not None else "load_weights",
        "seconds": seconds,
        **bare,
        "ratio": seconds / sum(bare.values()),
        "check_seconds": check_seconds,
        "publish_seconds": publish_seconds,
        "load_weights_seconds": load_seconds,
        "first_seconds": first,
        "bytes": moved,
        "floor_seconds": floor_seconds(moved, policy.num_parameters(), roofline, world.size),
    }
    return {"dtype": str(dtype), "roofline": roofline.as_dict(), "rows": [row]}


def slowest_median(work: Callable[[], object], world: World, repeats: int) -> float:
    """Return the median seconds of collective work on the slowest rank."""
    own = median_seconds(work, world.device, repeats=repeats, warmup=1, align=lambda: barrier(world.device))
    return max(world.gather_objects(own))


def bare_seconds(size: int, world: World) -> dict[str, float]:
    """Time one all-gather to `size` bytes on every rank, and one copy of its result. Collective."""
    own = torch.zeros(-(-size // world.size), dtype=torch.uint8, device=world.device)
    gathered = torch.empty(world.size * own.numel(), dtype=torch.uint8, device=world.device)
    gather = max(world.gather_objects(gather_seconds(gathered, own))) if world.size > 1 else 0.0
    del own
    copy = max(world.gather_objects(copy_seconds(torch.empty_like(gathered), gathered)))
    return {"gather_seconds": gather, "copy_seconds": copy}


def floor_seconds(moved: int, parameters: int, roofline: Roofline, ranks: int) -> float:
    """Return the lower bound at measured rates: cast the own shard, gather the others, copy all into vLLM."""
    cast = 4 * parameters / ranks + moved / ranks
    return (
        roofline.seconds_for_bytes(cast)
        + roofline.seconds_for_gather(moved * (ranks - 1) / ranks)
        + roofline.seconds_for_bytes(2 * moved)
    )


if __name__ == "__main__":
    sys.exit(main())
