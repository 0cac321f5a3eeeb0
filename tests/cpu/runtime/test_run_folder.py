"""Which folder a run writes into, and which one it continues."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from colocated_grpo.config.errors import ConfigError
from colocated_grpo.runtime.checkpoint_folders import FOLDER, MODEL_SHAPE, STATE_FILE
from colocated_grpo.runtime.run_folder import LOCK_FILE, check_resumed, choose_run_folder, claim, removed_if_unused
from tests.support.ranks import Ranks
from tests.support.small_policy import config_of


def config_in(output: Path, **settings):
    return config_of(Path("model"), output_dir=str(output), **settings)


def past_run(folder: Path, *, age: int = 0, complete: bool = True) -> Path:
    checkpoint = folder / FOLDER / ("step_000003" if complete else "step_000003.partial")
    checkpoint.mkdir(parents=True)
    (checkpoint / STATE_FILE).write_text("{}")
    os.utime(folder / FOLDER, (1_000_000 - age, 1_000_000 - age))
    return folder


def test_a_new_run_gets_a_folder_of_its_own(tmp_path):
    folder = choose_run_folder(config_in(tmp_path), None, "sorting")
    assert folder.parent == tmp_path
    assert re.fullmatch(r"sorting-\d{8}-\d{6}", folder.name)
    assert choose_run_folder(config_in(tmp_path, run_name="mine"), None, "sorting") == tmp_path / "mine"


def test_a_new_run_does_not_mix_with_an_old_one(tmp_path):
    past_run(tmp_path / "mine")
    with pytest.raises(ConfigError, match=r"run_name='mine'.*holds a run already; add --resume"):
        choose_run_folder(config_in(tmp_path, run_name="mine"), None, "sorting")


def test_a_run_that_died_before_its_first_checkpoint_may_be_started_again(tmp_path):
    past_run(tmp_path / "mine", complete=False)
    assert choose_run_folder(config_in(tmp_path, run_name="mine"), None, "sorting") == tmp_path / "mine"


def test_resume_auto_continues_the_newest_run_of_the_same_config(tmp_path):
    past_run(tmp_path / "sorting-20250101-000000", age=50)
    newest = past_run(tmp_path / "sorting-20240101-000000", age=10)
    past_run(tmp_path / "countdown-20260101-000000")
    past_run(tmp_path / "sorting-large-20260101-000000")
    assert choose_run_folder(config_in(tmp_path), "auto", "sorting") == newest


def test_resume_auto_starts_afresh_where_there_is_nothing_to_continue(tmp_path):
    past_run(tmp_path / "countdown-20260101-000000")
    assert not choose_run_folder(config_in(tmp_path), "auto", "sorting").exists()


def test_resume_auto_with_a_run_name_means_that_run(tmp_path):
    past_run(tmp_path / "sorting-20250101-000000")
    mine = past_run(tmp_path / "mine")
    assert choose_run_folder(config_in(tmp_path, run_name="mine"), "auto", "sorting") == mine


def test_a_named_folder_is_continued_wherever_it_is(tmp_path):
    elsewhere = past_run(tmp_path / "elsewhere")
    assert choose_run_folder(config_in(tmp_path / "runs"), str(elsewhere), "sorting") == elsewhere


@pytest.mark.parametrize(("made", "problem"), [(False, "no such run folder"), (True, "no complete checkpoint in .*")])
def test_a_named_folder_that_holds_nothing_to_continue_is_refused(tmp_path, made, problem):
    folder = past_run(tmp_path / "dead", complete=False) if made else tmp_path / "dead"
    with pytest.raises(ConfigError, match=f"^--resume='{folder}': {problem}$"):
        choose_run_folder(config_in(tmp_path), str(folder), "sorting")


def model_of(folder: Path, **settings: object) -> Path:
    """A model folder with the given config.json."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "model.safetensors").touch()
    return folder


def run_of_a_model(folder: Path, **shape: object) -> str:
    """A past run whose checkpoint is of a model of this shape; its folder."""
    state = {"step": 3, "state": {MODEL_SHAPE: shape}}
    (past_run(folder) / FOLDER / "step_000003" / STATE_FILE).write_text(json.dumps(state))
    return str(folder)


@pytest.mark.parametrize("resume", ["auto", None], ids=["auto", "by name"])
def test_a_run_is_not_resumed_with_a_model_of_another_shape(tmp_path, resume):
    run = run_of_a_model(tmp_path / "sorting-20250101-000000", model_type="qwen3", hidden_size=128)
    model = model_of(tmp_path / "larger", model_type="qwen3", hidden_size=256)
    with pytest.raises(ConfigError) as caught:
        check_resumed(config_of(model, output_dir=str(tmp_path)), resume or run, "sorting")
    assert str(caught.value) == (
        f"model.name={str(model)!r}: its hidden_size is 256, that of the checkpoint {run}/checkpoints/step_000003 is "
        "128; a run is resumed with a model of the same shape"
    )


def refusal(model: Path, run: str) -> str | None:
    """What one is told who resumes the run with this model; None: it goes on."""
    try:
        check_resumed(config_of(model), run, "sorting")
    except ConfigError as error:
        return str(error)
    return None


def test_a_run_is_resumed_with_its_model_wherever_that_has_moved_and_by_whomever_it_was_saved(tmp_path):
    """Who saves a model again leaves out of its config.json what is its family's default, or writes it in."""
    run = run_of_a_model(tmp_path / "run", model_type="qwen3", hidden_size=128, tie_word_embeddings=True)
    model = model_of(tmp_path / "moved/here", model_type="qwen3", hidden_size=128, head_dim=64, bos_token_id=1)
    assert refusal(model, run) is None
    assert "its hidden_size is 256" in refusal(model_of(tmp_path / "other", model_type="qwen3", hidden_size=256), run)


@pytest.mark.parametrize("record", ["{", "[]", "{}", '{"state": {}}', '{"state": {"model_shape": null}}'])
def test_a_checkpoint_that_says_no_shape_is_left_to_whoever_restores_it(tmp_path, record):
    run = past_run(tmp_path / "run")
    (run / FOLDER / "step_000003" / STATE_FILE).write_text(record)
    assert refusal(model_of(tmp_path / "model", hidden_size=128), str(run)) is None


def told(folder: Path) -> str:
    """What one is told that claims `folder`."""
    try:
        return str(claim(folder))
    except ConfigError as error:
        return str(error)


def claimed_elsewhere(folder: Path) -> str:
    """What another process is told that claims `folder`, and ends."""
    with Ranks(told, 1, folder) as process:
        return process.results()[0]


def test_two_runs_never_write_into_one_folder_and_a_lock_ends_with_its_process(tmp_path):
    folder = tmp_path / "mine"
    assert claimed_elsewhere(folder) == str(folder)  # that process has ended: its lock is no more
    assert claim(folder) == folder
    line = claimed_elsewhere(folder)
    assert line == f"{folder}: another run writes into it (process {os.getpid()} on {os.uname().nodename})"


def test_a_run_stays_in_its_folder_wherever_its_rewards_go(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = claim(Path("mine"))
    monkeypatch.chdir("/")
    assert (folder / LOCK_FILE).is_file()


def test_a_folder_that_cannot_be_made_is_told_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^output_dir: .*file/mine cannot be written \(Not a directory\)$"):
        claim(tmp_path / "file/mine")


@pytest.mark.parametrize("used", [False, True])
def test_a_run_that_could_not_be_built_leaves_a_folder_only_where_something_is_in_it(tmp_path, used):
    folder = claim(tmp_path / "mine")
    if used:
        (folder / "vllm.log").touch()
    with pytest.raises(KeyError), removed_if_unused(folder):
        raise KeyError
    assert folder.exists() is used
    assert (folder / LOCK_FILE).exists() is used
