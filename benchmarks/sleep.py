"""Start, sleep and wake of an engine beside a policy: `python -m benchmarks.sleep --shape qwen3-0.6b`.

Reports the seconds from the engine's construction to its first sampled token, the seconds of sleep and wake, and the
device memory of the engine awake and asleep, as counted by the driver.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from benchmarks.harness import (
    config_of,
    main_in_ranks,
    model_folder,
    model_name,
    rank_parser,
    wake_with_weights,
)
from benchmarks.roofline import barrier, measure_roofline, seconds_of
from benchmarks.workload import MAX_PROMPT_TOKENS
from colocated_grpo.policy.model import read_model_config
from colocated_grpo.policy.policy import Policy
from colocated_grpo.rollout.engine import Request, RolloutEngine, Sampling
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.schema import Config
from colocated_grpo.types import JsonObject

if TYPE_CHECKING:
    from colocated_grpo.rollout.vllm.vllm_engine import VLLMEngine

GIB = 1 << 30
PROBE = [1, 2, 3, 4]


def main(arguments: Sequence[str] | None = None) -> int:
    return main_in_ranks("sleep", parser(), measure, arguments)


def parser() -> argparse.ArgumentParser:
    parser = rank_parser(__doc__)
    parser.add_argument("--max-num-seqs", type=int, default=512, help="sequences that decode together")
    parser.add_argument("--max-completion", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5, help="measured cycles of sleep and wake")
    return parser


def measure(world: World, options: argparse.Namespace) -> JsonObject:
    imports = import_seconds()
    roofline = measure_roofline(world.device)
    with model_folder(options, world) as folder:
        config = config_of(folder, options, **sections(options))
        policy = Policy(config, read_model_config(config.model, folder), folder, world)
        policy.update.init_state()  # before the first reading, so that it is not counted as the engine's
        before = driver_bytes(world)
        engine, start = first_token(config, policy, folder, world)
    awake = driver_bytes(world) - before
    cycles = [cycle(engine, world) for _ in range(1 + options.repeats)][1:]
    engine.sleep()
    asleep = driver_bytes(world) - before
    engine.close()
    seconds = medians(cycles)
    row = {
        "shape": model_name(options),
        "import_seconds": imports,
        **start,
        **seconds,
        **memory(awake, asleep, world),
        "sleep_and_wake_seconds": sum(seconds.values()),
    }
    return {"roofline": roofline.as_dict(), "rows": [row]}


def sections(options: argparse.Namespace) -> JsonObject:
    return {
        "rollout": {"max_prompt_tokens": MAX_PROMPT_TOKENS, "max_completion_tokens": options.max_completion},
        "engine": {"max_num_seqs": options.max_num_seqs},
    }


def import_seconds() -> float:
    """Return the seconds from the start of this process until every module of a run is imported, vLLM included."""
    import colocated_grpo.trainer  # noqa: F401

    return time.time() - psutil.Process().create_time()


def first_token(config: Config, policy: Policy, folder: Path, world: World) -> tuple[VLLMEngine, dict[str, float]]:
    """Return an awake engine, and the seconds until it was built and until it sampled from the policy's weights."""
    from colocated_grpo.assembly.engines import build_engine, engine_spec
    from colocated_grpo.trainer import settle_garbage_collector

    barrier(world.device)
    begin = time.perf_counter()
    engine = build_engine(engine_spec(config, folder, world.size, world.device), policy, world)
    built = time.perf_counter() - begin
    wake_with_weights(config, engine, policy, world)
    sample_one_token(engine)
    first = time.perf_counter() - begin
    settle_garbage_collector()
    return engine, {"engine_start_seconds": built, "first_token_seconds": first}


def sample_one_token(engine: RolloutEngine) -> None:
    sampling = Sampling(temperature=1.0, max_tokens=1)
    engine.submit([Request(key=(0, 0), token_ids=PROBE, seed=0, sampling=sampling)])
    while not engine.step():
        pass


def cycle(engine: RolloutEngine, world: World) -> dict[str, float]:
    """Return the seconds of one sleep and one wake on the slowest rank. The engine's weights are garbage afterwards."""
    seconds = {"sleep_seconds": _seconds(engine.sleep, world)}
    leave_cached(world.device)
    seconds["wake_weights_seconds"] = _seconds(lambda: engine.wake("weights"), world)
    seconds["wake_kv_cache_seconds"] = _seconds(lambda: engine.wake("kv_cache"), world)
    return seconds


def _seconds(work: Callable[[], object], world: World) -> float:
    [own] = seconds_of(work, world.device, repeats=1, warmup=0, align=lambda: barrier(world.device))
    return max(world.gather_objects(own))


def leave_cached(device: torch.device) -> None:
    """Fill torch's allocator cache as a training phase does: a wake must return this memory to the driver first."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        blocks = [torch.empty(GIB, dtype=torch.uint8, device=device) for _ in range(free // 2 // GIB)]
        del blocks


def medians(cycles: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(seconds[name] for seconds in cycles) for name in cycles[0]}


def driver_bytes(world: World) -> int:
    """Return the device memory used by all processes, without torch's allocator cache; 0 on CPU."""
    if world.device.type != "cuda":
        return 0
    torch.cuda.synchronize(world.device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(world.device)
    return total - free


def memory(awake: int, asleep: int, world: World) -> dict[str, float]:
    """Return the engine's GiB awake and asleep, on the rank with most asleep; {} on CPU, where it never sleeps."""
    if world.device.type != "cuda":
        return {}
    asleep, awake = max(world.gather_objects((asleep, awake)))
    return {"awake_gib": awake / GIB, "asleep_gib": asleep / GIB, "given_back": 1 - asleep / awake}


if __name__ == "__main__":
    sys.exit(main())
