"""Time of a decode step with merged weights and with vLLM's own adapters:
`python -m colocated_grpo.benchmarks.decode_lora --shape qwen3-0.6b --gpus 1`.

Merged weights are plain weights, as in the trainer's engine. The second engine has `enable_lora` and a random adapter
of all linear layers, which every request names. Both are measured as in `benchmarks.decode`, one after the other.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from colocated_grpo.benchmarks.adapters import write_random_adapter
from colocated_grpo.benchmarks.decode import DecodeTime, add_work, measure_all, row_of, sections, with_full_cache
from colocated_grpo.benchmarks.harness import config_of, main_in_ranks, model_folder, rank_parser
from colocated_grpo.benchmarks.roofline import measure_roofline
from colocated_grpo.benchmarks.throughput import model_size
from colocated_grpo.config import Config
from colocated_grpo.config.lora import LoRAConfig
from colocated_grpo.policy.policy import compute_dtype
from colocated_grpo.runtime.distributed import World
from colocated_grpo.types import JsonObject

MERGED, ADAPTER = "merged", "vLLM's adapter"


def main(arguments: Sequence[str] | None = None) -> int:
    return main_in_ranks("decode_lora", parser(), measure, arguments)


def parser() -> argparse.ArgumentParser:
    parser = add_work(rank_parser(__doc__), sequences=[256, 32, 1])
    parser.add_argument("--rank", type=int, default=32, help="rank of the adapter; vLLM takes 8, 16, 32, 64 and more")
    return parser


def measure(world: World, options: argparse.Namespace) -> JsonObject:
    roofline = measure_roofline(world.device)
    with model_folder(options, world) as folder, TemporaryDirectory(prefix="benchmark-adapter-") as adapter:
        config = config_of(folder, options, **sections(options))
        dtype = compute_dtype(config, world.device)
        size = model_size(folder, itemsize=dtype.itemsize)
        config = with_full_cache(config, options, size)
        write_random_adapter(Path(adapter), folder, LoRAConfig(rank=options.rank, alpha=options.rank), dtype)
        measured = {
            MERGED: times(config, folder, dtype, world, options, None),
            ADAPTER: times(config, folder, dtype, world, options, Path(adapter)),
        }
    rows, kernels = [], []
    for sequences, merged in measured[MERGED].items():
        for weights, by_sequences in measured.items():
            time = by_sequences[sequences]
            row = row_of(options, sequences, time, size, roofline)
            rows.append({"weights": weights, **row, "merged x": time.step_seconds / merged.step_seconds})
            kernels += [{"weights": weights, "sequences": sequences, **kernel} for kernel in time.kernels]
    return {"rank": options.rank, "roofline": roofline.as_dict(), "rows": rows, "kernels": kernels}


def times(
    config: Config, folder: Path, dtype: torch.dtype, world: World, options: argparse.Namespace, adapter: Path | None
) -> dict[int, DecodeTime]:
    """Return the time of a decode step by number of sequences, in an engine of its own.

    adapter: folder of the adapter that all requests name; None: plain weights.
    """
    # Imported here because it imports vLLM, which takes seconds and is needed in the ranks only.
    from colocated_grpo.rollout.vllm.engine import VLLMEngine

    # No trainer writes the weights, so the engine reads the model folder, and never sleeps.
    arguments: JsonObject = {"load_format": "auto"}
    if adapter is not None:
        arguments |= {"enable_lora": True, "max_lora_rank": options.rank}
    settings = config.engine.model_copy(update={"sleep": False, "args": {**arguments, **config.engine.args}})
    engine = VLLMEngine(config.model_copy(update={"engine": settings}), folder, dtype, world)
    if adapter is not None:
        engine.adapters.load("benchmark", str(adapter))
    measured = measure_all(engine, options, world)
    engine.close()
    del engine
    gc.unfreeze()  # its memory is freed only if the collector sees it
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return measured


if __name__ == "__main__":
    sys.exit(main())
