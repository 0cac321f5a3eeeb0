"""Checkpoints that are either whole or absent, written beside the training.

A run folder holds checkpoints/step_000012/: torch DCP files for weights and optimizer, and trainer.json. A checkpoint
is written under another name and renamed when every rank has finished: a folder with the final name is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from colocated_grpo.config.schema import CheckpointConfig
from colocated_grpo.errors import RunError, in_one_line, write_failed
from colocated_grpo.policy.policy import Policy
from colocated_grpo.runtime.checkpoint_folders import FOLDER, STATE_FILE, complete_checkpoints, is_complete
from colocated_grpo.runtime.distributed import World

UNFINISHED = ".partial"


class Checkpoints:
    """Saves and restores one run. Every method is collective except `due`."""

    def __init__(
        self, run_dir: Path, config: CheckpointConfig, world: World, others: Mapping[str, Tensor] | None = None
    ) -> None:
        """others: tensors or shards that belong to the run beside the policy's, under names of their own."""
        self._folder = run_dir / FOLDER
        self._config = config
        self._world = world
        self._others = others or {}
        self._published: Future[None] | None = None

    def due(self, step: int) -> bool:
        return self._config.every > 0 and step % self._config.every == 0

    def save(self, step: int, policy: Policy, state: dict[str, Any]) -> None:
        """Start writing a checkpoint of `step` completed steps; `state` is rank 0's plain data (the source's cursor).

        Returns when the tensors are copied to host memory; training may go on while they are written. Where this step
        is saved already only `state` is written, if it is another: a run that is stopped right after a save has trained
        nothing, but may have taken something from outside.
        """
        self.wait()
        final = self._folder / f"step_{step:06d}"
        if self._world.from_main(lambda: is_complete(final) and _replace_state(final, state)):
            return
        partial = final.with_suffix(UNFINISHED)
        if self._world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            record = {"step": step, "policy_version": policy.version, "world_size": self._world.size, "state": state}
            _write_durably(partial / STATE_FILE, json.dumps(record))
        self._world.barrier()
        policy.init_optimizer_state()  # a run that is stopped before its first step must be restorable as well
        writing = dcp.async_save(self._tensors(policy), checkpoint_id=partial, process_group=self._world.checkpoints)
        # Waiting for the write alone is not enough: its callbacks, and so the renaming, run after it counts as done.
        self._published = Future()
        published = self._published
        writing.add_done_callback(lambda future: _settle(published, future, lambda: self._publish(partial, final)))

    def _publish(self, partial: Path, final: Path) -> None:
        """Rank 0's write ends after it has heard from every rank, so all files are there now."""
        if not self._world.is_main:
            return
        shutil.rmtree(final, ignore_errors=True)  # not whole, or this save would not have begun
        partial.rename(final)
        for old in complete_checkpoints(self._folder)[: -self._config.keep_last]:
            # Under its own name, half of a checkpoint would pass for a whole one if the deletion were cut short.
            old.rename(old.with_suffix(UNFINISHED))
        for left in self._folder.glob(f"*{UNFINISHED}"):
            shutil.rmtree(left)

    def wait(self) -> None:
        """Until the checkpoint under way is complete and visible. Raises what went wrong while writing."""
        if self._published is not None:
            try:
                self._published.result()
            except CheckpointException as error:  # torch's, over many lines, and no Exception
                raise write_failed("checkpoint", self._folder, _cause(error)) from error
            self._published = None
            self._world.barrier()

    def restore(self, policy: Policy) -> tuple[int, dict[str, Any]]:
        """Load the newest complete checkpoint into the policy; its step and `state`. (0, {}) where there is none."""
        newest = self._world.from_main(lambda: next(reversed(complete_checkpoints(self._folder)), None))
        if newest is None:
            return 0, {}
        policy.init_optimizer_state()
        tensors = self._tensors(policy)
        with _unreadable(newest):
            record = json.loads((newest / STATE_FILE).read_text())
            step, version, state = record["step"], record["policy_version"], record["state"]
            self._check_loadable(newest, record, tensors)
            dcp.load(tensors, checkpoint_id=newest, process_group=self._world.checkpoints)
        _restore_numbers(policy, tensors, self._world)
        policy.resume_at(version)
        return step, state

    def _tensors(self, policy: Policy) -> dict[str, Tensor]:
        """Weights and optimizer state under flat names. What differs from rank to rank carries the rank in its name."""
        tensors = {f"model.{name}": parameter.detach() for name, parameter in policy.parameters().items()}
        for name, state in policy.optimizer_states().items():
            for key, value in state.items():
                own = policy.optimizer_state_is_local and not isinstance(value, DTensor)
                suffix = f".rank{self._world.rank}of{self._world.size}" if own else ""
                tensors[f"optimizer.{name}.{key}{suffix}"] = _as_tensor(value)
        return {**tensors, **self._others}

    def _check_loadable(self, folder: Path, record: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        other = sorted(
            name for name, tensor in tensors.items() if name not in saved or saved[name].size != tensor.shape
        )
        if other:
            first = other[0]
            what = f"has {first!r} as {tuple(saved[first].size)}" if first in saved else f"lacks {first!r}"
            raise RunError(
                f"checkpoint {folder}: {what}, where this run has {tuple(tensors[first].shape)}, and differs in "
                f"{len(other) - 1} more; it was saved by {record['world_size']} ranks with another model, optimizer, "
                "or (adamw_8bit) number of ranks"
            )


@contextmanager
def _unreadable(folder: Path) -> Iterator[None]:
    """Whatever reading a checkpoint raises, in one line. Its files are torch's: damage shows as any kind of error."""
    try:
        yield
    except RunError:
        raise
    except (Exception, CheckpointException) as error:
        cause = _cause(error) if isinstance(error, CheckpointException) else in_one_line(error)
        raise RunError(
            f"checkpoint {folder}: cannot be read ({cause}); move it away to resume from the one before it"
        ) from error


def _cause(error: CheckpointException) -> str:
    """What the first rank met, in one line."""
    rank, (failure, _) = min(error.failures.items())
    return f"rank {rank}: {in_one_line(failure)}"


def _settle(settled: Future[None], before: Future, action: Callable[[], None]) -> None:
    """Settle a future with the outcome of `before`, then of `action`; a callback's own exception would be lost."""
    try:
        before.result()
        action()
    except BaseException as error:
        settled.set_exception(error)
    else:
        settled.set_result(None)


def _replace_state(folder: Path, state: dict[str, Any]) -> bool:
    """In a complete checkpoint, which is one at every moment; True."""
    record = json.loads((folder / STATE_FILE).read_text())
    if record["state"] != state:
        new = folder / (STATE_FILE + UNFINISHED)
        _write_durably(new, json.dumps({**record, "state": state}))
        new.replace(folder / STATE_FILE)
    return True


def _write_durably(file: Path, text: str) -> None:
    """On the disk when this returns: a machine that loses its power must not leave the name and nothing behind it."""
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _as_tensor(value: Tensor | float) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(float(value))


def _restore_numbers(policy: Policy, loaded: dict[str, Tensor], world: World) -> None:
    """Tensors were loaded in place; plain numbers in the optimizer's state are put back by hand."""
    for name, state in policy.optimizer_states().items():
        for key, value in state.items():
            if not isinstance(value, Tensor):
                state[key] = type(value)(loaded[f"optimizer.{name}.{key}.rank{world.rank}of{world.size}"].item())
