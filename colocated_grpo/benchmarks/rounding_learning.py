"""Learning curves with rounding to nearest and with a dither: `python -m colocated_grpo.benchmarks.rounding_learning`.

Trains an adapter and all weights on the CPU in bfloat16, with one rank and shared weights. The trainer dithers merged
weights and rounds full training's compute copy to nearest; each of the two is compared with the other rounding. The
model is converted to bfloat16 first, as published checkpoints are, so that nothing is lost before the first step.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from safetensors.torch import load_file, save_file

from colocated_grpo.benchmarks.results import describe, publish
from colocated_grpo.launch.launcher import child_environment
from colocated_grpo.launch.rank_variables import rank_environment
from colocated_grpo.tracking.files import EVALUATION, TRAIN, read_metrics
from colocated_grpo.types import JsonObject

ROUNDINGS = NEAREST, DITHER = ("nearest", "dither")
FULL, ADAPTER = "full", "adapter"
MODULE = "colocated_grpo.benchmarks.rounding_trainer"
WEIGHTS = "model.safetensors"
EARLY = 1, 10
"""Optimizer steps after which weights are compared, in addition to the last."""


@dataclass(frozen=True, kw_only=True)
class Case:
    trained: str
    """FULL or ADAPTER."""
    lr: float
    rounding: str


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="rounding-") as scratch:
        model = Path(scratch) / "model"
        to_bfloat16(options.model, model)
        origin = describe("rounding_learning", arguments, ranks=1)
        sizes = {name: getattr(options, name) for name in ("steps", "rank", "prompts", "samples")}
        runs: list[JsonObject] = []
        for seed in options.seeds:  # published after each: a stopped study leaves the seeds that are complete
            with ThreadPoolExecutor(options.jobs) as pool:
                runs += pool.map(partial(train, options, model, seed), cases(options))
            publish({**origin, "sizes": sizes, "rows": summarize(runs), "runs": runs}, options.json)
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("runs/quickstart-model"), help="model folder to start from")
    parser.add_argument("--config", type=Path, default=Path("training_configs/quickstart.yaml"))
    parser.add_argument("--adapter-lr", type=float, nargs="*", default=[2e-6, 1e-5, 4e-3])
    parser.add_argument("--full-lr", type=float, nargs="*", default=[1e-6, 1e-5, 4e-4])
    parser.add_argument("--rank", type=int, default=8, help="of the adapter")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--every", type=int, default=20, help="steps between evaluations")
    parser.add_argument("--prompts", type=int, default=512, help="held-out prompts")
    parser.add_argument("--samples", type=int, default=8, help="completions of each")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--json", type=Path, help="result file to write")
    return parser


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for trained, rates in ((ADAPTER, options.adapter_lr), (FULL, options.full_lr)):
        for lr in rates:
            for rounding in ROUNDINGS:
                yield Case(trained=trained, lr=lr, rounding=rounding)


def to_bfloat16(folder: Path, out: Path) -> None:
    """Copy a model folder, with its weights rounded to the nearest bfloat16."""
    shutil.copytree(folder, out)
    weights = load_file(out / WEIGHTS)
    save_file({name: value.bfloat16() for name, value in weights.items()}, out / WEIGHTS, metadata={"format": "pt"})


def settings(options: argparse.Namespace, case: Case) -> list[str]:
    values = {
        "weights": "shared",
        "training_steps": options.steps,
        "policy.lr": case.lr,
        "policy.schedule": "constant",
        "policy.compute_dtype": "bfloat16",
        "evaluation.every": options.every,
        "evaluation.prompts": options.prompts,
        "evaluation.samples_per_prompt": options.samples,
        "checkpoint.every": 0,
        "checkpoint.final": "false",
    }
    if case.trained == ADAPTER:
        values["policy.lora.rank"] = options.rank
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


def train(options: argparse.Namespace, model: Path, seed: int, case: Case) -> JsonObject:
    """Run the trainer once and return its curves. Raises CalledProcessError after printing the log if it fails."""
    environment = child_environment(os.environ, 0, options.jobs, "WARNING")
    environment |= rank_environment(environment)
    with tempfile.TemporaryDirectory(prefix="rounding-run-") as scratch:
        file, log = Path(scratch) / "weights.jsonl", Path(scratch) / "log"
        steps = ",".join(map(str, (*EARLY, options.steps)))
        command = [sys.executable, "-m", MODULE, case.rounding, str(seed), str(file), steps]
        command += ["--config", str(options.config), "--model.name", str(model), "--output_dir", f"{scratch}/runs"]
        with log.open("w") as output:
            done = subprocess.run([*command, *settings(options, case)], env=environment, stdout=output, stderr=output)
        if done.returncode != 0:
            print(log.read_text(), file=sys.stderr)
            done.check_returncode()
        [folder] = (Path(scratch) / "runs").iterdir()
        metrics = read_metrics(folder)
        weights = [json.loads(line) for line in file.read_text().splitlines()]
    run = {
        **asdict(case),
        "seed": seed,
        "weights": weights,
        "held_out": {str(row["step"]): row["held_out/reward"] for row in metrics if row["kind"] == EVALUATION},
        "train_reward": [round(row["reward"], 4) for row in metrics if row["kind"] == TRAIN],
        "sampler_trainer_kl": statistics.mean(row["mismatch/kl"] for row in metrics if row["kind"] == TRAIN),
    }
    print(case, f"seed {seed}:", run["held_out"], *weights, sep="\n  ", flush=True)
    return run


def summarize(runs: Sequence[JsonObject]) -> list[JsonObject]:
    """Return one row for each case, averaged over seeds.

    'over_nearest' is the mean over seeds of the held-out reward after the last step minus that with rounding to
    nearest, 'over_nearest_curve' the same for the mean of all evaluations after the start. Both come with their
    standard error if there are several seeds.
    """
    groups: dict[tuple[str, float, str], list[JsonObject]] = defaultdict(list)
    for run in runs:
        groups[run["trained"], run["lr"], run["rounding"]].append(run)
    rows = []
    for (trained, lr, rounding), members in groups.items():
        row = {"trained": trained, "lr": lr, "rounding": rounding}
        for place, weights in enumerate(members[0]["weights"]):
            for name in ("changed", "kept"):
                values = [member["weights"][place][name] for member in members]
                row[f"{name}_{weights['step']}"] = statistics.mean(values)
        row["error"] = statistics.mean(member["weights"][-1]["error"] for member in members)
        for step in members[0]["held_out"]:
            row[f"held_out_{step}"] = statistics.mean(member["held_out"][step] for member in members)
        if rounding == DITHER:
            others = {other["seed"]: other for other in groups[trained, lr, NEAREST]}
            for name, score in {"over_nearest": last, "over_nearest_curve": mean_after_start}.items():
                gains = [score(member) - score(others[member["seed"]]) for member in members]
                row[name] = statistics.mean(gains)
                if len(gains) > 1:
                    row[f"{name}_error"] = statistics.stdev(gains) / len(gains) ** 0.5
        rows.append(row)
    return rows


def last(run: JsonObject) -> float:
    return list(run["held_out"].values())[-1]


def mean_after_start(run: JsonObject) -> float:
    return statistics.mean(list(run["held_out"].values())[1:])


if __name__ == "__main__":
    sys.exit(main())
