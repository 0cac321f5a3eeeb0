"""Entry points of the benchmarks: start the same command again in every rank, or run in this process alone.

Even a single rank runs in a new process, because libraries read their environment variables when they are imported.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import yaml

from benchmarks.results import describe, publish
from benchmarks.roofline import Roofline, measure_roofline
from benchmarks.workload import TASK
from colocated_grpo.errors import RunError
from colocated_grpo.launch.launcher import child_environment
from colocated_grpo.runtime.distributed import World, init_world
from colocated_grpo.runtime.processes import run_command
from colocated_grpo.runtime.program import exit_code, rank_environment
from colocated_grpo.runtime.supervision import StopRequest
from colocated_grpo.runtime.verdict import RUN_ERROR
from colocated_grpo.settings.config_file import load_config
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.schema import Config
from colocated_grpo.tools.shapes import SHAPES
from colocated_grpo.tracking.ending import make_output
from colocated_grpo.types import JsonObject

if TYPE_CHECKING:
    from colocated_grpo.policy.policy import Policy
    from colocated_grpo.rollout.vllm.vllm_engine import VLLMEngine
    from colocated_grpo.run import Run

MeasureInRanks = Callable[[World, argparse.Namespace], JsonObject]
"""Runs on every rank; rank 0's return value is published."""
MeasureHere = Callable[[argparse.Namespace, torch.device, Roofline], JsonObject]
"""Returns the result's rows and any further keys."""


def rank_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the flags common to benchmarks in ranks. Unknown flags are settings: --policy.compile off"""
    parser = argparse.ArgumentParser(
        description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--model", type=Path, help="model folder to use; created from --shape if missing")
    parser.add_argument("--gpus", type=int, default=min(1, torch.cuda.device_count()), help="0: CPU")
    parser.add_argument("--nproc", type=int, default=1, help="CPU ranks, with --gpus 0")
    parser.add_argument("--json", type=Path, help="result file to write")
    return parser


def main_in_ranks(
    benchmark: str, parser: argparse.ArgumentParser, measure: MeasureInRanks, arguments: Sequence[str] | None
) -> int:
    """Run `measure` on the ranks that the flags name and publish its result.

    Returns the exit code in the starting process. Never returns in a rank, which exits with its own code.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options, options.settings = parser.parse_known_args(arguments)
    if "RANK" not in os.environ:
        return _start_ranks(benchmark, arguments, options)
    warnings.simplefilter("ignore", FutureWarning)
    try:
        world = init_world()
        result = measure(world, options)
        if world.is_main:
            publish({**describe(benchmark, arguments, ranks=world.size), **result}, options.json)
        world.barrier()
        dist.destroy_process_group()
        code = 0
    except (ConfigError, RunError) as error:
        code = exit_code(error)
    except BaseException:
        traceback.print_exc()
        code = RUN_ERROR
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip interpreter shutdown: after a failure the other ranks may be stuck in a collective, and the teardown of torch
    # and vLLM would block on them.
    os._exit(code)


def _start_ranks(benchmark: str, arguments: Sequence[str], options: argparse.Namespace) -> int:
    ranks = options.gpus or options.nproc
    environment = child_environment(os.environ, options.gpus, ranks, "INFO")
    command = [sys.executable, "-m"]
    if ranks == 1:
        environment |= rank_environment(environment)
    else:
        command += ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        # After "--", or torchrun would read --nproc as its own --nproc-per-node.
        command += ["--nproc-per-node", str(ranks), "-m", "--"]
    command += [f"benchmarks.{benchmark}", *arguments]
    return run_command(command, [environment], None, lambda number: (b"\nstopping\n", None)).code


def main_here(
    benchmark: str, arguments: Sequence[str] | None, parser: argparse.ArgumentParser, measure: MeasureHere
) -> int:
    """Measure in this process, on the first CUDA device or else on the CPU, and publish. `parser` defines --json."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(arguments)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    roofline = measure_roofline(device)
    measured = measure(options, device, roofline)
    result = describe(benchmark, arguments, ranks=1)
    publish({**result, "roofline": roofline.as_dict(), **measured}, options.json)
    return 0


@contextmanager
def model_folder(options: argparse.Namespace, world: World) -> Generator[Path]:
    """Yield the model folder of --model, or of a random model of --shape that is deleted on exit. Collective."""
    # Imported here because transformers takes seconds to import, and neither --help nor the starting process needs it.
    from transformers.utils.logging import disable_progress_bar

    from colocated_grpo.tools.make_model import build_char_tokenizer, build_model, save_model

    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="benchmark-model-") as scratch:
        folder = options.model or world.broadcast_object(Path(scratch)) / options.shape

        def make() -> None:
            if not folder.exists():
                shape = SHAPES[options.shape]
                tokenizer = build_char_tokenizer(shape.vocab, shape.max_positions)
                save_model(build_model(shape, tokenizer, dtype=torch.bfloat16), tokenizer, folder)

        world.from_main(make)
        if world.device.type == "cuda":
            torch.cuda.empty_cache()  # rank 0 built the model on its device
        yield folder
        world.barrier()  # before rank 0 deletes files that other ranks may still read


@contextmanager
def built_run(config: Config, folder: Path, world: World) -> Generator[Run]:
    """Yield a run that is ready for `train`, and close its resources on exit. Collective."""
    # Imported here because they import vLLM, which takes seconds and is needed in the ranks only.
    from colocated_grpo.assembly.assemble import build_run
    from colocated_grpo.assembly.assemble import describe as facts_of
    from colocated_grpo.trainer import settle_garbage_collector

    output = make_output(config.tracking.console, config.training_steps, is_main=world.is_main)
    stop = StopRequest(world.store)
    stop.listen()
    resources = ExitStack()
    run = build_run(config, folder, world, stop, output, resources)
    run.tracker.start(config.model_dump(mode="json"), facts_of(run), run.start, None)
    settle_garbage_collector()
    yield run
    resources.close()  # not after a failure: other ranks may be stuck in a collective
    gc.unfreeze()  # undoes settle_garbage_collector, so that the next run's memory can replace this run's


def config_of(model: Path, options: argparse.Namespace, **sections: Any) -> Config:
    """Return the config. Precedence: the command line's settings, `sections`, the defaults."""
    content = {
        "model": {"name": str(model)},
        "environments": [{"type": "task", "name": TASK}],
        **sections,
    }
    with tempfile.NamedTemporaryFile("w", prefix="benchmark-", suffix=".yaml") as file:
        yaml.safe_dump(content, file)
        file.flush()
        return load_config(file.name, options.settings)


def model_name(options: argparse.Namespace) -> str:
    """Display name of the model that `model_folder` yields."""
    return options.model.name if options.model else options.shape


def wake_with_weights(config: Config, engine: VLLMEngine, policy: Policy, world: World) -> None:
    """Wake a new or sleeping engine with the policy's weights. Collective."""
    from colocated_grpo.assembly.engines import build_sync  # imports vLLM, which --help does not need

    engine.wake("weights")
    build_sync(policy, engine, world, shared=config.weights == "shared", check_every=config.freshness.every).sync()
    engine.weights_changed(policy.version)
    engine.wake("kv_cache")
