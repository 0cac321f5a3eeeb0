"""Atomic checkpoints, written in the background during training.

A run folder holds checkpoints/step_000012/: torch DCP files for weights and optimizer, and trainer.json. A checkpoint
is written under another name and renamed when every rank has finished, so a folder with the final name is complete.
Checksums are verified when a run resumes from a checkpoint, and before older checkpoints are deleted.
"""

import json
import shutil
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from colocated_grpo.checkpoint import storage
from colocated_grpo.errors import CONTINUES, ConfigError, RunError, in_one_line, write_failed
from colocated_grpo.policy.policy import Policy
from colocated_grpo.runtime import run_folder
from colocated_grpo.runtime.checksums import damage, forget_cached, sealed
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.schema import CheckpointConfig
from colocated_grpo.types import JsonObject

UNFINISHED = ".partial"


@dataclass(eq=False)
class Checkpoints:
    """Saves and restores one run. Every method but `due` is collective."""

    run_dir: Path
    config: CheckpointConfig
    world: World
    others: Mapping[str, Tensor] = field(default_factory=dict)
    """Further tensors of the run, such as an opponent's shards, by names that the policy does not use."""
    note: Callable[[str], None] = print
    """Called on rank 0 with one line if a run could not resume from the newest checkpoint."""

    def __post_init__(self) -> None:
        self._folder = self.run_dir / run_folder.CHECKPOINTS
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._published: Future[None] | None = None
        self._best: int | None = None
        """Step of the best checkpoint, which is never deleted."""
        self._verified: Path | None = None
        """The newest checkpoint that was verified as intact. Set on rank 0."""

    def due(self, step: int) -> bool:
        return self.config.every > 0 and step % self.config.every == 0

    def save(self, step: int, policy: Policy, state: JsonObject, *, best: int | None = None) -> None:
        """Start writing a checkpoint of `step` completed steps. state: rank 0's plain data (the source's cursor).

        best: step of a checkpoint to keep in addition to the latest checkpoints.

        Returns once the tensors are copied to host memory. The tensors are written to disk during training. If a
        checkpoint of this step exists, only a changed `state` is written: a run that stops right after a save has not
        trained since the save, but may have received external data.
        """
        self.wait()
        self._best = best
        final = self._folder / f"step_{step:06d}"
        if self.world.from_main(
            lambda: final in run_folder.complete_checkpoints(self._folder) and _replace_state(final, state)
        ):
            return
        partial = final.with_suffix(UNFINISHED)
        record = ""
        if self.world.is_main:
            # Encoded now, because the state may change while the tensors are written.
            numbers = {
                "format": run_folder.FORMAT,
                "step": step,
                "policy_version": policy.version,
                "world_size": self.world.size,
            }
            record = json.dumps(numbers | {"state": state})
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self.world.barrier()
        policy.update.init_state()  # a run that stops before its first step must be restorable too
        writer, stager = storage.ChecksummedWriter(partial), DefaultStager(StagingOptions(False, False, False, False))
        writing = dcp.async_save(
            self._tensors(policy),
            storage_writer=writer,
            async_stager=stager,  # else the FileSystemWriter would also be the stager
            process_group=self.world.checkpoints,
        )
        assert isinstance(writing, Future)  # the stager copies synchronously

        def publish() -> None:
            try:
                writing.result()
            finally:
                stager.close()
            self._publish(partial, final, record, writer.checksums)

        self._published = self._thread.submit(publish)

    def _publish(self, partial: Path, final: Path, record: str, checksums: dict[str, str]) -> None:
        """Rename the finished checkpoint and delete old checkpoints. Rank 0 finishes last, so all files exist."""
        if not self.world.is_main:
            return
        whole = sealed(f'{record[:-1]}, "{run_folder.FILES}": {json.dumps(checksums)}}}')
        storage.write_durably(partial / run_folder.STATE_FILE, whole)
        shutil.rmtree(final, ignore_errors=True)  # `final` is incomplete or damaged, else no save would have started
        partial.rename(final)
        complete = run_folder.complete_checkpoints(self._folder)
        best = f"step_{self._best:06d}" if self._best is not None else None
        old = [checkpoint for checkpoint in complete[: -self.config.keep_last] if checkpoint.name != best]
        kept = complete[-self.config.keep_last :]
        if old and self._verified not in kept:
            forget_cached(final, checksums)
            if (problem := damage(final, checksums)) is not None:
                raise write_failed("checkpoint", final, f"read back, {problem}; older checkpoints are kept")
            self._verified = final
        for checkpoint in old:
            # Rename first, so that an interrupted deletion does not leave what looks like a complete checkpoint.
            checkpoint.rename(checkpoint.with_suffix(UNFINISHED))
        self._delete_unfinished()

    def _delete_unfinished(self) -> None:
        for left in self._folder.glob(f"*{UNFINISHED}"):
            shutil.rmtree(left)

    def wait(self) -> None:
        """Wait until the checkpoint being written is complete and visible. Raises RunError if writing it failed."""
        if self._published is not None:
            try:
                self._published.result()
            except (OSError, CheckpointException) as error:
                raise write_failed("checkpoint", self._folder, f"{_cause(error)}; {CONTINUES}") from error
            self._published = None
            self.world.barrier()

    def restore(self, policy: Policy) -> tuple[int, JsonObject]:
        """Load the newest intact checkpoint into the policy. Returns its step and `state`; (0, {}) without a
        checkpoint. Deletes what a kill while saving or deleting a checkpoint has left."""

        def newest() -> storage.SavedCheckpoint | None:
            self._delete_unfinished()
            return storage.newest_whole(self._folder, self.note)

        if (saved := self.world.from_main(newest)) is None:
            return 0, {}
        self._verified = saved.folder
        policy.update.init_state()
        tensors = self._tensors(policy)
        with unreadable(saved.folder):
            metadata = storage.metadata_of(saved.layout, saved.folder)
            _check_loadable(saved, metadata, tensors)
            reader = storage.LayoutReader(saved.folder, metadata)
            dcp.load(tensors, storage_reader=reader, process_group=self.world.checkpoints)
        suffix = f".rank{self.world.shard}of{self.world.num_shards}"
        for name, state in policy.optimizer_states().items():
            for key, value in state.items():
                if not isinstance(value, Tensor):  # a plain number; tensors were loaded in place
                    state[key] = type(value)(tensors[f"optimizer.{name}.{key}{suffix}"].item())
        policy.resume_at(saved.policy_version)
        return saved.step, saved.state

    def _tensors(self, policy: Policy) -> dict[str, Tensor]:
        """Weights and optimizer state by flat names. If ranks have different state, the name contains the rank."""
        tensors = {f"model.{name}": parameter.detach() for name, parameter in policy.parameters().items()}
        for name, state in policy.optimizer_states().items():
            for key, value in state.items():
                own = policy.optimizer_state_is_local and not isinstance(value, DTensor)
                suffix = f".rank{self.world.shard}of{self.world.num_shards}" if own else ""
                tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
                tensors[f"optimizer.{name}.{key}{suffix}"] = tensor
        return {**tensors, **self.others}


def _check_loadable(checkpoint: storage.SavedCheckpoint, metadata: Metadata, tensors: dict[str, Tensor]) -> None:
    entries = metadata.state_dict_metadata
    saved = {name: entry.size for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    # If this run has fewer layers with adapters, or fewer trained blocks, other trained tensors would be lost.
    if unused := sorted(name for name in saved if name.startswith("model.") and name not in tensors):
        raise RunError(
            f"checkpoint {checkpoint.folder}: has {unused[0]!r} and {len(unused) - 1} more tensors that this run does "
            "not train; resume with the policy.lora and policy.train_layers that the run began with"
        )
    if other := sorted(name for name, tensor in tensors.items() if saved.get(name) != tensor.shape):
        first = other[0]
        what = f"has {first!r} as {tuple(saved[first])}" if first in saved else f"lacks {first!r}"
        raise RunError(
            f"checkpoint {checkpoint.folder}: {what}, where this run has {tuple(tensors[first].shape)}, and differs in "
            f"{len(other) - 1} more tensors; it was saved by {checkpoint.world_size} ranks with another model, "
            "optimizer, or (adamw_8bit) number of ranks"
        )


@contextmanager
def unreadable(folder: Path) -> Generator[None]:
    """Convert any error to one line. torch and forged states raise many kinds of errors."""
    try:
        yield
    except (ConfigError, RunError):  # a ConfigError names settings that do not fit the state; the checkpoint is whole
        raise
    except (Exception, CheckpointException) as error:
        advice = "move it away to resume from the previous one"
        raise RunError(f"checkpoint {folder}: cannot be read ({_cause(error)}); {advice}") from error


def _cause(error: BaseException) -> str:
    """Return the error in one line; of torch's CheckpointException, which is no Exception, the lowest failed rank's."""
    if not isinstance(error, CheckpointException):
        return in_one_line(error)
    rank, (failure, _) = min(error.failures.items())
    return f"rank {rank}: {in_one_line(failure)}"


def _replace_state(folder: Path, state: JsonObject) -> bool:
    """Replace the state of a complete checkpoint atomically, if it differs. Returns False if the file is damaged."""
    try:
        record = run_folder.read_record(folder)
    except ValueError:
        return False
    if record["state"] != state:
        new = folder / (run_folder.STATE_FILE + UNFINISHED)
        text = json.dumps({key: value for key, value in record.items() if key != run_folder.SEAL} | {"state": state})
        storage.write_durably(new, sealed(text))
        new.replace(folder / run_folder.STATE_FILE)
    return True
