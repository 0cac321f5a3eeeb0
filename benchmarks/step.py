"""Seconds of a whole training step, by phase: `python -m benchmarks.step --shape qwen3-0.6b --gpus 1`.

Runs the trainer itself through the launcher on a random model of the shape, drops the first steps (compilation) and
writes medians as JSON, beside the device's limits. Settings may follow: --weights shared

--peer trl then runs the same work through tuned TRL: with Liger kernels, no gradient checkpointing where that fits, and
the largest micro-batch that fits, found by trying. With --policy.lora TRL trains the same adapter.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import yaml
from transformers import AutoConfig

from benchmarks import peer, peer_options
from benchmarks.comparison import PeerSummary, Summary, comparison
from benchmarks.peer import PeerSpec, loads_frozen_weights_in_bf16
from benchmarks.peer_tuning import (
    TunedRun,
    candidates,
    least_training_bytes,
    run_tuned,
    total_device_bytes,
)
from benchmarks.rates import measured_rates
from benchmarks.results import describe, publish
from benchmarks.roofline import Roofline
from benchmarks.throughput import (
    Medians,
    ModelSize,
    StepRow,
    generation_bound,
    medians,
    model_size,
    sync_bound,
    training_bound,
    with_rates,
)
from benchmarks.workload import MAX_PROMPT_TOKENS, STOP_PROBABILITY, TASK, add_stop_tokens
from colocated_grpo.errors import RunError
from colocated_grpo.runtime.verdict import RUN_ERROR, USAGE_ERROR
from colocated_grpo.settings.config_file import load_config
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.training import PolicyConfig
from colocated_grpo.tools.shapes import SHAPES
from colocated_grpo.tracking.files import CONFIG_FILE, METRICS_FILE, TRAIN, read_rollouts, read_rows
from colocated_grpo.types import JsonObject

KERNELS = Path("profile") / "kernels.txt"


@dataclass(frozen=True, kw_only=True)
class OurRun:
    """A completed run of our trainer."""

    steps: list[StepRow]
    start_seconds: float
    """From the launch to the end of the first step."""
    lengths: list[list[int]]
    """Completion tokens of every rollout, by step."""


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    began = time.time()
    options, overrides = parse(arguments)
    ranks = options.gpus or options.nproc
    with tempfile.TemporaryDirectory(prefix="benchmark-step-") as name:
        scratch = Path(name)
        model = options.model or scratch / options.shape
        config_file = scratch / "step.yaml"
        config_file.write_text(yaml.safe_dump(settings(options, model, scratch / "runs")))
        try:
            policy = load_config(config_file, overrides).policy
            lora, size, rates = prepare(options, policy, model, scratch, options.mean_completion)
        except ConfigError as error:
            print(*(f"error: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
            return USAGE_ERROR
        run = run_ours(options, config_file, overrides, scratch / "runs")
        ours = summary(run.steps, run.start_seconds, size, rates, ranks, options.warmup)
        bounds = lower_bounds(run, size, rates, ranks, options.warmup)
        result = {
            **describe("step", arguments, ranks=ranks),
            "work": {name: value for name, value in vars(options).items() if name not in ("model", "json")},
            "parameters": size.parameters,
            "trained_parameters": size.trained_parameters,
            "lora": lora,
            "roofline": {**rates.as_dict(), **bounds},
        }
        # Published after each part: a run of TRL takes several times as long as ours, and may be cut off.
        publish({**result, **comparison(ours, None, bounds)}, options.json)
        if options.peer is None:
            return 0
        try:
            spec = peer_options.spec(options, model, size, lora, began)
            theirs = measure_peer(spec, options, size, rates, scratch)
        except RunError as error:
            print(f"error: {error}", file=sys.stderr)
            return RUN_ERROR
        publish({**result, **comparison(ours, theirs, bounds)}, options.json)
    return 0


def prepare(
    options: argparse.Namespace,
    policy: PolicyConfig,
    model: Path,
    scratch: Path,
    mean_completion: float = 1 / STOP_PROBABILITY,
) -> tuple[JsonObject | None, ModelSize, Roofline]:
    """Make the model if it is missing. Return PEFT's arguments for the adapter, sizes, and the devices' rates.

    Raises ConfigError if TRL is to run work that it cannot.
    """
    peer_options.check_possible(options, policy)
    make_missing(model, options.shape, 1 / mean_completion)
    lora = peer_options.adapter(options, policy, model)
    size = model_size(model, 2 if options.gpus else 4, policy)
    return lora, size, measured_rates(scratch / "rates.json", gpus=options.gpus, nproc=options.nproc)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the benchmark's options, and the remaining arguments, which are settings of our trainer."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--model", type=Path, help="model folder to use; created from --shape if missing")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--nproc", type=int, default=1, help="CPU ranks, with --gpus 0")
    parser.add_argument("--engine-gpus", type=int, default=0, help="GPUs out of --gpus for our engine servers")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--max-completion", type=int, default=1024)
    parser.add_argument(
        "--mean-completion", type=float, default=1 / STOP_PROBABILITY, help="mean length without --max-completion"
    )
    parser.add_argument("--steps", type=int, default=7, help="all steps, warm-up included")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--json", type=Path, help="result file to write")
    peer_options.add_flags(parser)
    options, overrides = parser.parse_known_args(arguments)
    if not 0 <= options.warmup < options.steps:
        parser.error(f"--warmup={options.warmup}: must be less than --steps={options.steps}")
    peer_options.check(options, parser)
    return options, overrides


def measure_peer(
    spec: PeerSpec, options: argparse.Namespace, size: ModelSize, rates: Roofline, scratch: Path
) -> PeerSummary:
    """Run TRL and print its arguments. Raises RunError."""
    run, tries = tune(spec, options, size, scratch)
    for called, arguments in run.arguments.items():
        print(f"TRL: {called}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})")
    return {
        **summary(run.steps, run.start_seconds, size, rates, spec.ranks, peer.WARMUP),
        "arguments": run.arguments,
        "trained_parameters": run.trained_parameters,
        "tries": [asdict(one) for one in tries],
        "notes": notes(spec),
    }


def notes(spec: PeerSpec) -> list[str]:
    """Return notes for the reader on this run of TRL, beyond its arguments."""
    lines = []
    if not spec.gpus:
        lines.append("use_liger_kernel is left out: Liger's kernels need a GPU")
    if loads_frozen_weights_in_bf16(spec):
        lines.append("frozen weights are loaded in bfloat16, where TRL's default is float32")
    return lines


def tune(spec: PeerSpec, options: argparse.Namespace, size: ModelSize, scratch: Path) -> TunedRun:
    """Run TRL with the micro-batch and checkpointing that the flags set; search for the best of those not set."""
    tried = candidates(
        spec.completions, options.peer_micro_batch, peer_options.CHECKPOINTING[options.peer_checkpointing]
    )
    least_bytes = partial(least_training_bytes, AutoConfig.from_pretrained(spec.model), size, spec)
    return run_tuned(spec, tried, least_bytes, total_device_bytes(options.gpus), scratch)


def make_missing(model: Path, shape: str, stop_probability: float) -> None:
    """Create the model folder if it is missing, in another process, to keep no GPU memory in this one."""
    if not model.exists():
        make = ["-m", "colocated_grpo.tools.make_model", str(model), "--shape", shape, "--dtype", "bfloat16"]
        subprocess.run([sys.executable, *make], check=True)
        add_stop_tokens(model, stop_probability)


def settings(options: argparse.Namespace, model: Path, output: Path) -> JsonObject:
    """Return our trainer's config for the work that the flags name."""
    completions = options.prompts * options.group_size
    return {
        "model": {"name": str(model)},
        "environments": [{"type": "task", "name": TASK}],
        "training_steps": options.steps,
        "output_dir": str(output),
        "rollout": {
            "prompts_per_step": options.prompts,
            "group_size": options.group_size,
            "max_prompt_tokens": MAX_PROMPT_TOKENS,
            "max_completion_tokens": options.max_completion,
        },
        "evaluation": {"every": 0},
        "checkpoint": {"every": 0, "final": False},
        # All rollouts, for their lengths. They are written between steps, untimed.
        "tracking": {"console": "plain", "rollouts_per_step": completions},
    }


def run_ours(options: argparse.Namespace, config: Path, overrides: Sequence[str], runs: Path) -> OurRun:
    """Run our trainer through the launcher. Copies its kernel profile beside --json if the settings ask for one.

    config: file of `settings` with `runs` as their output folder.
    """
    devices = ["--gpus", str(options.gpus)] if options.gpus else ["--gpus", "0", "--nproc", str(options.nproc)]
    devices += ["--engine-gpus", str(options.engine_gpus)]
    launched = time.time()
    launcher = [sys.executable, "-m", "colocated_grpo.launch.launcher", *devices]
    subprocess.run([*launcher, "--config", str(config), *overrides], check=True)
    (run,) = runs.iterdir()
    if options.json and (run / KERNELS).exists():
        options.json.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(run / KERNELS, options.json.with_suffix(".kernels.txt"))
    completions = options.prompts * options.group_size
    steps = [with_tokens(row, completions) for row in read_rows(run / METRICS_FILE) if row["kind"] == TRAIN]
    lengths: list[list[int]] = [[] for _ in steps]
    for rollout in read_rollouts(run):
        lengths[rollout["step"]].append(rollout["completion_tokens"])
    # The trainer writes its resolved settings when the first step begins.
    began = (run / CONFIG_FILE).stat().st_mtime
    return OurRun(steps=steps, start_seconds=began - launched + steps[0]["seconds/step"], lengths=lengths)


def with_tokens(row: StepRow, completions: int) -> StepRow:
    """Add 'tokens' and 'trained_tokens' to a metrics row, which has means and rates only."""
    tokens = completions * (row["prompt_tokens"] + row["completion_tokens"])
    trained = row["tokens_per_second/train"] * row["seconds/train"] * (1 - row["prefix_reuse"])
    return {**row, "tokens": tokens, "trained_tokens": trained}


def summary(
    steps: Sequence[StepRow], start_seconds: float, size: ModelSize, rates: Roofline, ranks: int, warmup: int
) -> Summary:
    """Return all steps with throughput and MFU, and the medians after the warm-up."""
    rows = [with_rates(row, size, rates, ranks) for row in steps]
    return {"median": {**medians(rows[warmup:]), "seconds/start": start_seconds}, "steps": rows}


def lower_bounds(run: OurRun, size: ModelSize, rates: Roofline, ranks: int, warmup: int) -> Medians:
    """Return the least seconds that the device needs for the phases of our median step.

    With a mixture of experts, those of generation are an estimate.
    """
    bounds = [
        {
            "seconds/sync": sync_bound(size, rates, ranks),
            "seconds/generate": generation_bound(size, rates, ranks, row["prompt_tokens"], lengths),
            "seconds/train": training_bound(size, rates, ranks, row["trained_tokens"]),
        }
        for row, lengths in zip(run.steps, run.lengths, strict=True)
    ]
    return medians(bounds[warmup:])


if __name__ == "__main__":
    sys.exit(main())
