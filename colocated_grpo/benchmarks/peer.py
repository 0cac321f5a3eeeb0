"""The work that TRL is given, and the command that starts it. Nothing here takes seconds to import."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from colocated_grpo.launch.cli import library_environment

MODULE = "colocated_grpo.benchmarks.peer_trl"
CPU_CACHE_GIB = "1"


@dataclass(frozen=True, kw_only=True)
class PeerSpec:
    """The work, and how TRL is set up for it."""

    model: str
    prompts: int
    group_size: int
    max_completion: int
    steps: int
    """At most."""
    until: float | None
    """Unix time after which no further step begins."""
    seed: int
    gpus: int
    batch: int
    """Sequences of one forward pass on one rank."""
    gpu_memory: float
    """Share of GPU memory that vLLM may use."""
    changes: dict[str, Any]
    """Further arguments of GRPOConfig; they go before all others."""

    @property
    def ranks(self) -> int:
        return max(1, self.gpus)

    @property
    def completions(self) -> int:
        return self.prompts * self.group_size

    def misfit(self) -> str | None:
        """Why TRL could not do the same work, in one line."""
        if self.completions % (self.batch * self.ranks) == 0:
            return None
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        return f"--peer-batch={self.batch}: {self.completions} completions on {ranks} are not a multiple of it"


def peer_command(spec: PeerSpec, spec_file: Path, result: Path) -> list[str]:
    """Starts all ranks: plain Python for one, accelerate with the FSDP2 settings that TRL ships for more."""
    spec_file.write_text(json.dumps(asdict(spec)))
    module = ["-m", MODULE, str(spec_file), str(result)]
    if spec.ranks == 1:
        return [sys.executable, *module]
    shipped = Path(importlib.util.find_spec("trl").origin).parent / "accelerate_configs" / "fsdp2.yaml"
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(shipped)]
    return [*accelerate, "--num_processes", str(spec.ranks), "--main_process_port", "0", *module]


def peer_environment(spec: PeerSpec) -> dict[str, str]:
    """The variables that our own ranks get. TRL refuses to see more GPUs than it has ranks."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(spec.gpus)))
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **library_environment("INFO"),
        "VLLM_CPU_KVCACHE_SPACE": CPU_CACHE_GIB,
        **os.environ,
        "CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[: spec.gpus]),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
