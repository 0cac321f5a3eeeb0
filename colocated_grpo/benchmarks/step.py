"""Seconds of a whole training step, by phase: `python -m colocated_grpo.benchmarks.step --shape qwen3-0.6b --gpus 1`.

Runs the trainer itself through the launcher on a random model of the shape, drops the first steps (compilation) and
writes medians as JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from colocated_grpo.benchmarks.workload import LONGEST_PROMPT, add_stop_tokens
from colocated_grpo.tools.make_model import SHAPES, make_model
from colocated_grpo.tracking.files import METRICS_FILE, read_rows

CHAT_TEMPLATE_TOKENS = 32
"""Room for the chat template around a prompt."""


def main(arguments: Sequence[str] | None = None) -> int:
    options, overrides = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="benchmark-step-") as scratch:
        model = options.model or Path(scratch) / options.shape
        if not model.exists():
            make_model(model, shape=SHAPES[options.shape], dtype=torch.bfloat16)
            add_stop_tokens(model)
        config = Path(scratch) / "step.yaml"
        config.write_text(yaml.safe_dump(settings(options, model, Path(scratch) / "runs")))
        ranks = ["--gpus", str(options.gpus)] if options.gpus else ["--gpus", "0", "--nproc", str(options.nproc)]
        command = [sys.executable, "-m", "colocated_grpo.launcher", *ranks, "--config", str(config), *overrides]
        subprocess.run(command, check=True)
        (run,) = (Path(scratch) / "runs").iterdir()
        rows = [row for row in read_rows(run / METRICS_FILE) if row["kind"] == "train"]
        environment = json.loads((run / "environment.json").read_text())
        if options.json and (run / "profile").exists():
            shutil.copy(run / "profile" / "kernels.txt", options.json.with_suffix(".kernels.txt"))
    result = {
        "command": " ".join(["python -m colocated_grpo.benchmarks.step", *(arguments or sys.argv[1:])]),
        "work": {**vars(options), "model": None, "json": None},
        "median": medians(rows[options.warmup :]),
        "steps": rows,
        "environment": environment,
    }
    for name, value in result["median"].items():
        print(f"{name:<32} {value:,.4g}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1, default=str))
    return 0


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
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
    return parser.parse_known_args(arguments)


def settings(options: argparse.Namespace, model: Path, output: Path) -> dict[str, Any]:
    return {
        "model": {"name": str(model)},
        "environments": [{"type": "task", "name": "colocated_grpo.benchmarks.workload:RandomWork"}],
        "training_steps": options.steps,
        "output_dir": str(output),
        "rollout": {
            "prompts_per_step": options.prompts,
            "group_size": options.group_size,
            "max_prompt_tokens": LONGEST_PROMPT + CHAT_TEMPLATE_TOKENS,
            "max_completion_tokens": options.max_completion,
        },
        "engine": {"max_num_seqs": -(-options.prompts * options.group_size // max(1, options.gpus))},
        "evaluation": {"every": 0},
        "checkpoint": {"every": 0, "final": False},
        "tracking": {"console": "plain"},
    }


def medians(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    names = [name for name, value in rows[0].items() if isinstance(value, float)]
    return {name: statistics.median(row[name] for row in rows if name in row) for name in names}


if __name__ == "__main__":
    sys.exit(main())
