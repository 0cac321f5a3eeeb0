"""The doctor's checks of settings, files, run folder and Weights & Biases, and the command itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from colocated_grpo.runtime.checksums import sealed
from colocated_grpo.runtime.run_folder import CHECKPOINTS, MODEL_SHAPE, STATE_FILE
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.tools.doctor import network, subject
from colocated_grpo.tools.doctor.__main__ import MACHINE, MAX_SECONDS, RUN, bounded, examine, main, print_report
from colocated_grpo.tools.doctor.run_checks import check_files, check_run_folder, check_settings, check_wandb, damaged
from colocated_grpo.tools.doctor.subject import failed, ok, warning
from tests.support.config_text import load
from tests.support.doctor import subject_of
from tests.support.paths import ROOT
from tests.support.small_policy import config_of


@pytest.fixture
def config_file(model_folder, tmp_path) -> Path:
    """A config file of a run that can start on this machine."""
    file = tmp_path / "x.yaml"
    file.write_text(
        f"model: {model_folder()}\nenvironments: [{{type: task, name: sorting}}]\noutput_dir: {tmp_path}/runs\n"
        "rollout: {max_prompt_tokens: 32, max_completion_tokens: 16}\n"
    )
    return file


# Settings and files


def test_invalid_settings_are_one_failure(capsys, config_file):
    assert main(["--config", str(config_file), "--json", "--policy.lrr", "1"]) == 1
    results = {result["name"]: result for result in json.loads(capsys.readouterr().out)}
    assert set(results) == set(MACHINE)
    assert results["settings"]["status"] == "failed"
    assert results["settings"]["detail"].startswith("policy.lrr: unknown key; did you mean policy.lr?")


@pytest.mark.parametrize(
    ("setting", "value"), [("rollout.top_p", "0.9"), ("engine.args.quantization", "fp8"), ("rollout.top_k", "5")]
)
def test_settings_by_which_engine_and_policy_differ_are_a_warning(setting, value):
    found = check_settings(subject_of(load("", f"--{setting}", value)))
    assert found.status == "warning"
    assert f"{setting}={value}" in found.detail
    assert check_settings(subject_of(load())).status == "ok"


def test_missing_files_and_functions_are_found(model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dataset = {"type": "dataset", "name": "questions.jsonl", "rewards": ["no_such_reward"]}
    config = config_of(model_folder(), environments=[dataset])
    found = check_files(subject_of(config))
    assert found.status == "failed"
    assert "questions.jsonl': no such file" in found.detail
    assert "no_such_reward" in found.detail


def test_a_missing_model_is_left_to_its_own_check(tmp_path):
    config = config_of(tmp_path / "none")
    assert check_files(subject_of(config)).status == "ok"


# Run folder


def saved_run(folder: Path, **record) -> Path:
    """Write the files of a checkpoint, with tensors that nothing reads, and return its folder."""
    checkpoint = folder / CHECKPOINTS / "step_000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / STATE_FILE).write_text(sealed(json.dumps({"step": 3, "state": {}} | record)))
    for name in (".metadata", "__0_0.distcp"):
        (checkpoint / name).write_bytes(b"tensors")
    return checkpoint


def check_resumed_run(config, resume: str | None):
    return check_run_folder(subject_of(config, resume=resume))


def test_a_run_that_exists_is_not_overwritten(model_folder, tmp_path):
    config = config_of(model_folder(), output_dir=str(tmp_path), run_name="mine")
    assert check_resumed_run(config, None).detail == "a new run"
    checkpoint = saved_run(tmp_path / "mine")
    found = check_resumed_run(config, None)
    assert found.detail == f"run_name='mine': {tmp_path}/mine already contains a run"
    assert found.fix == "add --resume, or choose another name"
    assert check_resumed_run(config, "auto").detail == f"continues from {checkpoint}"


def test_a_run_is_resumed_with_its_model_and_adapter_only(model_folder, tmp_path):
    config = config_of(model_folder(), output_dir=str(tmp_path))
    assert check_resumed_run(config, str(tmp_path / "none")).status == "failed"
    saved_run(tmp_path / "mine", state={MODEL_SHAPE: {"hidden_size": 4096}})
    found = check_resumed_run(config, str(tmp_path / "mine"))
    assert "hidden_size is 36, but 4096 in the checkpoint" in found.detail
    saved_run(tmp_path / "other", state={MODEL_SHAPE: {"policy.lora": "an adapter"}})
    assert "policy.lora=null" in check_resumed_run(config, str(tmp_path / "other")).detail


@pytest.mark.parametrize("name", [STATE_FILE, ".metadata", "__0_0.distcp"])
def test_a_damaged_checkpoint_is_found(model_folder, tmp_path, name):
    config, checkpoint = config_of(model_folder(), output_dir=str(tmp_path)), saved_run(tmp_path / "mine")
    assert not damaged(checkpoint)
    (checkpoint / name).write_text("")
    found = check_resumed_run(config, str(tmp_path / "mine"))
    assert found.status == "failed"
    assert name in found.detail
    assert found.fix == f"mv {checkpoint} {tmp_path}/mine/damaged, then --resume {tmp_path}/mine"


def test_a_run_folder_in_use_is_found(model_folder, tmp_path):
    config = config_of(model_folder(), output_dir=str(tmp_path), run_name="mine")
    code = (
        "import sys; from pathlib import Path; from colocated_grpo.runtime.run_folder import lock_folder\n"
        f"lock_folder(Path({str(tmp_path / 'mine')!r})); print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "locked\n"
        found = check_resumed_run(config, None)
        other.stdin.close()
    assert f"in use by another run (process {other.pid} on {os.uname().nodename})" in found.detail
    assert check_resumed_run(config, None).status == "ok"


# Weights & Biases


def test_online_tracking_needs_a_key(tmp_path):
    config, home = load("", "--tracking.wandb", "online"), {"HOME": str(tmp_path), "WANDB_API_KEY": "", "NETRC": ""}

    def check(**variables: str):
        return check_wandb(subject_of(config, environment={**home, **variables}))

    found = check()
    assert found.detail == "tracking.wandb=online: no key for api.wandb.ai"
    assert found.fix == "wandb login, or --tracking.wandb offline"
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password 0123\n")
    assert check().status == "ok"
    assert check(WANDB_BASE_URL="https://wandb.example.org").status == "failed"
    assert check(WANDB_BASE_URL="https://wandb.example.org", WANDB_API_KEY="x").status == "ok"
    assert check(WANDB_MODE="offline").status == "skipped"
    assert check_wandb(subject_of(load())).status == "skipped"


# The command


def test_a_run_that_can_start_passes_all_checks(config_file, capsys):
    assert main(["--config", str(config_file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if not line.startswith(" ")][:-1] == [*MACHINE, *RUN]
    assert not any(line.startswith("failed") for line in lines)
    assert "\x1b" not in "".join(lines), "no colours outside a terminal"


def test_the_launcher_starts_the_doctor(config_file):
    command = [sys.executable, "run_colocated_grpo.py", "doctor", "--json", "--config", str(config_file)]
    done = subprocess.run([*command, "--model.name", "/nowhere"], cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert done.returncode == 1, done.stderr
    results = json.loads(done.stdout)
    assert [set(result) for result in results] == [{"name", "status", "detail", "fix"}] * len([*MACHINE, *RUN])
    assert [result["name"] for result in results if result["status"] == "failed"] == ["model"]
    assert all(bool(result["fix"]) == (result["status"] in ("warning", "failed")) for result in results)


def test_a_command_line_of_atropos_trainer_is_checked(model_folder, monkeypatch, capsys):
    for name in [*MACHINE, *RUN]:
        monkeypatch.setitem(MACHINE if name in MACHINE else RUN, name, lambda subject: ok(subject.run.model.name))
    assert main(["atropos", "--model-name", str(model_folder()), "--training-steps", "3", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [result["name"] for result in results] == [*MACHINE, *RUN]
    assert {result["detail"] for result in results} == {str(model_folder())}


@pytest.mark.parametrize("arguments", [["--gpu", "1"], ["--policy.lr", "1e-6"], ["--nodes", "0"]])
def test_an_invalid_command_line_is_one_line(capsys, arguments):
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {arguments[0]}")


def test_without_a_config_only_the_machine_is_checked(monkeypatch):
    for name in MACHINE:
        if name != "settings":
            monkeypatch.setitem(MACHINE, name, lambda subject: ok("fine"))
    findings = dict(examine(subject_of()))
    assert list(findings) == list(MACHINE)
    assert findings["settings"].detail == "no --config: only the machine is checked"


def test_a_check_that_raises_or_hangs_is_a_failure_of_that_check():
    def raises():
        raise ConfigError("a defect\nof two lines")

    found = bounded(raises)
    assert (found.status, found.detail) == ("failed", "the check itself failed: ConfigError: a defect of two lines")
    forever = threading.Event()
    found = bounded(lambda: ok(str(forever.wait())), seconds=0.01)
    assert (found.status, found.detail) == ("failed", "no result after 0.01 s")
    forever.set()
    assert bounded(lambda: ok("fine"), seconds=5.0).detail == "fine"


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


def test_every_check_has_a_limit_above_those_of_its_processes():
    assert max(subject.IMPORT_SECONDS, network.COLLECTIVE_SECONDS) < MAX_SECONDS
