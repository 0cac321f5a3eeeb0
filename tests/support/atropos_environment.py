"""An unmodified Atropos environment in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.training_runs import tiny_model

GROUP = 4


@contextmanager
def environment(folder: Path, api: str, server_port: int, **flags: str) -> Generator[subprocess.Popen]:
    """Run the environment in a process, started as in Atropos' own guides."""
    model = str(tiny_model())
    arguments = {
        "--slurm": "False",
        "--env.tokenizer_name": model,
        "--env.group_size": str(GROUP),
        "--env.total_steps": "1000",
        "--env.steps_per_eval": "1000",
        "--env.rollout_server_url": api,
        "--env.use_wandb": "False",
        "--env.wandb_name": "toy",
        "--openai.api_key": "x",
        "--openai.base_url": f"http://localhost:{server_port}/v1",
        "--openai.model_name": model,
        "--openai.server_type": "vllm",
        **flags,
    }
    command = [sys.executable, str(ROOT / "tests/support/toy_environment.py"), "serve"]
    with (folder / "env.log").open("a") as log:
        process = subprocess.Popen(
            [*command, *(word for pair in arguments.items() for word in pair)],
            stdout=log,
            stderr=log,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
