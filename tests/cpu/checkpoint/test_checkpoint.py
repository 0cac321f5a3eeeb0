"""A checkpoint is whole or absent, holds the moment of its saving, and continues the run on any number of ranks."""

from __future__ import annotations

import errno
import io
import os
import shutil
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

from colocated_grpo.checkpoint.checkpoints import Checkpoints
from colocated_grpo.checkpoint.storage import ChecksummedWriter
from colocated_grpo.errors import CONTINUES, RunError, write_failed
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.run_folder import CHECKPOINTS, STATE_FILE, complete_checkpoints
from colocated_grpo.settings.schema import CheckpointConfig
from tests.support.random_models import make_model
from tests.support.ranks import run_on_ranks
from tests.support.small_policy import (
    SHAPE,
    assert_same,
    config_of,
    pack_for,
    policy_of,
    random_groups,
    train,
    weights_of,
    whole,
)

OPTIMIZERS = ["adamw", "adafactor", "adamw_8bit"]
STATE = {"source": {"cursor": 17, "order": [3, 1, 2]}}


def config_with(folder: Path, optimizer: str):
    return config_of(folder, policy={"lr": 1e-2, "optimizer": {"type": optimizer}})


def checkpoints_of(world: World, run_dir: Path, **settings) -> Checkpoints:
    return Checkpoints(run_dir, CheckpointConfig(**settings), world)


def snapshot(policy) -> dict:
    """Weights, every value of the optimizer's state, and the version."""
    numbers = {
        f"{name}.{key}": whole(value) if isinstance(value, torch.Tensor) else torch.tensor(value)
        for name, state in policy.optimizer_states().items()
        for key, value in state.items()
    }
    return {"version": torch.tensor(policy.version), **weights_of(policy), **numbers}


def save_and_go_on(world: World, folder: Path, run_dir: Path, optimizer: str) -> tuple[dict, dict]:
    """The policy when it was saved, and one step later."""
    config = config_with(folder, optimizer)
    policy = policy_of(config, world)
    batch = pack_for(world, random_groups(2, 3), config)
    train(policy, batch, steps=2)
    saved = snapshot(policy)
    checkpoints = checkpoints_of(world, run_dir)
    checkpoints.save(5, policy, STATE)
    checkpoints.wait()
    train(policy, batch)
    return saved, snapshot(policy)


def restore_and_go_on(world: World, folder: Path, run_dir: Path, optimizer: str) -> tuple[dict, dict, int, dict]:
    config = config_with(folder, optimizer)
    policy = policy_of(config, world)
    step, state = checkpoints_of(world, run_dir).restore(policy)
    restored = snapshot(policy)
    train(policy, pack_for(world, random_groups(2, 3), config))
    return restored, snapshot(policy), step, state


def save_then_restore(world: World, *arguments) -> tuple:
    return save_and_go_on(world, *arguments), restore_and_go_on(world, *arguments)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_restored_policy_is_the_saved_one_and_takes_the_same_next_step(
    world, model_folder, tmp_path, optimizer, world_size
):
    arguments = model_folder(), tmp_path, optimizer
    one_rank = world_size == 1
    results = [save_then_restore(world, *arguments)] if one_rank else run_on_ranks(save_then_restore, 2, *arguments)
    for (saved, later), (restored, restored_later, step, state) in results:
        assert saved["version"] == 2
        assert any(not torch.equal(later[name], saved[name]) for name in saved)
        assert_same(restored, saved, rtol=0, atol=0)
        assert_same(restored_later, later, rtol=0, atol=0)
        assert (step, state) == (5, STATE)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
@pytest.mark.parametrize("from_ranks", [1, 2])
def test_a_checkpoint_continues_on_another_number_of_ranks(world, model_folder, tmp_path, optimizer, from_ranks):
    arguments = model_folder(), tmp_path, optimizer
    if from_ranks == 2:
        saved, later = run_on_ranks(save_and_go_on, 2, *arguments)[0]
        results = [restore_and_go_on(world, *arguments)]
    else:
        saved, later = save_and_go_on(world, *arguments)
        results = run_on_ranks(restore_and_go_on, 2, *arguments)
    for restored, restored_later, step, state in results:
        assert_same(restored, saved, rtol=0, atol=0)
        # Adam's normalisation turns rounding of tiny gradients into visible differences.
        assert_same(restored_later, later, rtol=1e-3, atol=1e-4)
        assert (step, state) == (5, STATE)


def test_adamw_8bit_refuses_another_number_of_ranks_in_one_line(world, model_folder, tmp_path):
    arguments = model_folder(), tmp_path, "adamw_8bit"
    run_on_ranks(save_and_go_on, 2, *arguments)
    with pytest.raises(RunError, match=r"step_000005: lacks .* saved by 2 ranks .*adamw_8bit") as caught:
        restore_and_go_on(world, *arguments)
    assert "\n" not in str(caught.value)


def test_another_optimizer_than_the_saved_one_is_refused(world, model_folder, tmp_path):
    save_and_go_on(world, model_folder(), tmp_path, "adafactor")
    with pytest.raises(RunError, match="another model, optimizer"):
        restore_and_go_on(world, model_folder(), tmp_path, "adamw")


def test_other_tensors_of_the_run_are_saved_and_restored_with_the_policy(world, model_folder, tmp_path):
    policy = policy_of(config_with(model_folder(), "adamw"), world)

    def checkpoints_with(tensor: torch.Tensor) -> Checkpoints:
        return Checkpoints(tmp_path, CheckpointConfig(), world, {"opponent.weight": tensor})

    saved = checkpoints_with(torch.arange(4.0))
    saved.save(1, policy, STATE)
    saved.wait()
    other = torch.zeros(4)
    assert checkpoints_with(other).restore(policy)[0] == 1
    assert other.tolist() == [0, 1, 2, 3]


def test_without_a_checkpoint_the_run_starts_at_step_zero(world, model_folder, tmp_path):
    policy = policy_of(config_of(model_folder()), world)
    before = weights_of(policy)
    assert checkpoints_of(world, tmp_path).restore(policy) == (0, {})
    assert_same(weights_of(policy), before, rtol=0, atol=0)


def change_weights_while_writing(world: World, folder: Path, run_dir: Path) -> tuple[dict, dict]:
    """The policy as `save` found it, and as it is restored; every tensor was overwritten in between, in place."""
    config = config_with(folder, "adamw")
    policy = policy_of(config, world)
    train(policy, pack_for(world, random_groups(2, 3), config))
    saved = snapshot(policy)
    checkpoints = checkpoints_of(world, run_dir)
    go_on, save_file = threading.Event(), dcp.FileSystemWriter.write_data

    def write_later(*arguments):
        assert go_on.wait(120)
        return save_file(*arguments)

    dcp.FileSystemWriter.write_data = write_later
    try:
        checkpoints.save(1, policy, {})
        with torch.no_grad():
            for parameter, state in zip(policy.model.parameters(), policy.optimizer.state.values(), strict=True):
                for tensor in (parameter, *state.values()):
                    tensor.fill_(7.0)
        assert complete_checkpoints(run_dir / CHECKPOINTS) == []
        go_on.set()
        checkpoints.wait()
    finally:
        dcp.FileSystemWriter.write_data = save_file
    checkpoints.restore(policy)
    policy.version = int(saved["version"])
    return saved, snapshot(policy)


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_during_a_save_does_not_change_the_saved_tensors(world, model_folder, tmp_path, world_size):
    arguments = model_folder(), tmp_path
    one_rank = world_size == 1
    results = (
        [change_weights_while_writing(world, *arguments)]
        if one_rank
        else run_on_ranks(change_weights_while_writing, 2, *arguments)
    )
    for saved, restored in results:
        assert_same(restored, saved, rtol=0, atol=0)


def test_an_interrupted_save_is_not_a_checkpoint_and_the_next_start_deletes_it(world, model_folder, tmp_path):
    save_and_go_on(world, model_folder(), tmp_path, "adamw")
    whole_one = tmp_path / CHECKPOINTS / "step_000005"
    killed = tmp_path / CHECKPOINTS / "step_000006.partial"
    killed.mkdir()
    (killed / STATE_FILE).write_text((whole_one / STATE_FILE).read_text())
    (tmp_path / CHECKPOINTS / "step_000007").mkdir()
    assert complete_checkpoints(tmp_path / CHECKPOINTS) == [whole_one]
    policy = policy_of(config_with(model_folder(), "adamw"), world)
    assert checkpoints_of(world, tmp_path).restore(policy)[0] == 5
    assert not killed.exists()


def test_a_users_copy_beside_the_checkpoints_is_neither_resumed_nor_counted(world, model_folder, tmp_path):
    save_and_go_on(world, model_folder(), tmp_path, "adamw")
    own = tmp_path / CHECKPOINTS / "step_000005"
    for name in ("step_best", "step_000009 copy"):
        shutil.copytree(own, own.with_name(name))
    later = own.with_name("step_1000000")
    shutil.copytree(own, later)
    assert complete_checkpoints(tmp_path / CHECKPOINTS) == [own, later]


def test_an_interrupted_deletion_leaves_no_partial_checkpoint(world, model_folder, tmp_path, monkeypatch):
    policy = policy_of(config_with(model_folder(), "adamw"), world)
    checkpoints = checkpoints_of(world, tmp_path, keep_last=1)
    for step in (1, 2):
        checkpoints.save(step, policy, {})
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *_arguments, **_options: None)
        checkpoints.wait()
    assert [path.name for path in complete_checkpoints(tmp_path / CHECKPOINTS)] == ["step_000002"]
    checkpoints.save(3, policy, {})
    checkpoints.wait()
    assert [path.name for path in (tmp_path / CHECKPOINTS).iterdir()] == ["step_000003"], "what was left is gone"


def test_a_step_that_is_saved_already_is_not_written_again(world, model_folder, tmp_path, monkeypatch):
    save_and_go_on(world, model_folder(), tmp_path, "adamw")
    monkeypatch.setattr(dcp, "async_save", None)
    checkpoints_of(world, tmp_path).save(5, policy_of(config_with(model_folder(), "adamw"), world), STATE)
    assert [path.name for path in complete_checkpoints(tmp_path / CHECKPOINTS)] == ["step_000005"]


def save_twice(world: World, folder: Path, run_dir: Path) -> tuple[int, dict]:
    policy = policy_of(config_of(folder), world)
    for state in ({"taken": []}, {"taken": [1]}):
        checkpoints = checkpoints_of(world, run_dir)
        # Rank 0's alone, as the state of a source is.
        checkpoints.save(5, policy, state if world.is_main else {})
        checkpoints.wait()
    return checkpoints.restore(policy)


def test_a_step_that_is_saved_again_has_the_later_state(model_folder, tmp_path):
    """Data that a source has taken from outside since then belong to the resumed run."""
    assert run_on_ranks(save_twice, 2, model_folder(), tmp_path) == [(5, {"taken": [1]})] * 2
    assert [path.name for path in (tmp_path / CHECKPOINTS / "step_000005").glob("trainer*")] == [STATE_FILE]


def test_a_state_that_cannot_be_written_leaves_the_earlier_one(world, model_folder, tmp_path, monkeypatch):
    policy = policy_of(config_of(model_folder()), world)
    checkpoints = checkpoints_of(world, tmp_path)
    checkpoints.save(5, policy, STATE)
    checkpoints.wait()

    def disk_full(_descriptor: int) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", disk_full)
        with pytest.raises(OSError, match="no space left"):
            checkpoints.save(5, policy, {"source": {"cursor": 18}})
    assert checkpoints.restore(policy) == (5, STATE)


def test_a_model_of_another_size_is_refused_in_one_line(world, model_folder, tmp_path):
    save_and_go_on(world, model_folder(), tmp_path, "adamw")
    wider = make_model(tmp_path / "wider", shape=replace(SHAPE, intermediate=2 * SHAPE.intermediate))
    policy = policy_of(config_with(wider, "adamw"), world)
    with pytest.raises(RunError, match=r"has 'model.*mlp.* as \(\d+, \d+\), where this run has \(\d+, \d+\)") as caught:
        checkpoints_of(world, tmp_path).restore(policy)
    assert "\n" not in str(caught.value)


def test_a_save_that_fails_leaves_the_last_checkpoint_and_is_reported(world, model_folder, tmp_path, monkeypatch):
    save_and_go_on(world, model_folder(), tmp_path, "adamw")
    checkpoints = checkpoints_of(world, tmp_path)

    def disk_full(*_arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", disk_full)
    checkpoints.save(6, policy_of(config_with(model_folder(), "adamw"), world), {})
    cause = f"rank 0: OSError: no space left on device; {CONTINUES}"
    with pytest.raises(RunError, match=rf"failed \(\S+ GiB free there\): {cause}$"):
        checkpoints.wait()
    assert [path.name for path in complete_checkpoints(tmp_path / CHECKPOINTS)] == ["step_000005"]


def test_a_folder_that_was_deleted_meanwhile_is_named(tmp_path):
    error = str(write_failed("checkpoint", tmp_path / "deleted" / "checkpoints", "No such file or directory"))
    assert error.startswith(f"checkpoint: writing to {tmp_path / 'deleted' / 'checkpoints'} failed (")
    assert error.endswith(" GiB free there): No such file or directory")


class FullDisk(io.BytesIO):
    """A file on a disk that has room for 500 bytes."""

    def write(self, data):
        if self.tell() > 500:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def test_a_disk_that_fills_up_while_a_tensor_is_written_is_named(tmp_path, monkeypatch):
    """torch.save then raises an error of its own, which only says that the file has another length."""
    monkeypatch.setattr(FileSystem, "create_stream", lambda *_: nullcontext(FullDisk()))
    writer = ChecksummedWriter(tmp_path)
    with (
        pytest.raises(OSError, match="No space left on device"),
        writer.fs.create_stream(tmp_path / "a.distcp", "wb") as stream,
    ):
        torch.save(torch.ones(200), stream)
    stream.close()
    stream.flush()  # by torch's wrapper, when it is freed


def test_a_checkpoint_is_visible_as_soon_as_waiting_for_it_ends(world, model_folder, tmp_path, monkeypatch):
    """Renaming comes after writing: whoever waits for the writing alone may leave before it."""
    policy = policy_of(config_with(model_folder(), "adamw"), world)
    checkpoints = checkpoints_of(world, tmp_path)
    rename, waiting = Path.rename, threading.Event()

    def rename_late(path, target):
        waiting.wait(1)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_late)
    checkpoints.save(1, policy, {})
    checkpoints.wait()
    assert [path.name for path in complete_checkpoints(tmp_path / CHECKPOINTS)] == ["step_000001"]


def test_only_the_newest_checkpoints_are_kept(world, model_folder, tmp_path):
    policy = policy_of(config_with(model_folder(), "adamw"), world)
    checkpoints = checkpoints_of(world, tmp_path, keep_last=2)
    for step in (9, 10, 11, 11):
        checkpoints.save(step, policy, {"step": step})
    checkpoints.wait()
    assert sorted(path.name for path in (tmp_path / CHECKPOINTS).iterdir()) == ["step_000010", "step_000011"]
    assert checkpoints.restore(policy) == (11, {"step": 11})


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_stopped_before_its_first_step_can_be_resumed(world, model_folder, tmp_path, optimizer):
    config = config_with(model_folder(), optimizer)
    policy = policy_of(config, world)
    checkpoints = checkpoints_of(world, tmp_path)
    checkpoints.save(0, policy, STATE)
    checkpoints.wait()
    resumed = policy_of(config, world)
    assert checkpoints.restore(resumed) == (0, STATE)
    for one in (policy, resumed):
        train(one, pack_for(world, random_groups(1, 2), config))
    assert_same(snapshot(resumed), snapshot(policy), rtol=0, atol=0)


def test_a_checkpoint_is_due_every_so_many_steps_or_never(world, tmp_path):
    every_third, never = (checkpoints_of(world, tmp_path, every=every) for every in (3, 0))
    assert [step for step in range(1, 10) if every_third.due(step)] == [3, 6, 9]
    assert not any(never.due(step) for step in range(1, 10))
