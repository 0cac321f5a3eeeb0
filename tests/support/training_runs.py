"""Complete training runs, observed while they train, killed, and inspected afterwards.

A `LaunchedRun` starts the launcher, as a user does. A `ForkedRun` forks its ranks from a process that has imported the
slow modules: it starts in seconds instead of 15 s, for tests in which neither the launcher nor torchrun matters.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from multiprocessing import connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import psutil
import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from colocated_grpo.tools.shapes import TINY
from colocated_grpo.tracking import files
from colocated_grpo.tracking.files import Row
from tests.support.paths import ROOT
from tests.support.random_models import make_model
from tests.support.ranks import start_module

TIMEOUT = 300.0
POLL_SECONDS = 0.02
STEPS = 24
TAG = "COLOCATED_GRPO_TEST_RUN"

Settings = dict[str, Any]


@cache
def _models() -> TemporaryDirectory:
    """Create the folder on first use only: ranks import this module too, and exit without cleaning up."""
    return TemporaryDirectory(prefix="colocated-grpo-models-")


def tiny_model(
    architecture: str = "qwen3", vocab: int | None = None, head_dim: int = TINY.head_dim, edits: Settings | None = None
) -> Path:
    """Return a model of 0.1 M random weights, made once per session. edits: entries of its config.json.

    Its weights have a wide spread: a sharp output distribution makes every error visible.
    """
    folder = Path(_models().name) / f"{architecture}-{vocab}-{head_dim}-{hex(zlib.crc32(repr(edits).encode()))}"
    if folder.exists():
        return folder
    # vLLM divides these families' hidden size by their heads, and its attention on CPUs does not support heads of 16.
    divided = ("gpt2", "olmo3", "olmoe", "phi3", "qwen2", "qwen2_moe")
    heads = 2 if architecture in divided else TINY.heads
    hidden = heads * head_dim if architecture in divided else TINY.hidden
    shape = replace(TINY, hidden=hidden, vocab=vocab, heads=heads, head_dim=head_dim)
    return make_model(folder, architecture=architecture, shape=shape, init_std=0.1, settings=edits)


def settings(model: Path, **changes: Any) -> Settings:
    """Return the settings of a run of a few seconds. `changes` replace keys; a dictionary updates a section."""
    base: Settings = {
        "model": {"name": str(model)},
        "environments": [{"type": "task", "name": "sorting", "args": {"min_digits": 2, "max_digits": 3}}],
        "training_steps": 10,
        "run_name": "run",
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_prompt_tokens": 24, "max_completion_tokens": 8},
        "policy": {"lr": 1e-3, "compile": "off"},
        "batch": {"max_tokens_per_micro_batch": 512},
        "engine": {"max_num_seqs": 64, "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20},
        "evaluation": {"every": 4, "prompts": 8},
        "checkpoint": {"every": 3},
        "tracking": {"console": "plain"},
    }
    for key, value in changes.items():
        base[key] = {**base.get(key, {}), **value} if isinstance(value, dict) else value
    return base


class TrainingRun(ABC):
    """A running training run. Leaving the context kills all its processes."""

    def __init__(self, output_dir: Path, config: Settings, name: str) -> None:
        output_dir.mkdir(parents=True, exist_ok=True)
        self.folder = output_dir / config.get("run_name", name)
        self.config_file = output_dir / f"{name}.yaml"
        self.config_file.write_text(yaml.safe_dump({**config, "output_dir": str(output_dir)}))
        self._stdout, self._stderr = output_dir / f"{name}.out", output_dir / f"{name}.err"
        self._tag = f"{os.getpid()}-{id(self)}-{time.monotonic_ns()}"
        """Set in the environment of every process of the run, to find them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.kill()

    @abstractmethod
    def wait(self, timeout: float = TIMEOUT) -> int:
        """Wait for the end of the run and return its exit code. Fails with the run's output on a timeout."""

    def processes(self) -> list[psutil.Process]:
        """Return all live processes of the run, also reparented ones."""
        return [process for process in psutil.process_iter() if _environment(process).get(TAG) == self._tag]

    def listening(self) -> set[str]:
        """Return the addresses on which processes of the run accept TCP connections."""
        sockets = [socket for process in self.processes() for socket in process.net_connections("tcp")]
        return {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}

    @abstractmethod
    def ended_within(self, seconds: float) -> bool:
        """Wait up to `seconds` and return True if the launcher, or any rank of a run without one, has ended."""

    @property
    def stdout(self) -> str:
        return self._stdout.read_text()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def finish(self, timeout: float = TIMEOUT) -> Self:
        """Wait for the end of the run and assert exit code 0."""
        code = self.wait(timeout)
        assert code == 0, f"exit code {code}\n{self.tail()}"
        return self

    def tail(self) -> str:
        """Return the end of the run's output, for failure messages."""
        return f"--- stdout\n{self.stdout[-2000:]}\n--- stderr\n{self.stderr[-6000:]}"

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition()` is true. Fails if the run ends first."""
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            if self.ended_within(POLL_SECONDS):
                assert condition(), f"the run ended before the condition was met\n{self.tail()}"
            else:
                assert time.monotonic() < deadline, f"the condition was not met within {TIMEOUT:g} s\n{self.tail()}"

    def wait_for_step(self, step: int) -> None:
        """Wait until the metrics of training step `step` are written."""
        self.wait_until(lambda: any(row["step"] >= step for row in self.rows(files.TRAIN)))

    def rows(self, kind: str) -> list[Row]:
        """Return the rows of metrics.jsonl of one kind: files.TRAIN or files.EVALUATION."""
        return [row for row in files.read_rows(self.folder / files.METRICS_FILE) if row["kind"] == kind]

    def kill(self) -> None:
        """Kill all processes at once, as a machine failure does."""
        while alive := self.processes():
            _send(signal.SIGSTOP, alive)  # or a parent could react to the death of its child
            _send(signal.SIGKILL, alive)
            psutil.wait_procs(alive, timeout=TIMEOUT)

    def terminate(self) -> None:
        """Send SIGTERM to all processes, as the launcher does when it is stopped."""
        _send(signal.SIGTERM, self.processes())


class LaunchedRun(TrainingRun):
    """A run started through the launcher."""

    def __init__(
        self, output_dir: Path, config: Settings, *flags: str, ranks: int = 1, gpus: int = 0, name: str = "run"
    ) -> None:
        super().__init__(output_dir, config, name)
        devices = ["--gpus", str(gpus)] if gpus else ["--gpus", "0", "--nproc", str(ranks)]
        self._start([*devices, "--config", str(self.config_file), *flags])

    def _start(self, arguments: Sequence[str]) -> None:
        with self._stdout.open("w") as out, self._stderr.open("w") as err:
            self.launcher = subprocess.Popen(
                [sys.executable, str(ROOT / "run_colocated_grpo.py"), *arguments],
                stdout=out,
                stderr=err,
                env={**os.environ, TAG: self._tag, "PYTHONFAULTHANDLER": "1"},
                start_new_session=True,
            )

    def wait(self, timeout: float = TIMEOUT) -> int:
        """Wait for the launcher and return its exit code. Fails with the run's output on a timeout."""
        assert self.ended_within(timeout), f"the run did not end within {timeout:g} s\n{self.tail()}"
        return self.launcher.returncode

    def ranks(self) -> list[psutil.Process]:
        """Return the training processes in rank order, without their child processes, which inherit RANK."""
        by_pid = {process.pid: process for process in self.processes() if "RANK" in _environment(process)}
        ranks = [process for process in by_pid.values() if process.ppid() not in by_pid]
        return sorted(ranks, key=lambda process: int(_environment(process)["RANK"]))

    def kill(self) -> None:
        super().kill()
        self.launcher.wait()

    def ended_within(self, seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self.launcher.wait(seconds)
        return self.launcher.returncode is not None


class AtroposCommandRun(LaunchedRun):
    """A CPU run started by `run_colocated_grpo.py atropos`, without a config file."""

    def __init__(self, output_dir: Path, arguments: Sequence[str]) -> None:
        TrainingRun.__init__(self, output_dir, {}, "run")
        self._start(["atropos", *arguments, "--save-path", str(self.folder), "--gpus", "0"])


class ForkedRun(TrainingRun):
    """A CPU run without a launcher, whose ranks are forked."""

    def __init__(
        self,
        output_dir: Path,
        config: Settings,
        *flags: str,
        ranks: int = 1,
        name: str = "run",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(output_dir, config, name)
        arguments = ["--config", str(self.config_file), *flags]
        variables = {TAG: self._tag, **(environment or {})}
        self._ranks = start_module("colocated_grpo", arguments, ranks, self._stdout, self._stderr, variables)

    def wait(self, timeout: float = TIMEOUT) -> int:
        """Wait for all ranks and return the first nonzero exit code, or 0. Fails with the run's output on a timeout."""
        codes = self._ranks.exit_codes(timeout)
        assert None not in codes, f"the run did not end within {timeout:g} s\n{self.tail()}"
        return next(filter(None, codes), 0)

    def ranks(self) -> list[psutil.Process]:
        """Return the ranks that are alive, in rank order."""
        return [psutil.Process(rank.pid) for rank in self._ranks.processes if rank.is_alive()]

    def processes(self) -> list[psutil.Process]:
        """Return the live ranks and all their descendants, also reparented ones."""
        found = {process.pid: process for process in super().processes()}
        for rank in self._ranks.processes:
            if rank.is_alive():
                with suppress(psutil.NoSuchProcess):
                    process = psutil.Process(rank.pid)
                    found |= {each.pid: each for each in (process, *process.children(recursive=True))}
        return list(found.values())

    def kill(self) -> None:
        super().kill()
        self._ranks.kill()

    def ended_within(self, seconds: float) -> bool:
        return bool(connection.wait([rank.sentinel for rank in self._ranks.processes], seconds))


def _send(number: signal.Signals, processes: list[psutil.Process]) -> None:
    """Send a signal to the processes that still exist."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ() if process.status() != psutil.STATUS_ZOMBIE else {}
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return {}


def train(output_dir: Path, config: Settings, *flags: str, ranks: int = 1) -> TrainingRun:
    """Run forked ranks to the end and assert success."""
    with ForkedRun(output_dir, config, *flags, ranks=ranks) as run:
        return run.finish()


def assert_resumes_exactly(
    whole: TrainingRun, output_dir: Path, config: Settings, *, first_step: int, ranks: int = 1
) -> TrainingRun:
    """Resume a copy of a finished run at a checkpoint, and assert that it ends bit for bit like that run.

    The copy is what a kill in the step after that checkpoint leaves: it has no later checkpoint and no result.
    """
    copy = shutil.copytree(whole.folder, output_dir / whole.folder.name)
    for path in copy.glob("checkpoints/step_*"):
        if int(path.name.removeprefix("step_")) > first_step:
            shutil.rmtree(path)
    for name in ("final_model", "final_adapter", "best_model"):
        shutil.rmtree(copy / name, ignore_errors=True)
    for name in (files.SUMMARY_FILE, "best.json"):
        (copy / name).unlink(missing_ok=True)
    resumed = train(output_dir, config, "--resume", "auto", ranks=ranks)
    assert [start["first_step"] for start in files.read_environment(resumed.folder)] == [0, first_step]
    assert weights_of(resumed) == weights_of(whole)
    for kind in (files.TRAIN, files.EVALUATION):
        assert without_wall_clock(resumed.rows(kind)) == without_wall_clock(whole.rows(kind))
    assert files.read_rollouts(resumed.folder) == files.read_rollouts(whole.folder)
    return resumed


def launch(
    output_dir: Path, config: Settings, *flags: str, ranks: int = 1, gpus: int = 0, timeout: float = TIMEOUT
) -> TrainingRun:
    """Run the launcher to the end and assert success."""
    with LaunchedRun(output_dir, config, *flags, ranks=ranks, gpus=gpus) as run:
        return run.finish(timeout)


def assert_on_policy(run: TrainingRun, steps: int) -> None:
    """Assert that a run in float32 has moved its weights in each of `steps` steps, with an engine that agrees."""
    rows = run.rows(files.TRAIN)
    assert len(rows) == steps
    for row in rows:
        assert row["mismatch/plain"] < 1e-4
        assert row["mismatch/abs"] < 1e-4
        assert row["grad_norm"] > 0


def without_wall_clock(rows: Iterator[Row] | list[Row]) -> list[Row]:
    """Return metric rows without times, rates and memory, which differ between equal runs."""
    varying = ("seconds/", "memory/", "tokens_per_second", "decode_tail")
    return [{key: value for key, value in row.items() if not key.startswith(varying)} for row in rows]


@cache
def uninterrupted(ranks: int) -> TrainingRun:
    """Return the finished deterministic run that interrupted runs must equal, made once per session."""
    return train(Path(_models().name) / f"uninterrupted-{ranks}", deterministic(), ranks=ranks)


def deterministic(hold: Settings | None = None, **changes: Any) -> Settings:
    """Return the settings of the deterministic run. hold: of `held_sorting`."""
    base = {"deterministic": True, "training_steps": STEPS, "environments": held_sorting(**(hold or {}))}
    return settings(tiny_model(), **base | changes)


def held_sorting(**hold: Any) -> list[Settings]:
    """Return the only environment of a run. hold: arguments of `HeldSorting`."""
    args = {"min_digits": 2, "max_digits": 3, **hold}
    return [{"type": "task", "name": "tests.support.held_tasks:HeldSorting", "args": args}]


def weights_of(run: TrainingRun) -> dict[str, bytes]:
    """Return the contents of final_model's weight files by name."""
    return {path.name: path.read_bytes() for path in (run.folder / "final_model").glob("*.safetensors")}


def checkpoint_tensors(run_folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a run's newest checkpoint by their names in it."""
    folder = max((run_folder / "checkpoints").glob("step_*[0-9]"))
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors
