"""What a rank does before it trains: its place among the others, its libraries' variables, its settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from colocated_grpo.cli import first_host, rank_environment

ROOT = Path(__file__).resolve().parents[2]


def test_torchruns_variables_are_used_as_they_are():
    assert rank_environment({"RANK": "1", "SLURM_PROCID": "5", "SLURM_NTASKS": "8"}) == {}


def test_a_process_of_its_own_is_the_only_rank():
    environment = rank_environment({})
    port = environment.pop("MASTER_PORT")
    assert 0 < int(port) < 65536
    assert environment == {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }


def test_slurms_variables_place_a_rank():
    environment = {
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "8",
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


def test_a_job_step_smaller_than_its_job_counts():
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


START = "import sys; from colocated_grpo.cli import main; sys.exit(main(sys.argv[1:] or ARGUMENTS))"


@pytest.mark.parametrize(("number", "message"), [("0", "error: config='nope.yaml': no such file\n"), ("1", "")])
def test_settings_that_do_not_load_end_every_rank_and_rank_0_says_why(number, message):
    result = rank(START.replace("ARGUMENTS", "['--config', 'nope.yaml']"), RANK=number, WORLD_SIZE="2")
    assert (result.returncode, result.stderr) == (2, message)


def test_a_rank_prepares_its_libraries_and_starts_the_trainer(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "model/model.safetensors").touch()
    config = tmp_path / "x.yaml"
    config.write_text(f"model: {{name: {tmp_path}/model}}\nenvironments: [{{name: sorting}}]\n")
    code = (
        "import os, sys, types\n"
        "trainer = sys.modules['colocated_grpo.trainer'] = types.ModuleType('trainer')\n"
        "def train(config, resume):\n"
        "    print(config.policy.lr, resume, os.environ['VLLM_ENABLE_V1_MULTIPROCESSING'], os.environ['WORLD_SIZE'])\n"
        "trainer.main = train\n"
    )
    arguments = f"['--config', '{config}', '--resume', '--learning_rate', '2e-6']"
    result = rank(code + START.replace("ARGUMENTS", arguments))
    assert result.stderr == ""
    assert result.stdout == "note: old names read as new ones: learning_rate -> policy.lr\n2e-06 auto 0 1\n"
    assert result.returncode == 0
