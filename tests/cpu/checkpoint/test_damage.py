"""Damage to a checkpoint is noticed before it is trained on, and the newest whole one is used instead."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from colocated_grpo.checkpoint import checkpoints
from colocated_grpo.checkpoint.checkpoints import Checkpoints
from colocated_grpo.checkpoint.storage import LAYOUT_FILE
from colocated_grpo.errors import RunError
from colocated_grpo.runtime.checksums import checksum, seal_is_broken, sealed
from colocated_grpo.runtime.run_folder import CHECKPOINTS, FILES, STATE_FILE, read_record
from colocated_grpo.settings.schema import CheckpointConfig
from tests.support.ranks import run_on_ranks
from tests.support.saved_runs import (
    NEWEST,
    OLDER,
    SHARD,
    checkpoint_names,
    halve,
    invert,
    restore,
    save_two,
    trained_policy,
)
from tests.support.small_policy import assert_same


@pytest.fixture(scope="module")
def original(world, model_folder, tmp_path_factory):
    """A run folder with two checkpoints, and the weights in them."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, save_two(world, model_folder(), folder)


@pytest.fixture
def run_dir(original, tmp_path) -> Path:
    shutil.copytree(original[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


DAMAGE = [
    pytest.param(lambda path: invert(path / SHARD), f"{SHARD} differs from its checksum", id="64 inverted bytes"),
    pytest.param(lambda path: invert(path / SHARD, at=1, count=1), f"{SHARD} differs", id="the last byte inverted"),
    pytest.param(lambda path: halve(path / SHARD), f"{SHARD} differs from its checksum", id="a truncated shard"),
    pytest.param(lambda path: (path / SHARD).unlink(), f"{SHARD} is missing", id="a missing shard"),
    pytest.param(lambda path: halve(path / LAYOUT_FILE), f"{LAYOUT_FILE} differs", id="a truncated layout"),
    pytest.param(lambda path: (path / LAYOUT_FILE).unlink(), f"{LAYOUT_FILE} is missing", id="a missing layout"),
    pytest.param(lambda path: halve(path / STATE_FILE), "JSONDecodeError: ", id="a truncated state"),
    pytest.param(lambda path: invert(path / STATE_FILE), "UnicodeDecodeError: ", id="an inverted state"),
    pytest.param(
        lambda path: (path / STATE_FILE).write_text((path / STATE_FILE).read_text().replace('"step": 6', '"step": 7')),
        f"ValueError: {STATE_FILE} differs from its checksum",
        id="another number in the state",
    ),
    pytest.param(lambda path: (path / STATE_FILE).unlink(), f"{STATE_FILE} is missing", id="a missing state"),
    pytest.param(
        lambda path: (path / STATE_FILE).write_text("[]"), f"ValueError: {STATE_FILE} is not an object", id="a list"
    ),
    pytest.param(
        lambda path: (path / STATE_FILE).write_text('{"step": 6}'),
        f"ValueError: {STATE_FILE} differs from its checksum",
        id="a state without checksums",
    ),
    pytest.param(lambda path: halve(path / ".metadata"), ".metadata differs from its checksum", id="torch's metadata"),
]


@pytest.mark.parametrize(("damage", "problem"), DAMAGE)
def test_a_resume_falls_back_to_the_newest_whole_checkpoint_and_says_so_in_one_line(
    world, model_folder, original, run_dir, damage, problem
):
    damage(run_dir / CHECKPOINTS / NEWEST)
    step, weights, [note] = restore(world, model_folder(), run_dir)
    assert step == 5
    assert_same(weights, original[1][0], rtol=0, atol=0)
    assert note.startswith(f"resuming from {OLDER}: damaged and renamed to *.damaged: {NEWEST} ({NEWEST}: {problem}")
    assert "\n" not in note
    assert checkpoint_names(run_dir) == [OLDER, f"{NEWEST}.damaged"]


def test_a_whole_checkpoint_is_restored_without_a_note(world, model_folder, original, run_dir):
    step, weights, notes = restore(world, model_folder(), run_dir)
    assert (step, notes) == (6, [])
    assert_same(weights, original[1][1], rtol=0, atol=0)


def test_a_run_without_a_whole_checkpoint_ends_with_one_line_and_keeps_all_files(world, model_folder, run_dir):
    invert(run_dir / CHECKPOINTS / NEWEST / SHARD)
    (run_dir / CHECKPOINTS / OLDER / SHARD).unlink()
    with pytest.raises(RunError) as caught:
        restore(world, model_folder(), run_dir)
    assert str(caught.value) == (
        f"checkpoints {run_dir / CHECKPOINTS}: none of 2 is whole ({NEWEST}: {SHARD} differs from its checksum); put "
        "back a copy of one, or start a new run"
    )
    assert checkpoint_names(run_dir) == [OLDER, NEWEST]


def test_every_file_of_a_checkpoint_has_a_checksum(run_dir):
    folder = run_dir / CHECKPOINTS / NEWEST
    names = {path.name for path in folder.iterdir()} - {STATE_FILE}
    assert read_record(folder)[FILES] == {name: checksum(folder / name) for name in names}
    assert names == {SHARD, LAYOUT_FILE, ".metadata"}


def test_a_damaged_byte_anywhere_in_a_sealed_text_is_noticed():
    text = sealed('{"step": 3, "state": {"order": [1, 2]}}')
    assert not seal_is_broken(text)
    for place in range(len(text)):
        assert seal_is_broken(text[:place] + chr(ord(text[place]) ^ 1) + text[place + 1 :])
    assert seal_is_broken('{"step": 3}')


def save_on(world, model: Path, run_dir: Path, steps: tuple[int, ...], **settings) -> None:
    """Resume, and save checkpoints of these steps."""
    policy = trained_policy(world, model)
    saving = Checkpoints(run_dir, CheckpointConfig(**settings), world, note=lambda line: None)
    saving.restore(policy)
    for step in steps:
        saving.save(step, policy, {})
        saving.wait()


def test_a_damaged_checkpoint_does_not_count_among_those_to_keep_and_its_step_is_saved_again(
    world, model_folder, run_dir
):
    invert(run_dir / CHECKPOINTS / NEWEST / SHARD)
    save_on(world, model_folder(), run_dir, (6,), keep_last=2)
    assert checkpoint_names(run_dir) == [OLDER, NEWEST, f"{NEWEST}.damaged"]
    assert restore(world, model_folder(), run_dir)[0] == 6


def test_old_checkpoints_are_kept_while_no_newer_one_can_be_read_back(world, model_folder, run_dir, monkeypatch):
    """The disk of this test damages what is written: reading it back is the only way to notice."""
    monkeypatch.setattr(checkpoints, "forget_cached", lambda folder, names: invert(folder / SHARD))
    save_on(world, model_folder(), run_dir, (7,), keep_last=2)  # step 6, verified when it was loaded, is kept
    assert checkpoint_names(run_dir) == [NEWEST, "step_000007"]
    with pytest.raises(RunError, match=r"step_000008 failed .*read back, .* differs from its checksum; older checkpoi"):
        save_on(world, model_folder(), run_dir, (8,), keep_last=1)
    assert checkpoint_names(run_dir) == [NEWEST, "step_000007", "step_000008"]
    assert restore(world, model_folder(), run_dir)[0] == 7


def save_and_damage_rank_1(world, model: Path, run_dir: Path) -> tuple[int, bool, list[str]]:
    weights = save_two(world, model, run_dir)[0]
    if world.is_main:
        invert(run_dir / CHECKPOINTS / NEWEST / "__1_0.distcp")
    world.barrier()
    step, restored, notes = restore(world, model, run_dir)
    return step, all(restored[name].equal(tensor) for name, tensor in weights.items()), notes


def test_a_damaged_shard_of_another_rank_makes_all_ranks_fall_back(model_folder, tmp_path):
    first, second = run_on_ranks(save_and_damage_rank_1, 2, model_folder(), tmp_path)
    assert first[:2] == second[:2] == (5, True)
    assert second[2] == []
    assert f"{NEWEST}: __1_0.distcp differs from its checksum" in first[2][0]
