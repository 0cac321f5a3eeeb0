"""The training phase alone, without an engine: `python -m benchmarks.train --shape qwen3-1.7b`.

Packs synthetic rollouts with the lengths of `benchmarks.workload` as the trainer does, and trains them, one optimizer
step per repetition. Settings may follow: --policy.gradient_checkpointing true
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.harness import config_of, main_in_ranks, model_folder, model_name, rank_parser
from benchmarks.kernels import busy_seconds, kernel_rows
from benchmarks.roofline import Roofline, barrier, measure_roofline, seconds_of
from benchmarks.throughput import model_size
from benchmarks.workload import LONGEST_PROMPT, SHORTEST_PROMPT, STOP_PROBABILITY
from colocated_grpo.advantages import group_advantages
from colocated_grpo.batching.pack import Batch, pack
from colocated_grpo.metrics import Metrics
from colocated_grpo.policy.activations import StepSettings, choose_micro_batch_size
from colocated_grpo.policy.blocks import num_checkpointed
from colocated_grpo.policy.model import read_model_config
from colocated_grpo.policy.policy import Policy
from colocated_grpo.runtime.distributed import World, with_context
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.schema import Config
from colocated_grpo.summaries import group_rewards
from colocated_grpo.types import Group, JsonObject, Prompt, Rollout, Score

GIB = 1 << 30
REUSE = ("turns", "prompt", "nothing")


def main(arguments: Sequence[str] | None = None) -> int:
    return main_in_ranks("train", parser(), measure, arguments)


def parser() -> argparse.ArgumentParser:
    parser = add_work(rank_parser(__doc__))
    parser.add_argument("--steps", type=int, default=5, help="measured optimizer steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them, for compilation")
    return parser


def add_work(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags that `make_groups` reads."""
    parser.add_argument("--prompts", type=int, default=32, help="prompts per batch, over all ranks")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--turns", type=int, default=1, help="sequences of each episode, of an agent if more than one")
    add_range = partial(parser.add_argument, type=int, nargs=2, metavar=("LEAST", "MOST"))
    add_range("--prompt-tokens", default=[SHORTEST_PROMPT, LONGEST_PROMPT])
    add_range(
        "--message-tokens", default=[100, 200], help="added by a turn: an answer without thoughts, a tool's output"
    )
    what = "the history of all turns, the first prompt, or nothing"
    parser.add_argument("--reuse", choices=REUSE, default=REUSE[0], help=f"what sequences have in common: {what}")
    parser.add_argument("--max-completion", type=int, default=1024)
    parser.add_argument(
        "--mean-completion",
        type=float,
        default=1 / STOP_PROBABILITY,
        help="before the cut",
    )
    return parser


def measure(world: World, options: argparse.Namespace) -> JsonObject:
    roofline = measure_roofline(world.device)
    with model_folder(options, world) as folder:
        config = config_of(folder, options, **sections(options))
        if world.size % (size := config.policy.context_parallel):
            raise ConfigError(f"policy.context_parallel={size}: must divide the number of ranks, {world.size}")
        hf_config = read_model_config(config.model, folder)
        world = with_context(world, config.policy.context_parallel)
        policy = Policy(config, hf_config, folder, world)
        size = model_size(folder, policy.dtype.itemsize, config.policy)
    config = settle_memory(policy, config, world)
    batch = pack_all(make_groups(options, hf_config.vocab_size), config, world)
    seconds = seconds_of(
        lambda: train(policy, batch),
        world.device,
        repeats=options.steps,
        warmup=options.warmup,
        align=lambda: barrier(world.device),
    )
    slowest = [max(by_rank) for by_rank in zip(*world.gather_objects(seconds), strict=True)]
    peaks = peak_memory(world)
    kernels = kernel_rows(lambda: train(policy, batch), world.device)
    row = {
        "shape": model_name(options),
        **speed(batch, size.training_flops_per_token, statistics.median(slowest), roofline, world.size),
        **packing(batch, world),
        "checkpointed_blocks": num_checkpointed(policy.model),
        "idle_share": 1 - busy_seconds(kernels) / statistics.median(slowest),
        **peaks,
    }
    return {
        "parameters": size.parameters,
        "trained_parameters": size.trained_parameters,
        "seconds": slowest,
        "roofline": roofline.as_dict(),
        "rows": [row],
        "kernels": kernels,
    }


def settle_memory(policy: Policy, config: Config, world: World) -> Config:
    """Prepare as a run does for its first step: allocate optimizer state, size micro-batches, reset peak statistics."""
    policy.update.init_state()
    fit = choose_micro_batch_size(policy, StepSettings.of(config), world)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
    return config.with_values("batch", max_tokens_per_micro_batch=fit.tokens)


def sections(options: argparse.Namespace) -> JsonObject:
    return {
        "rollout": {
            "prompts_per_step": options.prompts,
            "group_size": options.group_size,
            "max_prompt_tokens": options.prompt_tokens[1] + options.message_tokens[1] * (options.turns - 1),
            "max_completion_tokens": options.max_completion,
        }
    }


def make_groups(options: argparse.Namespace, vocabulary: int) -> list[Group]:
    """Return groups with random tokens, geometric lengths and rewards of 0 and 1; the same on every rank."""
    rng = random.Random(0)
    return [_group(index, rng, options, vocabulary) for index in range(options.prompts)]


def _group(index: int, rng: random.Random, options: argparse.Namespace, vocabulary: int) -> Group:
    tokens = lambda count: rng.choices(range(vocabulary), k=count)  # noqa: E731
    prompt = tokens(rng.randint(*options.prompt_tokens))
    length = partial(_geometric, rng, options.mean_completion, options.max_completion)
    lengths = [[length() for _ in range(options.turns)] for _ in range(options.group_size)]
    unshared = _Unshared(len(prompt), options.reuse, random.Random(index), vocabulary)
    rollouts = []
    for sibling, turns in enumerate(lengths):
        # A message follows the one before, without what was sampled: the agent's chat template strips thoughts.
        history, sequences = prompt, []
        for turn, count in enumerate(turns):
            history = history + tokens(rng.randint(*options.message_tokens)) if turn else history
            sequences.append(_rollout(unshared.replaced(history), tokens(count), float(sibling % 2), vocabulary))
        rollouts.append(replace(sequences[0], further=sequences[1:]))
    return Group(prompt=Prompt(index=index, token_ids=prompt, text="", item={}, source="synthetic"), rollouts=rollouts)


class _Unshared(NamedTuple):
    """Replaces tokens that --reuse excludes from sharing by random ones. Lengths are the same with each --reuse."""

    prompt_length: int
    reuse: str
    rng: random.Random
    vocabulary: int

    def replaced(self, history: list[int]) -> list[int]:
        kept = {"turns": len(history), "prompt": self.prompt_length, "nothing": 0}[self.reuse]
        return history[:kept] + self.rng.choices(range(self.vocabulary), k=len(history) - kept)


def _geometric(rng: random.Random, mean: float, longest: int) -> int:
    """Draw a completion length, stop token included: geometric with mean `mean`, then cut at `longest`."""
    return min(longest, 1 + int(math.log(1 - rng.random()) / math.log1p(-1 / mean)))


def _rollout(prompt: list[int], completion: list[int], reward: float, vocabulary: int) -> Rollout:
    # Under random weights every token is about equally likely, so importance weights stay near 1 as in a real run.
    logprobs = [0.0] * len(prompt) + [-math.log(vocabulary)] * len(completion)
    return Rollout(
        token_ids=prompt + completion,
        loss_mask=[False] * len(prompt) + [True] * len(completion),
        sampling_logprobs=logprobs,
        prompt_length=len(prompt),
        text="",
        finish_reason="stop",
        policy_version=0,
        temperature=1.0,
        score=Score(reward=reward),
    )


def pack_all(groups: Sequence[Group], config: Config, world: World) -> Batch:
    """Return this rank's part of the batch, packed as in the trainer."""
    advantages = group_advantages([group_rewards(group) for group in groups], config.advantage)
    kept = [False] * len(groups)
    return pack(
        groups,
        advantages,
        kept,
        config.batch,
        rank=world.rank,
        world_size=world.size,
        context=world.context,
        shuffle_seed=0,
    )


def train(policy: Policy, batch: Batch) -> None:
    """Run the training phase of one batch, optimizer steps included."""
    metrics = Metrics(policy.device)
    for minibatch in batch.minibatches:
        policy.forward_backward(minibatch, metrics)
        policy.optimizer_step(metrics)


def speed(batch: Batch, flops_per_token: int, seconds: float, roofline: Roofline, ranks: int) -> dict[str, float]:
    """Return seconds, throughput and MFU. FLOP are those of computed tokens, without recomputation."""
    flops = flops_per_token * batch.computed_tokens / ranks
    return {
        "seconds": seconds,
        "tokens_per_second_per_gpu": batch.num_tokens / seconds / ranks,
        "mfu": flops / seconds / roofline.peak_flops_per_second,
        "mfu_of_measured_matmul": flops / seconds / roofline.matmul_flops_per_second,
        "floor_seconds": roofline.seconds_for_flops(flops),
    }


def packing(batch: Batch, world: World) -> dict[str, float]:
    """Return packing statistics, and the tokens of the same micro-batches if padded to their longest sequence."""
    micro_batches = [micro_batch for minibatch in batch.minibatches for micro_batch in minibatch.micro_batches]
    packed = sum(world.gather_objects(sum(m.tokens.num_tokens for m in micro_batches)))
    padded = sum(
        world.gather_objects(sum(m.loss_inputs.num_sequences * m.tokens.longest_sequence for m in micro_batches))
    )
    return {
        "tokens": batch.num_tokens,
        "micro_batches": len(micro_batches),
        "prefix_reuse": 1 - batch.computed_tokens / batch.num_tokens,
        "padding": packed / batch.computed_tokens - 1,
        "padded_tokens": padded,
        "padding_saved": 1 - packed / padded,
        "imbalance": batch.imbalance,
    }


def peak_memory(world: World) -> dict[str, float]:
    """Return the peak GiB of the fullest rank; {} on CPU.

    torch caches freed memory, so the driver's count at the end is a peak as well.
    """
    if world.device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(world.device)
    peaks = world.gather_objects((torch.cuda.max_memory_allocated(world.device), total - free))
    return {
        "torch_peak_gib": max(allocated for allocated, _ in peaks) / GIB,
        "driver_gib": max(used for _, used in peaks) / GIB,
    }


if __name__ == "__main__":
    sys.exit(main())
