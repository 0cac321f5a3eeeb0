"""The GPUs that nvidia-smi reports. Neither imports torch nor takes GPU memory."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

SECONDS = 10
FIELDS = ("index", "name", "memory.total", "memory.used", "driver_version")
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Gpu:
    index: int
    name: str
    total: int | None
    """Bytes. None where nvidia-smi may not read it, as in some containers with a part of a GPU (MIG)."""
    used: int | None
    """Bytes, of all processes."""
    driver: str


@dataclass(frozen=True, kw_only=True)
class GpuListing:
    """The GPUs of this machine, or the reason why they cannot be listed."""

    gpus: tuple[Gpu, ...] = ()
    error: str | None = None
    """The message of nvidia-smi; None if it is not installed."""


def list_gpus() -> GpuListing:
    try:
        return parse_listing(*_query(FIELDS))
    except FileNotFoundError:
        return GpuListing()
    except subprocess.TimeoutExpired:
        return GpuListing(error=f"nvidia-smi did not answer within {SECONDS} s")
    except OSError as error:
        return GpuListing(error=f"nvidia-smi cannot be started ({error.strerror})")


def fabric_states() -> list[str]:
    """Return the state of the NVSwitch fabric for each GPU; empty where nvidia-smi does not report it."""
    try:
        code, output = _query(("fabric.state",))
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip(" []") for line in output.splitlines()] if code == 0 else []


def _query(fields: Sequence[str]) -> tuple[int, str]:
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    return done.returncode, done.stdout.strip() or done.stderr.strip()


def parse_listing(code: int, output: str) -> GpuListing:
    """Parse the exit code and the output of nvidia-smi for `FIELDS`."""
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines()]
    if code or not all(len(row) == len(FIELDS) and row[0].isdigit() for row in rows):
        return GpuListing(error=" ".join(output.split()) or f"nvidia-smi exited with code {code}")
    return GpuListing(gpus=tuple(_gpu(row) for row in rows))


def _gpu(row: Sequence[str]) -> Gpu:
    index, name, total, used, driver = row
    return Gpu(index=int(index), name=name, total=_bytes(total), used=_bytes(used), driver=driver)


def _bytes(text: str) -> int | None:
    return int(text) * MIB if text.isdigit() else None


def visible(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects by number; as many as it names if it uses ids."""
    setting, by_number = environment.get("CUDA_VISIBLE_DEVICES"), {str(gpu.index): gpu for gpu in gpus}
    if setting is None:
        return tuple(gpus)
    chosen = [device.strip() for device in setting.split(",") if device.strip()]
    if any(device.startswith(("GPU-", "MIG-")) for device in chosen):
        return tuple(gpus[: len(chosen)])
    # CUDA ignores an invalid number and everything after it.
    return tuple(by_number[device] for device in takewhile(by_number.__contains__, chosen))
