"""A run folder from another user is data: resuming it runs none of the code that its files may hold."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest

from colocated_grpo.errors import RunError
from colocated_grpo.runtime.run_folder import CHECKPOINTS
from tests.support.saved_runs import (
    NEWEST,
    OLDER,
    SHARD,
    attack_bytes,
    plant_in_tensors,
    restore,
    save_two,
    seal_again,
)
from tests.support.training_runs import ForkedRun, deterministic, train, uninterrupted, weights_of


@pytest.fixture(scope="module")
def original(world, model_folder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    save_two(world, model_folder(), folder)
    shutil.rmtree(folder / CHECKPOINTS / OLDER)
    return folder


@pytest.fixture
def checkpoint(original, tmp_path) -> Path:
    """The only checkpoint of a run."""
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    return tmp_path / CHECKPOINTS / NEWEST


def error_of_restore(world, model: Path, checkpoint: Path) -> str:
    with pytest.raises(RunError) as caught:
        restore(world, model, checkpoint.parents[1])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_planted_pickle_runs_code_where_it_is_unpickled(tmp_path):
    pickle.loads(attack_bytes(tmp_path / "attacked"))
    assert (tmp_path / "attacked").exists()


@pytest.mark.parametrize("name", [SHARD, ".metadata", "tensors.json", "trainer.json"])
def test_a_pickle_in_a_file_of_a_checkpoint_is_not_executed(world, model_folder, checkpoint, tmp_path, name):
    (checkpoint / name).write_bytes(attack_bytes(tmp_path / "attacked"))
    assert "none of 1 is whole" in error_of_restore(world, model_folder(), checkpoint)
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize("name", [SHARD, "tensors.json"])
def test_nor_is_one_that_has_a_valid_checksum(world, model_folder, checkpoint, tmp_path, name):
    (checkpoint / name).write_bytes(attack_bytes(tmp_path / "attacked"))
    seal_again(checkpoint)
    error_of_restore(world, model_folder(), checkpoint)
    assert not (tmp_path / "attacked").exists()


def test_nor_is_one_in_the_place_of_a_tensor(world, model_folder, checkpoint, tmp_path):
    plant_in_tensors(checkpoint, tmp_path / "attacked")
    assert "Weights only load failed" in error_of_restore(world, model_folder(), checkpoint)
    assert not (tmp_path / "attacked").exists()


def test_torchs_own_metadata_is_not_read(world, model_folder, checkpoint, tmp_path):
    (checkpoint / ".metadata").write_bytes(attack_bytes(tmp_path / "attacked"))
    seal_again(checkpoint)
    assert restore(world, model_folder(), checkpoint.parents[1])[0] == 6
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize("place", [{"file": "../../secret"}, {"dtype": "load"}, {"start": -1}, {"length": 1 << 40}])
def test_a_layout_that_leads_out_of_its_checkpoint_is_rejected(world, model_folder, checkpoint, tmp_path, place):
    (tmp_path / "secret").write_bytes(bytes(1 << 16))
    layout = json.loads((checkpoint / "tensors.json").read_text())
    first = next(iter(layout.values()))
    (first if "dtype" in place else first["chunks"][0]).update(place)
    (checkpoint / "tensors.json").write_text(json.dumps(layout))
    seal_again(checkpoint)
    assert "none of 1 is whole" in error_of_restore(world, model_folder(), checkpoint)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"step": -5}, "trainer.json has step -5 and"),
        ({"step": 7}, "trainer.json has step 7 and"),
        ({"policy_version": -1}, "policy_version -1"),
        ({"format": None}, "has format None, but this version of colocated_grpo reads format 2"),
        ({"format": 1}, "has format 1, but this version of colocated_grpo reads format 2"),
    ],
)
def test_numbers_that_do_not_belong_to_the_checkpoint_are_rejected(world, model_folder, checkpoint, changes, problem):
    seal_again(checkpoint, **changes)
    assert problem in error_of_restore(world, model_folder(), checkpoint)
    assert checkpoint.exists()


def plant(folder: Path, marker: Path) -> list[str]:
    """Replace every file below `folder` by a pickle. Return their names."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for file in files:
        file.write_bytes(attack_bytes(marker))
    return [file.relative_to(folder).as_posix() for file in files]


@pytest.mark.parametrize("state", [{}, {"source": {}}, {"source": []}], ids=str)
def test_a_real_run_ends_with_one_line_if_the_state_is_not_of_its_source(tmp_path, state):
    run = tmp_path / "run"
    shutil.copytree(uninterrupted(1).folder, run)
    newest = max((run / CHECKPOINTS).iterdir())
    seal_again(newest, state=state)
    with ForkedRun(tmp_path, deterministic(), "--resume", str(run), name="forged") as forged:
        assert forged.wait() == 1
    [line] = forged.stderr.splitlines()
    assert line.startswith(f"error: checkpoint {newest}: cannot be read (")


def test_a_real_run_resumes_from_the_one_whole_checkpoint_among_planted_files_and_ends_bit_for_bit(tmp_path):
    """With the settings of its user: config.yaml of a run folder names code and has to be trusted."""
    run, finished = tmp_path / "run", uninterrupted(1)
    shutil.copytree(finished.folder, run)
    planted = plant(run, tmp_path / "attacked")
    assert {"metrics.jsonl", "environment.json", "final_model/model.safetensors"} <= set(planted)
    with ForkedRun(tmp_path, deterministic(), "--resume", str(run), name="attacked") as attacked:
        assert attacked.wait() == 1
    [line] = attacked.stderr.splitlines()
    assert line.startswith(f"error: checkpoints {run / CHECKPOINTS}: none of 2 is whole (")
    older, newest = sorted(path.name for path in (run / CHECKPOINTS).iterdir())
    shutil.copytree(finished.folder / CHECKPOINTS / older, run / CHECKPOINTS / older, dirs_exist_ok=True)
    resumed = train(tmp_path, deterministic(), "--resume", str(run))
    assert f"resuming from {older}: damaged and renamed to *.damaged: {newest} (" in resumed.stdout
    assert resumed.stdout.count("environment.json.damaged") == resumed.stdout.count("metrics.jsonl.damaged") == 1
    assert weights_of(resumed) == weights_of(finished)
    assert not (tmp_path / "attacked").exists()
