"""TRL's training phase alone, to compare with `benchmarks.train` on long completions.

    python -m benchmarks.train_trl --shape qwen3-1.7b --prompts 2 --group-size 4 --max-completion 32768

All completions have the maximum length: TRL's engine samples one token of each, which is repeated. TRL runs as in
`benchmarks.step`, whose --peer flags set its arguments. Settings that name the trained part may follow:
--policy.lora.rank 32
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import peer_options
from benchmarks.comparison import PeerSummary
from benchmarks.harness import config_of, model_name, rank_parser
from benchmarks.peer_tuning import engine_fraction, total_device_bytes
from benchmarks.results import describe, publish
from benchmarks.step import measure_peer, prepare
from benchmarks.throughput import ModelSize
from colocated_grpo.errors import RunError
from colocated_grpo.runtime.verdict import RUN_ERROR, USAGE_ERROR
from colocated_grpo.settings.config_file import parse_overrides
from colocated_grpo.settings.errors import ConfigError, dotted


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(arguments)
    began = time.time()
    with tempfile.TemporaryDirectory(prefix="benchmark-train-trl-") as name:
        scratch = Path(name)
        model = options.model or scratch / options.shape
        try:
            lora, size, rates = prepare(options, config_of(model, options).policy, model, scratch)
        except ConfigError as error:
            print(*(f"error: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
            return USAGE_ERROR
        if options.peer_gpu_memory is None:
            options.peer_gpu_memory = fraction_for_one_completion(options, size, adapters=lora is not None)
        spec = peer_options.spec(options, model, size, lora, began)
        try:
            summary = measure_peer(replace(spec, lengthened=True), options, size, rates, scratch)
        except RunError as error:
            print(f"error: {error}", file=sys.stderr)
            return RUN_ERROR
        result = {
            **describe("train_trl", arguments, ranks=spec.ranks),
            "parameters": size.parameters,
            "trained_parameters": size.trained_parameters,
            "lora": lora,
            "roofline": rates.as_dict(),
            "rows": [row_of(model_name(options), summary, spec.ranks)],
            "peer": summary,
        }
        publish(result, options.json)
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; `settings` are the arguments that the parser does not know."""
    parser = rank_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=2, help="prompts per batch, over all ranks")
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--max-completion", type=int, default=32768)
    peer_options.add_setup_flags(parser)
    options, options.settings = parser.parse_known_args(arguments)
    peer_options.check(options, parser)
    try:
        settings = parse_overrides(options.settings)
    except ConfigError as error:
        parser.error(str(error))
    for path, _ in settings:
        if path[:2] != ("policy", "lora"):
            parser.error(f"--{dotted(path)}: TRL has no such setting; only --policy.lora.* may follow")
    return options


def fraction_for_one_completion(options: argparse.Namespace, size: ModelSize, *, adapters: bool) -> float:
    """Return the least `vllm_gpu_memory_utilization` that works: the KV cache holds one sequence of maximum length."""
    return engine_fraction(
        size, 1, options.max_completion, options.gpus, total_device_bytes(options.gpus), adapters=adapters
    )


def row_of(name: str, summary: PeerSummary, ranks: int) -> dict[str, object]:
    """Return the figures of the training phase: TRL's forward pass for log-probabilities, and training itself."""
    median = summary["median"]
    seconds = median["seconds/score"] + median["seconds/train"]
    config = summary["arguments"]["GRPOConfig"]
    return {
        "shape": name,
        "seconds": seconds,
        "seconds/score": median["seconds/score"],
        "seconds/train": median["seconds/train"],
        "tokens": median["tokens"],
        "tokens_per_second_per_gpu": median["tokens"] / seconds / ranks,
        "micro_batch": config["per_device_train_batch_size"],
        "gradient_checkpointing": config["gradient_checkpointing"],
        **{key: value for key, value in median.items() if key.startswith("memory/train")},
    }


if __name__ == "__main__":
    sys.exit(main())
