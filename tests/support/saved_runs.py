"""A run folder with two checkpoints of a tiny policy, and damage to its files."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from colocated_grpo.checkpoint.checkpoints import Checkpoints
from colocated_grpo.checkpoint.storage import LAYOUT_FILE
from colocated_grpo.policy.policy import Policy
from colocated_grpo.runtime.checksums import checksum, sealed
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.run_folder import CHECKPOINTS, FILES, SEAL, STATE_FILE
from colocated_grpo.settings.schema import CheckpointConfig
from tests.support.small_policy import config_of, pack_for, policy_of, random_groups, train, weights_of

OLDER, NEWEST = "step_000005", "step_000006"
SHARD = "__0_0.distcp"


def trained_policy(world: World, model: Path) -> Policy:
    return policy_of(config_of(model, policy={"lr": 1e-2}), world)


def save_two(world: World, model: Path, run_dir: Path) -> list[dict[str, Tensor]]:
    """Save checkpoints of steps 5 and 6 with different weights, and return the weights of each."""
    policy = trained_policy(world, model)
    batch = pack_for(world, random_groups(2, 3), config_of(model))
    checkpoints, weights = Checkpoints(run_dir, CheckpointConfig(), world), []
    for step in (5, 6):
        train(policy, batch)
        weights.append(weights_of(policy))
        checkpoints.save(step, policy, {"saved": step})
        checkpoints.wait()
    return weights


def restore(world: World, model: Path, run_dir: Path) -> tuple[int, dict[str, Tensor], list[str]]:
    """Restore the newest whole checkpoint. Return its step, the weights, and the notes."""
    notes: list[str] = []
    policy = trained_policy(world, model)
    step, _ = Checkpoints(run_dir, CheckpointConfig(), world, note=notes.append).restore(policy)
    return step, weights_of(policy), notes


def invert(file: Path, at: float = 0.5, count: int = 64) -> None:
    """Invert `count` bytes in the middle of a file, or elsewhere."""
    data = bytearray(file.read_bytes())
    start = int(at * (len(data) - count))
    data[start : start + count] = bytes(255 - byte for byte in data[start : start + count])
    file.write_bytes(data)


def halve(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def seal_again(checkpoint: Path, **changes: object) -> None:
    """Write checksums of the files as they are now, and other entries of the record.

    Whoever changes a file on purpose can do this.
    """
    record = json.loads((checkpoint / STATE_FILE).read_text())
    files = {path.name: checksum(path) for path in checkpoint.iterdir() if path.name != STATE_FILE}
    text = json.dumps({key: value for key, value in record.items() if key != SEAL} | {FILES: files} | changes)
    (checkpoint / STATE_FILE).write_text(sealed(text))


class Attack:
    """An object whose pickle creates `marker` when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.marker),)


def attack_bytes(marker: Path) -> bytes:
    """Return a pickle that creates `marker` when it is read, as one complete line."""
    return pickle.dumps(Attack(marker)) + b"\n"


def plant_in_tensors(checkpoint: Path, marker: Path) -> None:
    """Replace every tensor by a file of torch.save with the attack, at the place that the layout gives."""
    torch.save(Attack(marker), checkpoint / SHARD)
    layout = json.loads((checkpoint / LAYOUT_FILE).read_text())
    for entry in layout.values():
        for chunk in entry["chunks"]:
            chunk |= {"file": SHARD, "start": 0, "length": (checkpoint / SHARD).stat().st_size}
    (checkpoint / LAYOUT_FILE).write_text(json.dumps(layout))
    seal_again(checkpoint)


def checkpoint_names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / CHECKPOINTS).iterdir())
