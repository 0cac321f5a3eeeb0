"""TRL as the peer of `benchmarks.step`: the work, the GRPOConfig arguments, and one run in fresh processes.

Imports no slow library: TRL, vLLM and torch load in the started processes only.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from benchmarks.workload import MAX_PROMPT_TOKENS
from colocated_grpo.errors import RunError
from colocated_grpo.runtime.program import library_environment
from colocated_grpo.servers.engine_servers import free_ports
from colocated_grpo.types import JsonObject

MODULE = "benchmarks.peer_trl"
CPU_CACHE_GIB = "1"
WARMUP = 1
"""Steps before the measured ones."""

OutOfMemoryPhase = Literal["start", "first generation", "training"]
"""Part of a run. 'training' is everything after the first generation, later generations included."""


@dataclass(frozen=True, kw_only=True)
class PeerSetup:
    """The GRPOConfig arguments that decide TRL's speed and memory. None leaves TRL's default."""

    micro_batch: int
    """Sequences per forward pass on one rank (per_device_train_batch_size)."""
    checkpointing: bool | None = None
    liger: bool | None = None
    engine_fraction: float | None = None
    """Fraction of device memory for vLLM (vllm_gpu_memory_utilization)."""
    probe: bool = False
    """Run a discarded step first, with completions of maximum length, to find out whether training fits."""


@dataclass(frozen=True, kw_only=True)
class PeerSpec:
    """The work, and TRL's configuration for it."""

    model: str
    prompts: int
    group_size: int
    max_completion: int
    steps: int
    """Optimizer steps, warm-up included, probe step excluded."""
    until: float | None
    """Unix time after which no further step begins. At least one measured step is run."""
    seed: int
    gpus: int
    setup: PeerSetup
    lora: JsonObject | None
    """Arguments of PEFT's LoraConfig; None trains all weights."""
    extra_arguments: JsonObject
    """Further arguments of GRPOConfig; they take precedence over all others."""
    lengthened: bool = False
    """True: sample one token per completion and repeat it to the maximum length."""

    @classmethod
    def read(cls, file: Path) -> PeerSpec:
        content: JsonObject = json.loads(file.read_text())
        setup = PeerSetup(**content.pop("setup"))
        return cls(setup=setup, **content)

    @property
    def ranks(self) -> int:
        return max(1, self.gpus)

    @property
    def completions(self) -> int:
        """Completions of one step on one rank."""
        return self.prompts * self.group_size // self.ranks


@dataclass(frozen=True, kw_only=True)
class PeerRun:
    """A completed run of TRL."""

    steps: list[JsonObject]
    """One metrics row per optimizer step, warm-up included, probe step excluded."""
    start_seconds: float
    """From the launch to the end of the first step, without the probe step."""
    arguments: JsonObject
    """All arguments of GRPOConfig and GRPOTrainer, keyed by these two names."""
    trained_parameters: int


class PeerOutOfMemory(RunError):
    """TRL ran out of device memory during `phase`."""

    def __init__(self, phase: OutOfMemoryPhase) -> None:
        super().__init__(f"--peer=trl: TRL ran out of device memory during {phase}")
        self.phase: OutOfMemoryPhase = phase


def grpo_arguments(spec: PeerSpec) -> JsonObject:
    """Return the arguments of GRPOConfig for one optimizer step per rollout batch.

    Arguments that are left out keep TRL's defaults, the DAPO loss included.
    """
    on_gpu = spec.gpus > 0
    setup = spec.setup
    speed = {
        "per_device_train_batch_size": setup.micro_batch,
        "gradient_accumulation_steps": spec.completions // setup.micro_batch,
        "gradient_checkpointing": setup.checkpointing,
        "use_liger_kernel": setup.liger,
        "vllm_gpu_memory_utilization": setup.engine_fraction,
        # TRL loads weights in float32, frozen ones too.
        "model_init_kwargs": {"dtype": "bfloat16"} if loads_frozen_weights_in_bf16(spec) else None,
    }
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": on_gpu,
        "vllm_max_model_length": MAX_PROMPT_TOKENS + spec.max_completion,
        "use_cpu": not on_gpu,
        "bf16": on_gpu,
        **{name: value for name, value in speed.items() if value is not None},
        "num_generations": spec.group_size,
        "max_completion_length": spec.max_completion,
        "max_steps": spec.steps + setup.probe,
        "lr_scheduler_type": "constant",
        "seed": spec.seed,
        "shuffle_dataset": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        **spec.extra_arguments,
    }


def loads_frozen_weights_in_bf16(spec: PeerSpec) -> bool:
    """Return True for adapters on a GPU. PEFT keeps the adapters themselves in float32."""
    return spec.lora is not None and spec.gpus > 0


def run_peer(spec: PeerSpec, scratch: Path) -> PeerRun:
    """Run TRL on all ranks, in fresh processes. Raises RunError, or PeerOutOfMemory if device memory ran out."""
    result = scratch / "peer.json"
    for file in (result, failure_file(result)):
        file.unlink(missing_ok=True)
    launched = time.time()
    command = peer_command(spec, scratch / "peer-spec.json", result)
    done = subprocess.run(command, env=peer_environment(spec), cwd=scratch, check=False)
    if failure_file(result).exists():
        raise PeerOutOfMemory(json.loads(failure_file(result).read_text())["out_of_memory"])
    if done.returncode or not result.exists():
        raise RunError(f"--peer=trl: TRL exited with code {done.returncode}; its output is above, our figures are kept")
    content = json.loads(result.read_text())
    if len(content["steps"]) <= WARMUP:
        raise RunError("--peer=trl: TRL ended before its first measured step; its output is above")
    start = content["started"] - launched + content["steps"][0]["seconds/step"]
    return PeerRun(
        steps=content["steps"],
        start_seconds=start,
        arguments=content["arguments"],
        trained_parameters=content["trained_parameters"],
    )


def failure_file(result: Path) -> Path:
    """Return the file that a rank writes when it runs out of device memory."""
    return result.with_suffix(".failed.json")


def peer_command(spec: PeerSpec, spec_file: Path, result: Path) -> list[str]:
    """Return the command that starts all ranks: plain Python for one, accelerate with TRL's FSDP2 settings for more."""
    spec_file.write_text(json.dumps(asdict(spec)))
    module = ["-m", MODULE, str(spec_file), str(result)]
    if spec.ranks == 1:
        return [sys.executable, *module]
    package = importlib.util.find_spec("trl")
    if package is None or package.origin is None:
        raise RunError("--peer=trl: the package trl is not installed; pip install trl")
    fsdp2 = Path(package.origin).parent / "accelerate_configs" / "fsdp2.yaml"
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(fsdp2)]
    return [*accelerate, "--num_processes", str(spec.ranks), "--main_process_port", "0", *module]


def peer_environment(spec: PeerSpec) -> dict[str, str]:
    """Return the environment variables of our own ranks, with only one GPU visible per rank: TRL rejects more."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(spec.gpus)))
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **library_environment("INFO"),
        "VLLM_CPU_KVCACHE_SPACE": CPU_CACHE_GIB,
        **os.environ,
        "CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[: spec.gpus]),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "1",
        # TRL by itself prefers a fixed port, which two runs on one machine cannot share.
        "MASTER_PORT": str(free_ports(1)[0]),
        "PYTHONPATH": os.pathsep.join(paths),
    }
