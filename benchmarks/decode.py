"""Time of a decode step, by kernel: `python -m benchmarks.decode --shape qwen3-0.6b --gpus 1`.

Several groups decode together. Steps in the middle of their completions are timed and compared with their device time
and with the least time to read weights and KV cache. A decode step is one token of each sequence; a step of the engine
may take several.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.harness import (
    config_of,
    main_in_ranks,
    model_folder,
    model_name,
    rank_parser,
    wake_with_weights,
)
from benchmarks.kernels import KernelRow, busy_seconds, kernel_rows
from benchmarks.roofline import Roofline, measure_roofline, seconds_of
from benchmarks.throughput import ModelSize, model_size
from colocated_grpo.policy.model import read_model_config
from colocated_grpo.policy.policy import Policy
from colocated_grpo.rollout.engine import LocalEngine, Request, Sampling
from colocated_grpo.rollout.vllm.kv_budget import BLOCK
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.schema import Config
from colocated_grpo.types import JsonObject


def main(arguments: Sequence[str] | None = None) -> int:
    return main_in_ranks("decode", parser(), measure, arguments)


def parser() -> argparse.ArgumentParser:
    return add_work(rank_parser(__doc__), sequences=[512, 256, 64])


def add_work(parser: argparse.ArgumentParser, sequences: list[int]) -> argparse.ArgumentParser:
    """Add the flags that `measure_all` reads. sequences: the default of --sequences."""
    parser.add_argument("--sequences", type=int, nargs="+", default=sequences, help="sequences that decode together")
    parser.add_argument("--group-size", type=int, default=16, help="completions of one prompt")
    parser.add_argument("--prompt", type=int, default=82, help="prompt tokens")
    parser.add_argument("--sampled", type=int, default=384, help="engine steps before the measured ones")
    parser.add_argument("--steps", type=int, default=64, help="measured engine steps; as many profiled ones follow")
    return parser


def measure(world: World, options: argparse.Namespace) -> JsonObject:
    from colocated_grpo.assembly.engines import build_engine, engine_spec

    roofline = measure_roofline(world.device)
    with model_folder(options, world) as folder:
        config = config_of(folder, options, **sections(options))
        policy = Policy(config, read_model_config(config.model, folder), folder, world)
        size = model_size(folder, itemsize=policy.dtype.itemsize)
        engine = build_engine(
            engine_spec(with_full_cache(config, options, size), folder, world.size, world.device), policy, world
        )
    wake_with_weights(config, engine, policy, world)
    results = measure_all(engine, options, world)
    rows = [row_of(options, sequences, one, size, roofline) for sequences, one in results.items()]
    kernels = [{"sequences": sequences, **kernel} for sequences, one in results.items() for kernel in one.kernels]
    engine.close()
    return {"roofline": roofline.as_dict(), "rows": rows, "kernels": kernels}


def sections(options: argparse.Namespace) -> JsonObject:
    return {
        "rollout": {"max_prompt_tokens": options.prompt, "max_completion_tokens": most_tokens(options)},
        "engine": {"max_num_seqs": max(options.sequences)},
    }


def engine_steps(options: argparse.Namespace) -> int:
    return options.sampled + 2 * options.steps


def most_tokens(options: argparse.Namespace) -> int:
    """Return the length that no completion reaches."""
    from colocated_grpo.rollout.vllm.steady_decode import MOST_STEPS

    return MOST_STEPS * engine_steps(options) + 2


def with_full_cache(config: Config, options: argparse.Namespace, size: ModelSize) -> Config:
    """Set a KV cache for all sequences, unless the command line sets one.

    In the smaller cache of a training run, some sequences would queue and not be measured. The engine takes several
    tokens in a step only while it reads less than HOST_BYTES.
    """
    from colocated_grpo.rollout.vllm.steady_decode import HOST_BYTES

    length = options.prompt + engine_steps(options) + 2 * BLOCK
    needed = max(options.sequences) * length * size.kv_bytes_per_token + HOST_BYTES
    return config.with_values("engine", kv_cache_memory_bytes=config.engine.kv_cache_memory_bytes or needed)


def measure_all(engine: LocalEngine, options: argparse.Namespace, world: World) -> dict[int, DecodeTime]:
    """Return the time of a decode step for each number of sequences."""
    from colocated_grpo.trainer import settle_garbage_collector

    settle_garbage_collector()
    decode(engine, options, max(options.sequences), world)  # warm-up: lazy initialization, compilation
    return {sequences: decode(engine, options, sequences, world) for sequences in options.sequences}


class DecodeTime(NamedTuple):
    """Time of a decode step at one number of sequences."""

    step_seconds: float
    kernels: list[KernelRow]
    """Times and counts over `steps` decode steps."""
    steps: float
    sampled: float
    """Tokens of each sequence midway through the timed steps."""


def decode(engine: LocalEngine, options: argparse.Namespace, sequences: int, world: World) -> DecodeTime:
    """Decode `sequences` sequences together: time `options.steps` steps of the engine and profile as many more."""

    def steps(count: int) -> None:
        for _ in range(count):
            engine.step()

    def begin() -> None:
        engine.submit(requests(options, sequences, most_tokens(options)))
        steps(options.sampled)

    begin()
    before = sampled_by(engine)
    begin()
    [seconds] = seconds_of(lambda: steps(options.steps), world.device, repeats=1, warmup=0)
    kernels = kernel_rows(lambda: steps(options.steps), world.device)
    taken = (sampled_by(engine) - before) / 2
    return DecodeTime(seconds / taken, kernels, taken, before + taken / 2)


def sampled_by(engine: LocalEngine) -> float:
    """Return how many tokens each sequence has sampled, and abort all."""
    completions = [completion for _, completion in engine.sampled()]
    engine.abort()
    return sum(len(completion.token_ids) for completion in completions) / len(completions)


def requests(options: argparse.Namespace, sequences: int, tokens: int) -> list[Request]:
    """Return requests for whole groups of --group-size completions, each of exactly `tokens` tokens."""
    rng = random.Random(sequences)
    prompts = [rng.choices(range(8, 64), k=options.prompt) for _ in range(-(-sequences // options.group_size))]
    sampling = Sampling(temperature=1.0, max_tokens=tokens)
    return [
        Request(key=(index, 0), token_ids=prompts[index // options.group_size], seed=index, sampling=sampling)
        for index in range(sequences)
    ]


def row_of(
    options: argparse.Namespace, sequences: int, measured: DecodeTime, size: ModelSize, roofline: Roofline
) -> JsonObject:
    """Return step time, device time, and the time to read weights and KV cache midway through the measured steps."""
    seconds = measured.step_seconds
    busy = busy_seconds(measured.kernels) / measured.steps
    cached = sequences * (options.prompt + measured.sampled)
    return {
        "shape": model_name(options),
        "sequences": sequences,
        "cached_tokens_each": cached / sequences,
        "step_ms": seconds * 1e3,
        "device_ms": busy * 1e3,
        "idle_share": 1 - busy / seconds,
        "floor_ms": roofline.seconds_for_bytes(size.weight_bytes + cached * size.kv_bytes_per_token) * 1e3,
    }


if __name__ == "__main__":
    sys.exit(main())
