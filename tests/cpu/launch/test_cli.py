"""A rank before it trains: torchrun's variables, library variables, settings, and its error lines."""

from __future__ import annotations

import errno
import logging
import os
import resource
import subprocess
import sys
from logging.handlers import BufferingHandler
from pathlib import Path

import pytest

from colocated_grpo.errors import CONTINUES
from colocated_grpo.launch.cli import DEFAULT_CONFIG, add_run_arguments
from colocated_grpo.runtime import verdict
from colocated_grpo.runtime.program import (
    DESCRIPTORS,
    LOG_LEVEL_VARIABLE,
    OneLineParser,
    environment_problem,
    first_host,
    rank_environment,
    set_up_logging,
)
from colocated_grpo.runtime.verdict import VERDICT_VARIABLE, ProcessEnd, first_report, report
from colocated_grpo.tracking.ending import explain_os_error
from tests.support.paths import ROOT


def test_torchruns_variables_are_used_unchanged():
    assert rank_environment({"RANK": "1", "SLURM_PROCID": "5", "SLURM_NTASKS": "8"}) == {}


def test_a_process_started_alone_is_the_only_rank():
    environment = rank_environment({})
    assert environment == {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    assert environment_problem(environment) is None


def test_slurms_variables_give_a_rank_its_number():
    environment = {
        "SLURM_PROCID": "5",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_NODELIST": "gpu[03-04]",
        "SLURM_TASKS_PER_NODE": "4(x2)",
        "SLURM_JOB_ID": "1234567",
    }
    assert rank_environment(environment) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "34567",
    }


def test_a_batch_script_without_srun_is_the_only_rank():
    job = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_NODELIST": "gpu[03-04]", "SLURM_JOB_ID": "1234567"}
    alone = rank_environment(job)
    assert (alone["RANK"], alone["WORLD_SIZE"], alone["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")


def test_a_job_step_takes_precedence_over_its_job():
    job = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_NODELIST": "a,b"}
    step = rank_environment({**job, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "b"})
    assert (step["WORLD_SIZE"], step["MASTER_ADDR"]) == ("2", "b")


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[3-5]", "node3"),
        ("node[007,012-015],login", "node007"),
        ("rack-a[2,4]-ib", "rack-a2-ib"),
        ("a,node[3-5]", "a"),
    ],
)
def test_the_first_host_of_a_slurm_node_list_is_the_master(nodelist, host):
    assert first_host(nodelist) == host


def rank(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RANK", "VLLM_"))}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=inherited | {"PYTHONPATH": str(ROOT)} | environment,
    )


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "gpu03", "MASTER_PORT": "29500"}
START = "import sys; from colocated_grpo.launch.cli import main; sys.exit(main(sys.argv[1:] or ARGUMENTS))"


@pytest.mark.parametrize(("number", "message"), [("0", "error: config='nope.yaml': no such file\n"), ("1", "")])
def test_settings_that_do_not_load_end_every_rank_and_rank_0_prints_why(number, message):
    result = rank(START.replace("ARGUMENTS", "['--config', 'nope.yaml']"), **TORCHRUN | {"RANK": number})
    assert (result.returncode, result.stderr) == (2, message)


@pytest.mark.parametrize("number", ["0", "1"])
def test_ranks_without_a_config_use_the_default_one_and_rank_0_says_so(number):
    result = rank(START.replace("ARGUMENTS", "['--model.name', './nope']"), **TORCHRUN | {"RANK": number})
    lines = result.stderr.splitlines()
    assert (result.returncode, len(lines)) == (2, 2 if number == "0" else 0)
    if lines:
        assert lines[0].startswith(f"note: --config: not given; using {DEFAULT_CONFIG}; ")
        assert lines[1] == "error: model.name='./nope': no such folder"


@pytest.mark.parametrize("flag", ["--dry-run", "--gpus=8"])
def test_a_rank_names_the_launcher_for_its_flags(flag):
    result = rank(START.replace("ARGUMENTS", ascii(["--config", "nope.yaml", flag])))
    name = flag.partition("=")[0]
    assert result.returncode == 2
    shown = "a flag of the launcher, colocated-grpo; python -m colocated_grpo uses the GPU that it sees"
    assert result.stderr == f"error: {name}: {shown}\n"


def test_a_rank_names_the_launcher_for_its_commands():
    result = rank(START.replace("ARGUMENTS", "['sft', 'rows.jsonl']"))
    assert result.returncode == 2
    assert "error: 'sft': not a command here (colocated-grpo --help lists them)" in result.stderr


@pytest.fixture
def config(tmp_path) -> Path:
    """A config file whose model exists."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "model/model.safetensors").touch()
    path = tmp_path / "my_run.yaml"
    path.write_text(f"model: {{name: {tmp_path}/model}}\nenvironments: [{{name: sorting}}]\n")
    return path


def trained(config: Path, body: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a rank whose trainer is one line of Python."""
    code = (
        "import os, sys, types\n"
        "from colocated_grpo.settings.errors import ConfigError\n"
        "from colocated_grpo.errors import RunError\n"
        "rank = sys.modules['colocated_grpo.launch.rank'] = types.ModuleType('rank')\n"
        f"def train(config, joined, *, resume, name, output):\n    {body}\n"
        "rank.main = train\n"
    )
    return rank(code + START.replace("ARGUMENTS", ascii(["--config", str(config), *arguments])), **environment)


def test_a_rank_sets_library_variables_and_starts_the_trainer(config):
    body = (
        "print(name, resume, config.policy.lr, os.environ['VLLM_ENABLE_V1_MULTIPROCESSING'], os.environ['WORLD_SIZE'])"
    )
    result = trained(config, body, "--resume", "--learning_rate", "2e-6")
    assert result.stderr == ""
    note, *_, trained_with = result.stdout.splitlines()  # a busy machine adds the phases that are slow
    assert note == "note: translated names: learning_rate -> policy.lr"
    assert trained_with == "my_run auto 2e-06 0 1"
    assert result.returncode == 0


def test_a_rank_warns_about_a_server_for_other_machines_without_a_key(config):
    result = trained(config, "pass", "--environments", '[{type: atropos, server: {host: "::"}}]')
    assert "warning: environments.0.server.host=::: every machine that reaches port 9001" in result.stdout


def test_a_missing_run_to_resume_ends_a_rank_before_it_trains(config, tmp_path):
    result = trained(config, "print('trains')", "--resume", str(tmp_path / "gone"))
    line = f"error: --resume='{tmp_path / 'gone'}': no such run folder\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", line)


def test_a_rank_raises_its_limit_on_open_files(config):
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, soft), hard))
    try:
        result = trained(config, "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (
        f"{min(hard, DESCRIPTORS)} {hard}" in result.stdout.splitlines()
    )  # a busy machine adds the phases that are slow


@pytest.mark.parametrize(("error", "code"), [("ConfigError", 2), ("RunError", 1)])
def test_an_error_that_the_user_can_act_on_ends_a_rank_with_one_line(config, error, code):
    result = trained(config, f"raise {error}('batch.size=3: too small')")
    assert (result.returncode, result.stderr) == (code, "error: batch.size=3: too small\n")


def test_a_disk_error_ends_a_rank_with_one_line(config):
    result = trained(config, "raise OSError(27, 'File too large', 'x')")
    assert (result.returncode, result.stderr) == (1, f"error: File too large: x; {CONTINUES}\n")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.ENOSPC, "No space left"), f"No space left: while writing into runs; {CONTINUES}"),
        (OSError(errno.EIO, "I/O error"), f"I/O error: while writing into runs; {CONTINUES}"),
        (OSError(errno.EROFS, "Read-only disk", "/y/x"), f"Read-only disk: /y/x; {CONTINUES}"),
        (
            OSError(errno.EMFILE, "Too many open files"),
            "Too many open files: raise the limit on open files (ulimit -n)",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "runs/a/b"), "Permission denied: runs/a/b"),
        (
            IsADirectoryError(errno.EISDIR, "Is a directory", f"{Path.cwd()}/old/a"),
            f"Is a directory: {Path.cwd()}/old/a",
        ),
        (FileNotFoundError(errno.ENOENT, "No such file", "/nowhere/else"), None),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), None),
    ],
)
def test_only_errors_of_disks_limits_and_run_folders_are_shown_without_a_traceback(error, line):
    assert explain_os_error(error, ["runs", "old"]) == line


def test_a_sys_exit_in_user_code_is_an_error(config):
    result = trained(config, "sys.exit(0)")
    assert result.returncode == 1
    assert result.stderr.endswith("RuntimeError: sys.exit(0) was called during the run\n")


@pytest.mark.parametrize(
    ("error", "shown"), [("KeyboardInterrupt()", "KeyboardInterrupt"), ("SystemExit(0)", "SystemExit: 0")]
)
def test_what_user_code_raises_to_leave_the_process_ends_a_rank_with_one_line(config, error, shown):
    result = trained(config, f"exec(compile('def draw(): raise {error}', 'mine.py', 'exec'), globals()); draw()")
    assert (result.returncode, result.stderr) == (1, f"error: {shown}, raised by draw (mine.py, line 1)\n")


def test_user_code_that_calls_os_exit_is_named_except_in_a_forked_child(config):
    body = "def draw(): os.fork() or os._exit(3); os.wait(); os._exit(0)"
    result = trained(config, f"exec(compile({body!r}, 'mine.py', 'exec'), globals()); draw()")
    line = "error: draw (mine.py, line 1) ended the process by os._exit(0)\n"
    assert (result.returncode, result.stderr) == (1, line)


def test_a_defect_ends_a_rank_with_its_traceback(config):
    result = trained(config, "raise KeyError('x')")
    assert result.returncode == 1
    assert result.stderr.endswith("KeyError: 'x'\n")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_no_file_is_opened_with_the_descriptor_of_a_closed_standard_stream(tmp_path, closed):
    code = (
        "import sys; from colocated_grpo.runtime.program import prepare_streams; prepare_streams(); sys.stdin.read()\n"
        "print('x', flush=True); print('x', file=sys.stderr, flush=True)\n"
        f"with open({str(tmp_path / 'file')!r}, 'w') as file: file.write(str(file.fileno()))"
    )
    shell = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-c", code]
    subprocess.run(shell, stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    assert int((tmp_path / "file").read_text()) > 2


@pytest.mark.parametrize("code", ["ConfigError", "RunError"])
def test_characters_that_the_terminal_cannot_encode_are_escaped(config, code):
    body = f"print('Z\\xfcrich'); raise {code}('\\xfc=1: too small')"
    result = trained(config, body, PYTHONIOENCODING="ascii")
    waiting = "waiting for the other ranks"  # printed by a loaded machine only
    assert [line for line in result.stdout.splitlines() if not line.startswith(waiting)] == ["Z\\xfcrich"]
    assert result.stderr == "error: \\xfc=1: too small\n"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"WORLD_SIZE": None}, "RANK='0': set, but WORLD_SIZE is not; unset RANK, or start with torchrun"),
        ({"MASTER_PORT": None}, "RANK='0': set, but MASTER_PORT is not; unset RANK, or start with torchrun"),
        ({"RANK": "x"}, "RANK='x': must be a whole number"),
        ({"RANK": "2"}, "RANK=2: must be less than WORLD_SIZE=2"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536: must be a port, 1-65535"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0: must be a port, 1-65535"),
    ],
)
def test_incomplete_torchrun_variables_are_a_one_line_error(changes, problem):
    merged = {**TORCHRUN, **changes}
    assert environment_problem({name: value for name, value in merged.items() if value is not None}) == problem


def test_the_first_report_of_a_node_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(VERDICT_VARIABLE, str(tmp_path))
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(verdict, "_own", ProcessEnd())
        report(1, [f"error: rank {rank} has failed"])
        report(1, [f"error: rank {rank} has failed again"])
    assert first_report().lines == ["error: rank 1 has failed"]
    assert capsys.readouterr().err == ""


def test_an_error_is_printed_when_the_launchers_temporary_folder_was_deleted(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(VERDICT_VARIABLE, str(tmp_path / "gone"))
    monkeypatch.setenv("RANK", "0")
    report(1, ["error: what went wrong"])
    assert capsys.readouterr().err == "error: what went wrong\n"


@pytest.mark.parametrize("by_variable", [False, True])
def test_an_unknown_log_level_is_a_one_line_error(monkeypatch, capsys, by_variable):
    parser = OneLineParser()
    if by_variable:
        monkeypatch.setenv(LOG_LEVEL_VARIABLE, "loud")
    add_run_arguments(parser)
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args([] if by_variable else ["--log-level", "loud"])
    assert capsys.readouterr().err == (
        "error: --log-level: 'loud': must be one of DEBUG, INFO, WARNING, ERROR (COLOCATED_GRPO_LOG_LEVEL too)\n"
    )


def test_a_retried_download_is_shown_once():
    """huggingface_hub shows its warnings itself."""
    set_up_logging("INFO")
    seen_by_root = BufferingHandler(10)
    logging.getLogger().addHandler(seen_by_root)
    try:
        for name in ("huggingface_hub.utils._http", "colocated_grpo.policy"):
            logging.getLogger(name).warning("Retrying in 1s [Retry 1/5].")
    finally:
        logging.getLogger().removeHandler(seen_by_root)
    assert [record.name for record in seen_by_root.buffer] == ["colocated_grpo.policy"]
