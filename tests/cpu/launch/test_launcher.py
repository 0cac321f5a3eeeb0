"""The launcher: the command it runs, the arguments it rejects, and the environment of the ranks."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from colocated_grpo.config.loading import load_config
from colocated_grpo.launch.arguments import Launch, visible_gpus
from colocated_grpo.launch.cli import _run
from colocated_grpo.launch.launcher import child_environment, main, torchrun_command
from colocated_grpo.runtime.verdict import VERDICT_VARIABLE
from tests.support.paths import ROOT

ELASTIC = "colocated_grpo.launch.elastic"
LAUNCHER = ROOT / "run_colocated_grpo.py"


@pytest.fixture
def config(tmp_path, monkeypatch) -> str:
    """A config file whose model exists, in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "model/model.safetensors").touch()
    (tmp_path / "x.yaml").write_text("model: {name: ./model}\nenvironments: [{type: task, name: sorting}]\n")
    return "x.yaml"


@pytest.fixture
def eight_gpus(tmp_path, monkeypatch) -> None:
    """An nvidia-smi that lists eight GPUs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    lines = "".join(f"GPU {number}: NVIDIA (UUID: GPU-{number})\\n" for number in range(8))
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{lines}'\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def dry_run(config, eight_gpus, capsys):
    """Return the command that a dry run shows, without the Python interpreter."""

    def dry_run(*flags: str) -> str:
        assert main(["--config", config, "--dry-run", *flags]) == 0
        output = capsys.readouterr().out
        assert output.endswith("Dry run mode - command not executed\n")
        command = next(line for line in output.splitlines() if line.startswith("  Command"))
        return command.removeprefix("  Command").strip().removeprefix(f"{shlex.quote(sys.executable)} -m ")

    return dry_run


# Dry runs

ONE_NODE = "--standalone --local-addr 127.0.0.1 -m colocated_grpo --config x.yaml"


@pytest.mark.parametrize(
    ("flags", "command"),
    [
        ("", f"colocated_grpo.launch.elastic --nnodes 1 --nproc-per-node 8 {ONE_NODE}"),
        ("--gpus 1", f"colocated_grpo.launch.elastic --nnodes 1 --nproc-per-node 1 {ONE_NODE}"),
        ("--gpus 4", f"colocated_grpo.launch.elastic --nnodes 1 --nproc-per-node 4 {ONE_NODE}"),
        ("--gpus 0", f"colocated_grpo.launch.elastic --nnodes 1 --nproc-per-node 1 {ONE_NODE}"),
        ("--gpus 0 --nproc 2", f"colocated_grpo.launch.elastic --nnodes 1 --nproc-per-node 2 {ONE_NODE}"),
        (
            "--gpus 4 --nodes 2 --node-rank 1 --master-addr 192.168.1.100",
            "colocated_grpo.launch.elastic --nnodes 2 --nproc-per-node 4 --node-rank 1 --master-addr 192.168.1.100 "
            "--master-port 29500 -m colocated_grpo --config x.yaml",
        ),
        (
            "--gpus 1 --master-port 4000",
            "colocated_grpo.launch.elastic --nnodes 1 --nproc-per-node 1 --node-rank 0 --master-addr localhost "
            "--master-port 4000 -m colocated_grpo --config x.yaml",
        ),
        ("--gpus 1 --resume", f"{ELASTIC} --nnodes 1 --nproc-per-node 1 {ONE_NODE} --resume auto"),
        (
            "--gpus 1 --resume model",
            f"{ELASTIC} --nnodes 1 --nproc-per-node 1 {ONE_NODE} --resume model",
        ),
        ("--gpus 1 --log-level DEBUG", f"colocated_grpo.launch.elastic --nnodes 1 --nproc-per-node 1 {ONE_NODE}"),
        (
            "--gpus 1 --policy.lr 2e-6 --engine.sleep=false --seed 3",
            f"colocated_grpo.launch.elastic --nnodes 1 --nproc-per-node 1 {ONE_NODE} "
            "--policy.lr 2e-6 --engine.sleep=false --seed 3",
        ),
        (
            "--gpus 1 --rollout.stop '[a, b]'",
            f"colocated_grpo.launch.elastic --nnodes 1 --nproc-per-node 1 {ONE_NODE} --rollout.stop '[a, b]'",
        ),
        (
            "--lora-target-modules q_proj v_proj --gpus 1 --use_peft --lora-layer-indices 0-1",
            f"colocated_grpo.launch.elastic --nnodes 1 --nproc-per-node 1 {ONE_NODE} "
            "--lora-target-modules q_proj v_proj --use_peft --lora-layer-indices 0-1",
        ),
    ],
)
def test_a_dry_run_shows_the_exact_command(dry_run, flags, command):
    assert dry_run(*shlex.split(flags)) == command


def test_a_dry_run_shows_the_whole_banner(config, eight_gpus, capsys):
    flags = "--gpus 4 --nodes 2 --node-rank 1 --master-addr node0 --policy.lr 1e-5 --dry-run"
    main(["--config", config, *flags.split()])
    assert capsys.readouterr().out == (
        "Co-located GRPO\n"
        "  GPUs per node  4\n"
        "  Nodes          2\n"
        "  Total ranks    8\n"
        "  Node rank      1\n"
        "  Master         node0:29500\n"
        "  Config         x.yaml\n"
        "  Overrides      --policy.lr 1e-5\n"
        "  Resume         no\n"
        "  Log level      INFO\n"
        f"  Command        {sys.executable} -m {ELASTIC} --nnodes 2 --nproc-per-node 4 --node-rank 1 "
        "--master-addr node0 --master-port 29500 -m colocated_grpo --config x.yaml --policy.lr 1e-5\n"
        "Dry run mode - command not executed\n"
    )


def test_a_dry_run_warns_about_what_this_machine_lacks(config, eight_gpus, capsys):
    assert main(["--config", config, "--gpus", "16", "--model.name", "./nope", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "warning: --gpus=16: only 8 GPUs are visible (nvidia-smi, CUDA_VISIBLE_DEVICES)\n" in output
    assert "warning: model.name='./nope': no such folder\n" in output


def test_a_dry_run_warns_about_a_server_for_other_machines_without_a_key(eight_gpus, config, capsys, monkeypatch):
    monkeypatch.setenv("ENGINE_KEY", "x")
    server = 'environments: [{type: atropos, server: {host: "0.0.0.0"%s}}]\n'
    for key, warns in (("", True), (", api_key_variable: ENGINE_KEY", False)):
        Path("atropos.yaml").write_text("model: {name: ./model}\n" + server % key)
        assert main(["--config", "atropos.yaml", "--dry-run"]) == 0
        warning = (
            "warning: environments.0.server.host=0.0.0.0: every machine that reaches port 9001 can use the engines"
        )
        assert (warning in capsys.readouterr().out) == warns


def test_a_dry_run_shows_the_notes_about_translated_names(config, eight_gpus, capsys):
    main(["--config", config, "--dry-run", "--learning_rate", "1e-5"])
    assert "note: translated names: learning_rate -> policy.lr\n" in capsys.readouterr().out


def test_a_resumed_run_keeps_its_own_config(config, eight_gpus, tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    (tmp_path / "x.yaml").rename(tmp_path / "runs/config.yaml")
    assert main(["--gpus", "1", "--resume", "runs", "--dry-run"]) == 0
    assert "-m colocated_grpo --config runs/config.yaml --resume runs\n" in capsys.readouterr().out


# Errors


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--gpus -1", "--gpus=-1: must be at least 0"),
        ("--gpus x", "--gpus: invalid int value: 'x'"),
        ("--gpus 9", "--gpus=9: only 8 GPUs are visible (nvidia-smi, CUDA_VISIBLE_DEVICES)"),
        ("--gpus 1 --nproc 2", "--nproc=2: valid with --gpus 0 only; a GPU run has one process per GPU"),
        ("--gpus 0 --nproc 0", "--nproc=0: must be at least 1"),
        ("--nodes 0", "--nodes=0: must be at least 1"),
        ("--nodes 2 --node-rank 2", "--node-rank=2: must be at least 0 and less than --nodes=2"),
        ("--node-rank -1", "--node-rank=-1: must be at least 0 and less than --nodes=1"),
        ("--master-port 99999", "--master-port=99999: must be between 1 and 65535"),
        ("--gpu 4", "--gpu: unknown flag; did you mean --gpus?"),
        ("--dryrun", "--dryrun: unknown flag; did you mean --dry-run?"),
        ("--config nope.yaml", "config='nope.yaml': no such file"),
        ("--resume nope", "--resume='nope': no such run folder"),
        ("--resume model", "--resume='model': no complete checkpoint in model/checkpoints"),
        ("--policy.lr -1", "policy.lr=-1: must be greater than 0 (command line)"),
        ("--polcy.lr 1", "polcy: unknown key; did you mean policy?"),
        ("--policy.lr", "--policy.lr: needs a value, for example --policy.lr VALUE or --policy.lr=VALUE"),
        ("extra", "'extra': expected --section.key VALUE"),
        ("other.yaml", "'other.yaml': unexpected argument; write --config other.yaml"),
        ("--model.name ./nope", "model.name='./nope': no such folder"),
        ("--environments.0.name gone.py:Task", "environments.0.name='gone.py:Task': no such file"),
        (
            "--gpus 3 --engine.tensor_parallel_size 2",
            "engine.tensor_parallel_size=2: must divide the number of ranks, 3",
        ),
        (
            "--gpus 8 --nodes 8 --rollout.prompts_per_step 32",
            "rollout.prompts_per_step=32: must be at least the number of engines, 64",
        ),
        (
            "--redirect-output nope/x.log",
            "--redirect-output='nope/x.log': cannot write (No such file or directory)",
        ),
    ],
)
def test_a_run_that_cannot_start_is_a_one_line_error_before_any_process_starts(
    config, eight_gpus, monkeypatch, capsys, flags, line
):
    monkeypatch.setattr("colocated_grpo.launch.launcher.run_command", lambda *_: pytest.fail("started"))
    try:
        code = main(["--config", config, *flags.split()])
    except SystemExit as usage:
        code = usage.code
    assert code == 2
    assert capsys.readouterr().err == f"error: {line}\n"


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ("{type: task, name: sortin}", "environments: unknown task 'sortin'; did you mean 'sorting'?"),
        ("{type: episode, name: tool_us}", "environments: unknown episode 'tool_us'; did you mean 'tool_use'?"),
        ("{type: turns, name: twon}", "environments: unknown turn environment 'twon'; did you mean 'town'?"),
        (
            "{type: dataset, name: rows.jsonl, rewards: [gsm8k, math_verfy]}",
            "environments 'rows.jsonl': rewards: unknown reward 'math_verfy'; did you mean 'math_verify'?",
        ),
    ],
)
def test_an_unknown_name_is_reported_once_with_the_nearest_valid_one(config, eight_gpus, tmp_path, capsys, entry, line):
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "x.yaml").write_text(f"model: {{name: ./model}}\nenvironments: [{entry}, {entry}]\n")
    assert main(["--config", config]) == 2
    (once,) = capsys.readouterr().err.splitlines()
    assert once.startswith(f"error: {line} valid: ")


def test_all_problems_are_reported_together(config, eight_gpus, capsys):
    flags = ["--model.name", "./nope", "--environments", "[{type: task, name: sortin}]", "--resume", "none"]
    assert main(["--config", config, "--gpus", "16", *flags]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("error: ").partition("=")[0].partition(":")[0] for line in lines] == [
        "--gpus",
        "environments",
        "model.name",
        "--resume",
    ]


@pytest.mark.parametrize(
    "entry",
    [
        "{type: task, name: 'reasoning_gym:leg_counting'}",
        "{type: episode, name: textarena, args: {game: TicTacToe-v0}}",
        "{type: turns, name: 'textarena:TicTacToe-v0'}",
        "{type: atropos, url: 'http://localhost:8000'}",
    ],
)
def test_names_of_library_environments_are_accepted(config, eight_gpus, tmp_path, capsys, entry):
    (tmp_path / "x.yaml").write_text(f"model: {{name: ./model}}\nenvironments: [{entry}]\n")
    assert main(["--config", config, "--dry-run"]) == 0
    assert "warning" not in capsys.readouterr().out


def test_the_default_config_is_in_the_working_folder(tmp_path, eight_gpus, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([]) == 2
    assert capsys.readouterr().err == (
        "error: --config: required, as the default training_configs/dr_grpo_config.yaml does not exist in this folder\n"
    )


# Runs


def test_the_command_runs_with_its_environment_and_its_exit_code_is_returned(config, eight_gpus, monkeypatch, capfd):
    started = []
    monkeypatch.setattr(
        "colocated_grpo.launch.launcher.run_command",
        lambda command, env, redirect: started.append((command, env, redirect)) or 7,
    )
    assert main(["--config", config, "--gpus", "2"]) == 7
    [(command, environment, redirect)] = started
    assert command[1:3] == ["-m", "colocated_grpo.launch.elastic"]
    assert environment["COLOCATED_GRPO_LOG_LEVEL"] == "INFO"
    assert redirect is None
    assert capfd.readouterr().out.startswith("Co-located GRPO\n")


@pytest.mark.parametrize(("parent", "is_used"), [("t", True), ("t" * 80, False)])
def test_engine_sockets_are_deleted_with_the_run_where_their_paths_are_short_enough(
    config, eight_gpus, monkeypatch, tmp_path_factory, parent, is_used
):
    parent = tmp_path_factory.getbasetemp().parent / parent
    parent.mkdir(exist_ok=True)
    monkeypatch.setattr("tempfile.tempdir", str(parent))
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)

    def run_command(_command, environment, _redirect):
        assert (environment.get("VLLM_RPC_BASE_PATH") == environment["PET_LOG_DIR"]) == is_used
        return 7

    monkeypatch.setattr("colocated_grpo.launch.launcher.run_command", run_command)
    assert main(["--config", config, "--gpus", "2"]) == 7
    assert not list(parent.iterdir())


def test_torchruns_logs_are_deleted_with_the_run(config, eight_gpus, monkeypatch):
    folders = []

    def run_command(_command, environment, _redirect):
        folder = Path(environment["PET_LOG_DIR"])
        assert folder.is_dir()
        folders.append(folder)
        return 7

    monkeypatch.setattr("colocated_grpo.launch.launcher.run_command", run_command)
    assert main(["--config", config, "--gpus", "2"]) == 7
    assert not folders[0].exists()


@pytest.mark.parametrize(("finishes", "code"), [(True, 0), (False, 1)])
def test_an_exit_code_of_0_is_success_only_where_a_rank_has_finished(
    config, eight_gpus, monkeypatch, capsys, finishes, code
):
    def run_command(_command, environment, _redirect):
        if finishes:
            monkeypatch.setenv(VERDICT_VARIABLE, environment[VERDICT_VARIABLE])
            monkeypatch.setattr("colocated_grpo.launch.cli._import_trainer", lambda: lambda *_, **__: None)
            return _run(load_config(config), None, "any")
        return 0  # like os._exit(0) in a reward

    monkeypatch.setattr("colocated_grpo.launch.launcher.run_command", run_command)
    assert main(["--config", config, "--gpus", "2"]) == code
    assert ("error: the run exited with code 0 before it was finished" in capsys.readouterr().err) == bool(code)


def test_a_run_starts_when_the_console_cannot_be_written(config, eight_gpus, monkeypatch):
    monkeypatch.setattr("colocated_grpo.launch.launcher.run_command", lambda *_: 7)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["--config", config, "--gpus", "2"]) == 7
        monkeypatch.undo()
        with suppress(OSError):
            full.close()


def test_a_redirected_run_shows_nothing_on_the_console(config, eight_gpus, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr("colocated_grpo.launch.launcher.run_command", lambda *_: 7)
    (tmp_path / "x.log").write_text("earlier run\n")
    assert main(["--config", config, "--gpus", "2", "--redirect-output", "x.log"]) == 7
    assert capfd.readouterr() == ("", "")
    assert (tmp_path / "x.log").read_text().startswith("earlier run\nCo-located GRPO\n")


@pytest.mark.parametrize(
    ("chosen", "count"),
    [(None, 8), ("", 0), ("0", 1), ("3,5", 2), ("0, 1", 2), ("-1", 0), ("0,9,1", 1), ("GPU-2,GPU-3", 2)],
)
def test_visible_gpus_are_those_that_cuda_would_list(eight_gpus, chosen, count):
    assert visible_gpus({} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}) == count


def test_a_machine_without_nvidia_smi_has_no_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == 0


def launch(**changes: object) -> Launch:
    place = {"gpus": 2, "ranks": 2, "nodes": 1, "node_rank": 0, "master_addr": "localhost", "master_port": None}
    return Launch(
        **(
            place
            | {
                "engine_gpus": 0,
                "config": "x.yaml",
                "resume": None,
                "log_level": "INFO",
                "log_dir": None,
                "overrides": (),
            }
            | changes
        )
    )


@pytest.mark.parametrize(("level", "nccl", "distributed"), [("DEBUG", "INFO", "INFO"), ("INFO", "WARN", "OFF")])
def test_the_log_level_reaches_the_libraries_and_the_ranks(level, nccl, distributed):
    environment = child_environment({}, 2, 2, level)
    assert environment["NCCL_DEBUG"] == nccl
    assert environment["TORCH_DISTRIBUTED_DEBUG"] == distributed
    assert environment["COLOCATED_GRPO_LOG_LEVEL"] == level
    assert environment["PYTHONUNBUFFERED"] == "1"


def test_library_variables_set_by_the_user_are_kept():
    assert child_environment({"NCCL_DEBUG": "TRACE"}, 2, 2, "INFO")["NCCL_DEBUG"] == "TRACE"


def test_the_package_is_importable_from_any_working_folder(tmp_path):
    environment = child_environment({**os.environ, "PYTHONPATH": "first"}, 2, 2, "INFO")
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "first"]


def test_a_cpu_run_hides_gpus_and_divides_the_cores_among_its_ranks():
    environment = child_environment({"CUDA_VISIBLE_DEVICES": "0"}, 0, 2, "INFO")
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert child_environment({}, 0, 9999, "INFO")["OMP_NUM_THREADS"] == "1"


def test_a_gpu_run_leaves_the_choice_of_gpus_alone():
    assert child_environment({"CUDA_VISIBLE_DEVICES": "3,4"}, 2, 2, "INFO")["CUDA_VISIBLE_DEVICES"] == "3,4"


def test_the_command_uses_the_launchers_own_python():
    assert torchrun_command(launch())[0] == sys.executable


def test_help_takes_less_than_three_tenths_of_a_second_of_cpu_time():
    seconds = []
    for _ in range(5):
        before = os.times()  # CPU time, as other work may occupy the cores
        subprocess.run([sys.executable, LAUNCHER, "--help"], stdout=subprocess.DEVNULL, check=True)
        after = os.times()
        seconds.append(sum(after[2:4]) - sum(before[2:4]))
    assert min(seconds) < 0.3
