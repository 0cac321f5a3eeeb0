"""Which folder a run writes into, which one it resumes, and that it is locked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from colocated_grpo.launch.cli import passed_over
from colocated_grpo.runtime.checksums import sealed
from colocated_grpo.runtime.run_folder import (
    CHECKPOINTS,
    LOCK_FILE,
    MODEL_SHAPE,
    STATE_FILE,
    check_resumed,
    choose_run_folder,
    complete_checkpoints,
    is_locked,
    lock_folder,
    remove_if_unused,
)
from colocated_grpo.settings.errors import ConfigError
from tests.support.ranks import Ranks
from tests.support.small_policy import config_of


def past_run(folder: Path, *, age: int = 0, complete: bool = True) -> Path:
    checkpoint = folder / CHECKPOINTS / ("step_000003" if complete else "step_000003.partial")
    checkpoint.mkdir(parents=True)
    (checkpoint / STATE_FILE).write_text("{}")
    os.utime(folder / CHECKPOINTS, (1_000_000 - age, 1_000_000 - age))
    return folder


def test_a_new_run_gets_a_folder_of_its_own(tmp_path):
    folder = choose_run_folder(tmp_path, None, None, "sorting")
    assert folder.parent == tmp_path
    assert re.fullmatch(r"sorting-\d{8}-\d{6}", folder.name)
    assert choose_run_folder(tmp_path, "mine", None, "sorting") == tmp_path / "mine"


def test_a_new_run_does_not_write_into_an_existing_run(tmp_path):
    past_run(tmp_path / "mine")
    with pytest.raises(ConfigError, match=r"run_name='mine'.*already contains a run; add --resume"):
        choose_run_folder(tmp_path, "mine", None, "sorting")


def test_a_run_that_died_before_its_first_checkpoint_may_be_started_again(tmp_path):
    past_run(tmp_path / "mine", complete=False)
    assert choose_run_folder(tmp_path, "mine", None, "sorting") == tmp_path / "mine"


def test_resume_auto_resumes_the_newest_run_of_the_same_config(tmp_path):
    past_run(tmp_path / "sorting-20250101-000000", age=50)
    newest = past_run(tmp_path / "sorting-20240101-000000", age=10)
    past_run(tmp_path / "countdown-20260101-000000")
    past_run(tmp_path / "sorting-large-20260101-000000")
    past_run(tmp_path / "sorting-20260102-000000", complete=False)  # killed while it saved for the first time
    assert choose_run_folder(tmp_path, None, "auto", "sorting") == newest
    assert choose_run_folder(tmp_path, "", "auto", "sorting") == newest


def test_resume_auto_starts_a_new_run_where_there_is_none_to_resume(tmp_path):
    past_run(tmp_path / "countdown-20260101-000000")
    assert not choose_run_folder(tmp_path, None, "auto", "sorting").exists()


def test_resume_auto_names_the_newer_runs_that_it_passes_over(tmp_path):
    past_run(tmp_path / "sorting-20250101-000000")
    for name in ("sorting-20240101", "sorting-20250102", "sorting-20250103", "sorting-large-20260101"):
        (tmp_path / f"{name}-000000").mkdir()
    line = "--resume auto: newer runs without a checkpoint are skipped: 2, the newest sorting-20250103-000000"
    assert passed_over(tmp_path, None, "auto", "sorting") == [line]
    [large] = passed_over(tmp_path, None, "auto", "sorting-large")
    assert large.endswith(": 1, the newest sorting-large-20260101-000000")
    for run_name, resume, name in ((None, None, "sorting"), (None, "auto", "reversal"), ("mine", "auto", "sorting")):
        assert passed_over(tmp_path, run_name, resume, name) == []


def test_resume_auto_with_a_run_name_resumes_that_run(tmp_path):
    past_run(tmp_path / "sorting-20250101-000000")
    mine = past_run(tmp_path / "mine")
    assert choose_run_folder(tmp_path, "mine", "auto", "sorting") == mine


def test_a_named_folder_is_resumed_also_outside_of_the_output_folder(tmp_path):
    elsewhere = past_run(tmp_path / "elsewhere")
    assert choose_run_folder(tmp_path / "runs", None, str(elsewhere), "sorting") == elsewhere


@pytest.mark.parametrize(("made", "problem"), [(False, "no such run folder"), (True, "no complete checkpoint in .*")])
def test_a_named_folder_without_a_complete_checkpoint_is_rejected(tmp_path, made, problem):
    folder = past_run(tmp_path / "dead", complete=False) if made else tmp_path / "dead"
    with pytest.raises(ConfigError, match=f"^--resume='{folder}': {problem}$"):
        choose_run_folder(tmp_path, None, str(folder), "sorting")


def test_a_checkpoint_in_place_of_its_run_is_named_as_such(tmp_path):
    checkpoint = complete_checkpoints(past_run(tmp_path / "run") / CHECKPOINTS)[-1]
    with pytest.raises(ConfigError, match=f"; give the run folder, {tmp_path / 'run'}$"):
        choose_run_folder(tmp_path, None, str(checkpoint), "sorting")


@pytest.mark.parametrize("resume", ["auto", None], ids=["auto", "by name"])
@pytest.mark.parametrize("name", ["metrics.jsonl", LOCK_FILE])
def test_a_run_folder_that_leads_elsewhere_by_a_link_is_not_resumed(tmp_path, resume, name):
    """A resumed run would overwrite what the link leads to."""
    run = past_run(tmp_path / "sorting-20250101-000000")
    (run / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=rf"^--resume: {run / name} is a symbolic link, .*; replace it by the file"):
        choose_run_folder(tmp_path, None, resume or str(run), "sorting")
    linked = tmp_path / "linked"
    linked.symlink_to(past_run(tmp_path / "run"))
    assert choose_run_folder(tmp_path, None, str(linked), "sorting") == linked


def model_of(folder: Path, **settings: object) -> Path:
    """A model folder with the given config.json."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "model.safetensors").touch()
    return folder


def run_of_a_model(folder: Path, **shape: object) -> str:
    """Make a past run whose checkpoint is of a model of this shape. Return its folder."""
    state = {"step": 3, "state": {MODEL_SHAPE: shape}}
    (past_run(folder) / CHECKPOINTS / "step_000003" / STATE_FILE).write_text(sealed(json.dumps(state)))
    return str(folder)


@pytest.mark.parametrize("resume", ["auto", None], ids=["auto", "by name"])
def test_a_run_is_not_resumed_with_a_model_of_another_shape(tmp_path, resume):
    run = run_of_a_model(tmp_path / "sorting-20250101-000000", model_type="qwen3", hidden_size=128)
    model = model_of(tmp_path / "larger", model_type="qwen3", hidden_size=256)
    with pytest.raises(ConfigError) as caught:
        check_resumed(config_of(model, output_dir=str(tmp_path)), resume or run, "sorting")
    assert str(caught.value) == (
        f"model.name={str(model)!r}: hidden_size is 256, but 128 in the checkpoint {run}/checkpoints/step_000003; "
        "resume with a model of the same shape"
    )


def error_of_resume(model: Path, run: str) -> str | None:
    """Resume the run with this model. Return the error line, None without an error."""
    try:
        check_resumed(config_of(model), run, "sorting")
    except ConfigError as error:
        return str(error)
    return None


def test_a_run_is_resumed_after_its_model_was_moved_or_saved_again(tmp_path):
    """Saving a model again may add or leave out the entries of its config.json that are its family's defaults."""
    run = run_of_a_model(tmp_path / "run", model_type="qwen3", hidden_size=128, tie_word_embeddings=True)
    model = model_of(tmp_path / "moved/here", model_type="qwen3", hidden_size=128, head_dim=64, bos_token_id=1)
    assert error_of_resume(model, run) is None
    assert "hidden_size is 256" in error_of_resume(
        model_of(tmp_path / "other", model_type="qwen3", hidden_size=256), run
    )


@pytest.mark.parametrize("record", ["{", "[]", "{}", '{"state": {}}', '{"state": {"model_shape": null}}'])
def test_a_checkpoint_without_a_readable_shape_is_not_checked_before_it_is_restored(tmp_path, record):
    run = past_run(tmp_path / "run")
    (run / CHECKPOINTS / "step_000003" / STATE_FILE).write_text(record)
    assert error_of_resume(model_of(tmp_path / "model", hidden_size=128), str(run)) is None


def result_of_lock(folder: Path) -> str:
    """Lock `folder`. Return its path, or the error line."""
    try:
        return str(lock_folder(folder))
    except ConfigError as error:
        return str(error)


def result_of_lock_in_another_process(folder: Path) -> str:
    with Ranks(result_of_lock, 1, folder) as process:
        return process.results()[0]


def test_two_runs_never_write_into_one_folder_and_a_lock_ends_with_its_process(tmp_path):
    folder = tmp_path / "mine"
    assert result_of_lock_in_another_process(folder) == str(folder)  # and released, as that process has ended
    assert lock_folder(folder) == folder
    line = result_of_lock_in_another_process(folder)
    assert line == f"{folder}: in use by another run (process {os.getpid()} on {os.uname().nodename})"


def test_a_run_stays_in_its_folder_when_a_reward_changes_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = lock_folder(Path("mine"))
    monkeypatch.chdir("/")
    assert (folder / LOCK_FILE).is_file()


def test_a_folder_that_cannot_be_created_is_a_one_line_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^output_dir: cannot write to .*file/mine \(Not a directory\)$"):
        lock_folder(tmp_path / "file/mine")


@pytest.mark.parametrize("used", [False, True])
def test_a_run_that_fails_to_build_leaves_a_folder_only_where_it_has_written_a_file(tmp_path, used):
    folder = lock_folder(tmp_path / "mine")
    if used:
        (folder / "vllm.log").touch()
    remove_if_unused(folder)
    assert folder.exists() is used
    assert (folder / LOCK_FILE).exists() is used


LOCKS = """
import fcntl, sys
lock = open(sys.argv[1], "a")
fcntl.lockf(lock, fcntl.LOCK_EX)
print("locked", flush=True)
input()
"""


def test_a_folder_is_locked_while_another_process_trains_in_it(tmp_path):
    assert not is_locked(tmp_path)
    (tmp_path / LOCK_FILE).touch()
    assert not is_locked(tmp_path)
    command = [sys.executable, "-c", LOCKS, str(tmp_path / LOCK_FILE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        assert is_locked(tmp_path)
        other.kill()
    assert not is_locked(tmp_path)
