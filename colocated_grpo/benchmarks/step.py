"""Seconds of a whole training step, by phase: `python -m colocated_grpo.benchmarks.step --shape qwen3-0.6b --gpus 1`.

Runs the trainer itself through the launcher on a random model of the shape, drops the first steps (compilation) and
writes medians as JSON, with what the device allows beside them. `--peer trl` then runs the same work through TRL.
Settings may follow: --weights shared
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from colocated_grpo.benchmarks.comparison import comparison
from colocated_grpo.benchmarks.figures import (
    ModelSize,
    generation_bound,
    medians,
    model_size,
    sync_bound,
    training_bound,
    with_rates,
)
from colocated_grpo.benchmarks.peer import PeerSpec, peer_command, peer_environment
from colocated_grpo.benchmarks.rates import measured_rates
from colocated_grpo.benchmarks.results import describe, publish
from colocated_grpo.benchmarks.roofline import Roofline
from colocated_grpo.benchmarks.workload import MAX_PROMPT_TOKENS, TASK, add_stop_tokens
from colocated_grpo.config.schema import Config
from colocated_grpo.launch.cli import RUN_ERROR, USAGE_ERROR
from colocated_grpo.tools.shapes import SHAPES
from colocated_grpo.tracking.files import CONFIG_FILE, METRICS_FILE, TRAIN, read_rollouts, read_rows

SEED = Config.model_fields["seed"].default
KERNELS = Path("profile") / "kernels.txt"


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    began = time.time()
    options, overrides = parse(arguments)
    ranks = options.gpus or options.nproc
    if options.peer and (misfit := peer_spec(options, Path(options.shape), began).misfit()):
        print(f"error: {misfit}", file=sys.stderr)
        return USAGE_ERROR
    with tempfile.TemporaryDirectory(prefix="benchmark-step-") as name:
        scratch = Path(name)
        model = ready_model(options, scratch)
        size = model_size(model, itemsize=2 if options.gpus else 4)
        rates = measured_rates(scratch / "rates.json", gpus=options.gpus, nproc=options.nproc)
        done = run_ours(options, overrides, model, scratch)
        ours = summary(done, size, rates, ranks, options.warmup)
        bounds = lower_bounds(done, size, rates, ranks, options)
        result = {
            **describe("step", arguments, ranks=ranks),
            "work": {name: value for name, value in vars(options).items() if name not in ("model", "json")},
            "parameters": size.parameters,
            **comparison(ours, None, bounds),
            "roofline": {**rates.as_dict(), **bounds},
        }
        publish(result, options.json)  # now, for the peer takes several times as long and may be cut off
        if options.peer:
            theirs = run_peer(peer_spec(options, model, began), scratch)
            if theirs is None or len(theirs["steps"]) <= options.warmup:
                print(
                    "error: --peer=trl: TRL did not finish; its words are above, our figures are kept", file=sys.stderr
                )
                return RUN_ERROR
            peer = summary(theirs, size, rates, ranks, options.warmup)
            publish({**result, **comparison(ours, peer, bounds)}, options.json)
    return 0


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--model", type=Path, help="model folder to use, made there if it is missing")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--nproc", type=int, default=1, help="CPU ranks, with --gpus 0")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--max-completion", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=7, help="all steps, warm-up included")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--peer", choices=["trl"], help="run the same work through this trainer afterwards")
    parser.add_argument("--peer-batch", type=int, default=16, help="its sequences of one forward pass on one rank")
    parser.add_argument("--peer-gpu-memory", type=float, default=0.4, help="share of GPU memory for its engine")
    parser.add_argument("--peer-until", type=float, help="seconds from now after which it begins no further step")
    parser.add_argument("--peer-args", default="{}", metavar="YAML", help="of GRPOConfig: '{torch_compile: true}'")
    options, overrides = parser.parse_known_args(arguments)
    if not 0 <= options.warmup < options.steps:
        parser.error(f"--warmup={options.warmup}: must be less than --steps={options.steps}")
    if options.peer and options.gpus == 0 and options.nproc > 1:
        parser.error(f"--nproc={options.nproc}: on the CPU --peer runs one rank")
    return options, overrides


def peer_spec(options: argparse.Namespace, model: Path, began: float) -> PeerSpec:
    return PeerSpec(
        model=str(model.resolve()),
        prompts=options.prompts,
        group_size=options.group_size,
        max_completion=options.max_completion,
        steps=options.steps,
        until=None if options.peer_until is None else began + options.peer_until,
        seed=SEED,
        gpus=options.gpus,
        batch=options.peer_batch,
        gpu_memory=options.peer_gpu_memory,
        changes=yaml.safe_load(options.peer_args),
    )


def ready_model(options: argparse.Namespace, scratch: Path) -> Path:
    """The model folder, made if it is missing, in a process of its own: what it takes on a GPU would stay taken."""
    model = options.model or scratch / options.shape
    if not model.exists():
        make = ["-m", "colocated_grpo.tools.make_model", str(model), "--shape", options.shape, "--dtype", "bfloat16"]
        subprocess.run([sys.executable, *make], check=True)
        add_stop_tokens(model)
    return model


def settings(options: argparse.Namespace, model: Path, output: Path) -> dict[str, Any]:
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
        # All rollouts, for their lengths. They are written between steps, outside the clock.
        "tracking": {"console": "plain", "rollouts_per_step": completions},
    }


def run_ours(options: argparse.Namespace, overrides: Sequence[str], model: Path, scratch: Path) -> dict[str, Any]:
    """Steps of our trainer, seconds until the first one ended, and the lengths of each step's completions."""
    config = scratch / "step.yaml"
    config.write_text(yaml.safe_dump(settings(options, model, scratch / "runs")))
    devices = ["--gpus", str(options.gpus)] if options.gpus else ["--gpus", "0", "--nproc", str(options.nproc)]
    launched = time.time()
    launcher = [sys.executable, "-m", "colocated_grpo.launch.launcher", *devices]
    subprocess.run([*launcher, "--config", str(config), *overrides], check=True)
    (run,) = (scratch / "runs").iterdir()
    if options.json and (run / KERNELS).exists():
        options.json.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(run / KERNELS, options.json.with_suffix(".kernels.txt"))
    steps = [counted(row, options) for row in read_rows(run / METRICS_FILE) if row["kind"] == TRAIN]
    lengths: list[list[int]] = [[] for _ in steps]
    for rollout in read_rollouts(run):
        lengths[rollout["step"]].append(rollout["completion_tokens"])
    # The settings are written as the first step begins.
    began = (run / CONFIG_FILE).stat().st_mtime
    return {"steps": steps, "seconds/start": began - launched + steps[0]["seconds/step"], "lengths": lengths}


def counted(row: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """A metrics row with the tokens that it speaks of in means and rates."""
    completions = options.prompts * options.group_size
    tokens = completions * (row["prompt_tokens"] + row["completion_tokens"])
    trained = row["tokens_per_second/train"] * row["seconds/train"] * (1 - row["shared"])
    return {**row, "tokens": tokens, "trained_tokens": trained}


def run_peer(spec: PeerSpec, scratch: Path) -> dict[str, Any] | None:
    """Steps of TRL and seconds until the first one ended; None when it failed."""
    result = scratch / "peer.json"
    launched = time.time()
    command = peer_command(spec, scratch / "peer-spec.json", result)
    done = subprocess.run(command, env=peer_environment(spec), cwd=scratch, check=False)
    if done.returncode or not result.exists():
        return None
    content = json.loads(result.read_text())
    start = content["started"] - launched + content["steps"][0]["seconds/step"]
    return {"steps": content["steps"], "seconds/start": start}


def summary(run: dict[str, Any], size: ModelSize, rates: Roofline, ranks: int, warmup: int) -> dict[str, Any]:
    steps = [with_rates(row, size, rates, ranks) for row in run["steps"]]
    return {"median": {**medians(steps[warmup:]), "seconds/start": run["seconds/start"]}, "steps": steps}


def lower_bounds(
    ours: dict[str, Any], size: ModelSize, rates: Roofline, ranks: int, options: argparse.Namespace
) -> dict[str, float]:
    """Seconds that the device needs at least for the phases of a median step of ours."""
    measured = [
        {
            "seconds/sync": sync_bound(size, rates, ranks),
            "seconds/generate": generation_bound(size, rates, ranks, row["prompt_tokens"], lengths),
            "seconds/train": training_bound(size, rates, ranks, row["trained_tokens"]),
        }
        for row, lengths in zip(ours["steps"], ours["lengths"], strict=True)
    ]
    return medians(measured[options.warmup :])


if __name__ == "__main__":
    sys.exit(main())
