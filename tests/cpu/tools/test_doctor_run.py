"""The doctor's command: its checks, output and exit codes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from colocated_grpo.tools.doctor.__main__ import CHECKS, main, print_report
from colocated_grpo.tools.doctor.subject import Imports, Subject, failed, ok, warning
from tests.support.paths import ROOT
from tests.support.training_runs import tiny_model


@pytest.fixture
def config_file(tmp_path) -> Path:
    """A config file of a run that can start on this machine."""
    file = tmp_path / "x.yaml"
    file.write_text(
        f"model: {tiny_model()}\nenvironments: [{{type: task, name: sorting}}]\noutput_dir: {tmp_path}/runs\n"
        "rollout: {max_prompt_tokens: 32, max_completion_tokens: 16}\n"
    )
    return file


def names_of_checks(lines: Sequence[str]) -> list[str]:
    return [line.split()[1] for line in lines if line and not line.startswith(" ")][: len(CHECKS)]


def test_a_run_that_can_start_passes_all_checks_and_the_dry_run(config_file, capsys):
    assert main(["--config", str(config_file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert names_of_checks(lines) == [*CHECKS]
    assert lines[-2].startswith("ok: settings, model, ")
    assert any("by arithmetic, a rank needs at least" in line for line in lines)
    assert not any(line.startswith("failed") for line in lines)
    assert "\x1b" not in "".join(lines), "no colours outside a terminal"


def test_the_launcher_starts_the_doctor_which_checks_the_machine_without_a_config():
    command = [sys.executable, "run_colocated_grpo.py", "doctor", "--gpus", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert names_of_checks(lines) == [*CHECKS] and "0 failed" in lines[-1], "and no dry run"


def test_a_failure_of_the_machine_or_of_the_dry_run_is_an_exit_code(capsys, config_file, monkeypatch):
    assert main(["--config", str(config_file), "--environments.0.name", "sortign"]) == 2
    assert "error: " in capsys.readouterr().err
    monkeypatch.setitem(CHECKS, "gpus", lambda subject: failed("too few", "--gpus 1"))
    assert main(["--config", str(config_file)]) == 1
    assert "fix: --gpus 1\n" in capsys.readouterr().out


def test_without_transformers_there_is_no_dry_run(capsys, config_file, monkeypatch):
    monkeypatch.setattr(Subject, "imports", Imports(torch="2.13", error="broken"))
    assert main(["--config", str(config_file)]) == 1
    assert "0 skipped" not in (out := capsys.readouterr().out)
    assert out.splitlines()[-1].startswith(f"{out.count('ok  ')} ok"), "the counts end the output"


def test_invalid_settings_are_one_line(capsys, config_file):
    assert main(["--config", str(config_file), "--policy.lrr", "1"]) == 2
    assert capsys.readouterr().err.startswith("error: policy.lrr: unknown key; did you mean policy.lr?")


def test_a_command_line_of_atropos_trainer_is_checked(monkeypatch, capsys):
    for name in CHECKS:
        monkeypatch.setitem(CHECKS, name, lambda subject: ok(""))
    assert main(["atropos", "--model-name", str(tiny_model()), "--training-steps", "3"]) == 0
    assert f"Model          {tiny_model()}" in capsys.readouterr().out, "the dry run is of the same command line"


@pytest.mark.parametrize("arguments", [["--gpu", "1"], ["--policy.lr", "1e-6"], ["--nodes", "0"]])
def test_an_invalid_command_line_is_one_line(capsys, arguments):
    with pytest.raises(SystemExit) as ended:  # what the arguments' parser rejects ends the process itself
        sys.exit(main(arguments))
    assert ended.value.code == 2
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
