"""Cost of worker processes for a cheap reward: `python -m colocated_grpo.benchmarks.rewards --shape small --gpus 0`.

One engine samples the same completions for two collectors, in turn. One calls a reward function of a user's file in
threads of the rank, the other in worker processes (`run_in`). Compares the time until all completions have rewards.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from colocated_grpo.benchmarks.harness import (
    config_of,
    main_in_ranks,
    model_folder,
    model_name,
    rank_parser,
    wake_with_weights,
)
from colocated_grpo.benchmarks.roofline import measure_roofline, median_ratio
from colocated_grpo.benchmarks.workload import MAX_PROMPT_TOKENS, RandomWork, add_stop_tokens
from colocated_grpo.config import Config
from colocated_grpo.errors import RunError
from colocated_grpo.policy.policy import Policy
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.supervision import StopRequest
from colocated_grpo.tracking import NullTracker
from colocated_grpo.types import JsonObject

if TYPE_CHECKING:
    from colocated_grpo.build.data import ModelFiles

PLACES = "thread", "process"
"""Values of `run_in`."""
REWARD = '''\
from hashlib import blake2b


def cheap(completions, **columns):
    """Return 0 or 1 from a hash of the text."""
    return [float(blake2b(text.encode(), digest_size=1).digest()[0] & 1) for text in completions]
'''


def main(arguments: Sequence[str] | None = None) -> int:
    return main_in_ranks("rewards", parser(), measure, arguments)


def parser() -> argparse.ArgumentParser:
    parser = rank_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-completion", type=int, default=32)
    parser.add_argument("--steps", type=int, default=40, help="measured batches of each kind")
    parser.add_argument("--warmup", type=int, default=3)
    return parser


def measure(world: World, options: argparse.Namespace) -> JsonObject:
    # Imported here because they import vLLM, which takes seconds and is needed in the ranks only.
    from colocated_grpo.build.data import read_model_files
    from colocated_grpo.build.policy import build_engine

    roofline = measure_roofline(world.device)
    stop = StopRequest(world.store)
    with model_folder(options, world) as folder, tempfile.TemporaryDirectory(prefix="benchmark-rewards-") as scratch:
        if options.model is None and world.is_main:
            add_stop_tokens(folder)
        world.barrier()
        write_work(Path(scratch), options)
        configs = {place: config_with(options, folder, Path(scratch), place) for place in PLACES}
        model = read_model_files(configs["thread"], world)
        policy = Policy(configs["thread"], model.hf_config, folder, world)
        engine = build_engine(configs["thread"], policy, folder, world)
        wake_with_weights(configs["thread"], engine, policy, world)
        driver = Driver(engine, Inbox())
        samplers = {place: Sampler(config, model, driver, world, stop) for place, config in configs.items()}
        batches = {place: [] for place in PLACES}
        for step in range(options.warmup + options.steps):
            for place in PLACES if step % 2 else PLACES[::-1]:
                batches[place].append(samplers[place].batch(step))
        for sampler in samplers.values():
            sampler.close()
        engine.close()
    measured = {place: batches[place][options.warmup :] for place in PLACES}
    return {"shape": model_name(options), "roofline": roofline.as_dict(), **figures(measured)}


def write_work(folder: Path, options: argparse.Namespace) -> None:
    """Write the reward function and enough rows for all batches, without those that are held out."""
    rows = islice(RandomWork().prompts(0, "train"), 2 * options.prompts * (options.warmup + options.steps))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "cheap_reward.py").write_text(REWARD)


def config_with(options: argparse.Namespace, model: Path, folder: Path, place: str) -> Config:
    """Return settings with which both places sample the same tokens for the same step."""
    reward = {"name": f"{folder / 'cheap_reward.py'}:cheap", "run_in": place}
    return config_of(
        model,
        options,
        environments=[{"type": "dataset", "name": str(folder / "rows.jsonl"), "rewards": [reward]}],
        deterministic=True,
        rollout={
            "prompts_per_step": options.prompts,
            "group_size": options.group_size,
            "max_prompt_tokens": MAX_PROMPT_TOKENS,
            "max_completion_tokens": options.max_completion,
        },
        engine={"max_num_seqs": options.prompts * options.group_size},
        evaluation={"every": 0},
    )


class Sampler:
    """Batches whose rewards are computed in one place."""

    def __init__(self, config: Config, model: ModelFiles, driver: Driver, world: World, stop: StopRequest) -> None:
        from colocated_grpo.build.data import build_collector, build_data, build_prompt_supply

        self._resources = ExitStack()
        data = build_data(config, model, world, NullTracker(), self._resources)
        collector = build_collector(config, driver, Inbox(), data, model, world, stop, nullcontext)
        self._resources.callback(collector.close)
        supply = build_prompt_supply(config, data, model, collector, world, stop, None, print)
        assert supply is not None  # the config has an environment
        self._supply = supply

    def batch(self, step: int) -> tuple[float, list[float | None]]:
        """Sample and score a batch. Returns its seconds, and the rewards of all completions."""
        order = self._supply.order(step)
        began = time.perf_counter()
        groups = order()
        seconds = time.perf_counter() - began
        self._supply.settle(groups)
        return seconds, [rollout.score.reward for group in groups for rollout in group.rollouts]

    def close(self) -> None:
        self._supply.close()
        self._resources.close()


def figures(measured: Mapping[str, Sequence[tuple[float, list[float | None]]]]) -> JsonObject:
    """Return one row for each place. measured: seconds and rewards of the same batches in each place, in order.

    Raises RunError if their rewards differ.
    """
    if len({str([rewards for _, rewards in batches]) for batches in measured.values()}) > 1:
        raise RunError("the rewards in threads and in processes differ")
    seconds = {place: [one for one, _ in batches] for place, batches in measured.items()}
    rows = [
        {"run_in": place, "batch_seconds": statistics.median(ours), "ratio": median_ratio(ours, seconds["thread"])}
        for place, ours in seconds.items()
    ]
    return {"rows": rows, "seconds": seconds}


if __name__ == "__main__":
    sys.exit(main())
