"""Count hits of each vLLM patch in a short run: `python -m benchmarks.patches --shape tiny --gpus 0`.

An engine starts beside a policy, samples a few groups before and after a sleep, and closes. A patch with status
'applied' and no hits replaces a constant, or a function that this model does not call. For a kernel inside CUDA graphs
only the captures count as hits: replays run no Python.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from benchmarks.decode import requests
from benchmarks.harness import config_of, main_in_ranks, model_folder, rank_parser, wake_with_weights
from colocated_grpo.policy.model import read_model_config
from colocated_grpo.policy.policy import Policy
from colocated_grpo.rollout.engine import RolloutEngine
from colocated_grpo.runtime.distributed import World
from colocated_grpo.types import JsonObject

if TYPE_CHECKING:
    from colocated_grpo.rollout.vllm.patches import Patch

COLUMNS = ("target", "hits", "status")


def main(arguments: Sequence[str] | None = None) -> int:
    return main_in_ranks("patches", parser(), measure, arguments)


def parser() -> argparse.ArgumentParser:
    parser = rank_parser(__doc__)
    parser.add_argument("--sequences", type=int, default=64, help="sequences that decode together")
    parser.add_argument("--group-size", type=int, default=16, help="completions of one prompt")
    parser.add_argument("--prompt", type=int, default=82, help="prompt tokens")
    parser.add_argument("--completion", type=int, default=128, help="tokens of each completion")
    return parser


def measure(world: World, options: argparse.Namespace) -> JsonObject:
    # Imported here because they import vLLM, which takes seconds and is needed in the ranks only.
    from colocated_grpo.assembly.engines import build_engine, engine_spec
    from colocated_grpo.rollout.vllm import patches

    with model_folder(options, world) as folder:
        config = config_of(folder, options, **sections(options))
        policy = Policy(config, read_model_config(config.model, folder), folder, world)
        engine = build_engine(engine_spec(config, folder, world.size, world.device), policy, world)
        for _ in range(2):  # the second pass follows a sleep
            wake_with_weights(config, engine, policy, world)
            tokens = sample(engine, options)
            engine.sleep()
    engine.close()
    hits = report(patches.PATCHES)
    rows = [{column: row[column] for column in COLUMNS} for row in hits]
    return {"sampled_tokens": tokens, "patches": hits, "rows": rows}


def report(patches: Iterable[Patch]) -> list[dict[str, str | int]]:
    """Return one row per patch: target, status, hits, cures, versions."""
    shown = ("target", "status", "hits", "cures", "versions")
    return [
        {name: value if isinstance(value := getattr(patch, name), int) else str(value) for name in shown}
        for patch in patches
    ]


def sections(options: argparse.Namespace) -> JsonObject:
    return {
        "rollout": {"max_prompt_tokens": options.prompt, "max_completion_tokens": options.completion},
        "engine": {"max_num_seqs": options.sequences},
    }


def sample(engine: RolloutEngine, options: argparse.Namespace) -> int:
    """Sample all sequences to their end and return the number of sampled tokens."""
    engine.submit(requests(options, options.sequences, options.completion))
    finished = tokens = 0
    while finished < options.sequences:
        for _, completion in engine.step():
            finished += 1
            tokens += len(completion.token_ids)
    return tokens


if __name__ == "__main__":
    sys.exit(main())
