"""GPU memory over a step: every wake, sleep, weight sync and offload happens here, timed by `Clock`."""

import resource
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from colocated_grpo.policy.policy import Policy
from colocated_grpo.rollout.engine import RolloutEngine

GIB = 1 << 30


class Clock:
    """Seconds and memory of each phase since the last `read`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = defaultdict(float)
        self._memory: dict[str, float] = {}

    @contextmanager
    def time(self, phase: str) -> Generator[None]:
        """Add the block's wall time to `phase`, including device work that it queued."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._seconds[phase] += time.perf_counter() - start

    def note_memory(self, phase: str) -> None:
        """Record the memory in use by a phase. Call at the end of the phase.

        On CUDA: device memory used by all processes, and torch's own peak since the last call, which counts memory that
        a sleeping engine has released. On CPU: this process's peak RSS.
        """
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            self._keep_larger(phase, total - free)
            self._keep_larger(f"{phase}_torch", torch.cuda.max_memory_allocated(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._keep_larger(phase, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)

    def _keep_larger(self, name: str, used: int) -> None:
        self._memory[name] = max(used / GIB, self._memory.get(name, 0.0))

    def read(self) -> dict[str, float]:
        row = {f"seconds/{phase}": seconds for phase, seconds in self._seconds.items()}
        row |= {f"memory/{phase}_gib": gib for phase, gib in self._memory.items()}
        self._seconds.clear()
        self._memory.clear()
        return row


class WeightSync(Protocol):
    """Writes the policy's weights into the engine, and raises RunError if the weights have not arrived. Collective."""

    def sync(self) -> None: ...


@dataclass(eq=False)
class Choreography:
    """Switches GPU memory between the policy and the engine. Collective: all ranks enter and leave together."""

    policy: Policy
    engine: RolloutEngine
    weight_sync: WeightSync
    clock: Clock
    sync_frequency: int
    _never_synced: bool = field(default=True, init=False)

    @contextmanager
    def rollout_phase(self, step: int, *, sync: bool = False) -> Generator[None]:
        """Wake the engine, and sync the weights if due at `step` or if `sync` is set. On exit, the engine sleeps."""
        self._wake(sync=sync or self._never_synced or step % self.sync_frequency == 0)
        self._never_synced = False
        try:
            yield
            self.clock.note_memory("generate")
        finally:
            with self.clock.time("sleep"):
                self.engine.sleep()
                if self.policy.offload is not None:
                    self.policy.offload.to_device()

    def _wake(self, *, sync: bool) -> None:
        with self.clock.time("wake"):
            self.engine.wake("weights")
        if sync:
            with self.clock.time("sync"):
                self.weight_sync.sync()
                self.engine.weights_changed(self.policy.version)
        with self.clock.time("wake"):
            # Offload after the sync, which reads the masters, and before mapping the cache, or both peaks add up.
            if self.policy.offload is not None:
                self.policy.offload.to_host()
            self.engine.wake("kv_cache")

    @contextmanager
    def training_phase(self) -> Generator[None]:
        with self.clock.time("train"):
            yield
        self.clock.note_memory("train")


@contextmanager
def profiled(folder: Path | None) -> Generator[None]:
    """Profile the block and write trace.json.gz and kernels.txt into `folder`. If `folder` is None, do nothing."""
    if folder is None:
        yield
        return
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with profile(activities=activities) as recorded:
        yield
    folder.mkdir(parents=True, exist_ok=True)
    order = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    averages = recorded.key_averages()
    (folder / "kernels.txt").write_text(averages.table(sort_by=order, row_limit=40, max_name_column_width=90))
    recorded.export_chrome_trace(str(folder / "trace.json.gz"))
