"""A launcher's temporary folder is removed at its end, or by the next start of the same user if it was killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from colocated_grpo.runtime.processes import LOCK_FILE, scratch_folder

HOLD = """
import sys
from colocated_grpo.runtime.processes import scratch_folder
with scratch_folder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def start_launcher() -> tuple[subprocess.Popen, Path]:
    """Start a process that holds a scratch folder. Return both."""
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, Path(process.stdout.readline().strip())


def test_the_folder_of_a_killed_launcher_is_removed_and_that_of_a_running_one_is_not():
    killed, abandoned = start_launcher()
    (abandoned / "verdict").write_text("1\n")
    killed.kill()
    killed.wait()
    assert abandoned.is_dir()
    running, used = start_launcher()
    try:
        assert not abandoned.exists()
        with scratch_folder() as own:
            assert sorted(Path(tempfile.gettempdir()).iterdir()) == sorted([used, own])
        assert used.is_dir()
    finally:
        running.communicate("")
    assert running.returncode == 0
    assert list(Path(tempfile.gettempdir()).iterdir()) == []


def test_folders_without_a_launchers_lock_and_links_are_left_alone(temporary):
    other = temporary / "colocated-grpo-models-x"
    other.mkdir()
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / LOCK_FILE).touch()
    (temporary / "colocated-grpo-link").symlink_to(elsewhere)
    linked_lock = temporary / "colocated-grpo-linked-lock"
    linked_lock.mkdir()
    (linked_lock / LOCK_FILE).symlink_to(elsewhere / LOCK_FILE)
    with scratch_folder():
        assert other.is_dir() and linked_lock.is_dir() and (elsewhere / LOCK_FILE).exists()
    (linked_lock / LOCK_FILE).unlink()
    (linked_lock / LOCK_FILE).touch()
    with scratch_folder():
        assert not linked_lock.exists()
