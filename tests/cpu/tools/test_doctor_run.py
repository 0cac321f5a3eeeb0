"""The doctor's command: its checks, output and exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from colocated_grpo.tools.doctor.__main__ import MACHINE, RUN, main, print_report
from colocated_grpo.tools.doctor.subject import failed, ok, warning
from tests.support.paths import ROOT


@pytest.fixture
def config_file(model_folder, tmp_path) -> Path:
    """A config file of a run that can start on this machine."""
    file = tmp_path / "x.yaml"
    file.write_text(
        f"model: {model_folder()}\nenvironments: [{{type: task, name: sorting}}]\noutput_dir: {tmp_path}/runs\n"
        "rollout: {max_prompt_tokens: 32, max_completion_tokens: 16}\n"
    )
    return file


def test_a_run_that_can_start_passes_all_checks(config_file, capsys):
    assert main(["--config", str(config_file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if not line.startswith(" ")][:-1] == [*MACHINE, *RUN]
    assert not any(line.startswith("failed") for line in lines)
    assert "\x1b" not in "".join(lines), "no colours outside a terminal"


def test_the_launcher_starts_the_doctor_which_checks_the_machine_without_a_config():
    command = [sys.executable, "run_colocated_grpo.py", "doctor", "--gpus", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout
    assert [line.split()[1] for line in done.stdout.splitlines() if not line.startswith(" ")][:-1] == [*MACHINE]


def test_a_model_that_does_not_fit_is_a_failure_with_its_fix(capsys, config_file, monkeypatch):
    monkeypatch.setitem(RUN, "memory", lambda subject: failed("too large", "--policy.lora {}"))
    assert main(["--config", str(config_file)]) == 1
    assert "fix: --policy.lora {}\n" in capsys.readouterr().out


def test_invalid_settings_are_one_line(capsys, config_file):
    assert main(["--config", str(config_file), "--policy.lrr", "1"]) == 2
    assert capsys.readouterr().err.startswith("error: policy.lrr: unknown key; did you mean policy.lr?")


def test_a_command_line_of_atropos_trainer_is_checked(model_folder, monkeypatch, capsys):
    for checks in (MACHINE, RUN):
        for name in checks:
            monkeypatch.setitem(checks, name, lambda subject: ok(subject.config.model.name))
    assert main(["atropos", "--model-name", str(model_folder()), "--training-steps", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()[:-1]
    assert [line.split()[1:] for line in lines] == [[name, str(model_folder())] for name in (*MACHINE, *RUN)]


@pytest.mark.parametrize("arguments", [["--gpu", "1"], ["--policy.lr", "1e-6"], ["--nodes", "0"]])
def test_an_invalid_command_line_is_one_line(capsys, arguments):
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {arguments[0]}")


def test_results_are_printed_on_one_line_each_with_their_fix(capsys):
    results = [
        ("gpus", warning("a\x1b[31m\nlong " + "x" * 200, "do this")),
        ("x", ok("b")),
    ]
    print_report(results, Console())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["warning", "gpus", r"a\x1b[31m", "long", "x" * 200]
    assert lines[1].strip() == "fix: do this"
    assert lines[2].split() == ["ok", "x", "b"]
    assert lines[0].index(r"a\x1b") == lines[1].index("fix") == lines[2].index("b"), "aligned"
    assert lines[3] == "1 ok, 1 warning, 0 failed, 0 skipped"


def test_a_terminal_gets_colours(capsys):
    print_report([("gpus", failed("a", "b"))], Console(force_terminal=True, color_system="standard"))
    assert "\x1b[1;31mfailed" in capsys.readouterr().out
