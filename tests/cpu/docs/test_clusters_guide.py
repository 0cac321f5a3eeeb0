"""The files of the guide to clusters start the ranks that they ask for, with settings that a run accepts.

Their shell code runs in bash with functions in place of the programs that a cluster has, which print their arguments.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from colocated_grpo.launch.cli import add_run_arguments, read_arguments, read_launch, run_parser
from colocated_grpo.launch.launcher import read_settings
from colocated_grpo.runtime.program import Launch, OneLineParser, environment_problem, rank_environment
from colocated_grpo.settings.config_file import read_config
from colocated_grpo.settings.rules import check_world
from tests.support.paths import ROOT

CLUSTERS = ROOT / "docs/examples/clusters"
GUIDE = (ROOT / "docs/guides/clusters.md").read_text()
NODES, GPUS = 2, 4
FUNCTIONS = """
source() { :; }
python() { printf '%s\\n' python "$@"; }
srun() { printf '%s\\n' srun "$@"; }
exec() { "$@"; }
"""


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def printed_arguments(script: str, **environment: str) -> list[str]:
    """Run a script in bash and return the words that its last command consists of."""
    command = ["bash", "-euo", "pipefail", "-c", FUNCTIONS + script]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={"PATH": "/usr/bin:/bin"} | environment
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def launch_of(arguments: list[str]) -> Launch:
    """Return the launch that a command line of the launcher describes."""
    script = arguments[0] == "python"
    assert Path(arguments[1]).is_file() if script else arguments[0] == "colocated-grpo"
    options, overrides, _ = read_arguments(arguments[2 if script else 1 :], run_parser())
    return read_launch(options, overrides)


def sbatch_options() -> dict[str, str]:
    text = (CLUSTERS / "slurm.sbatch").read_text()
    return dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE))


def slurm_variables(rank: int) -> dict[str, str]:
    """Return what SLURM and srun set for one task of the job that the file asks for."""
    options = sbatch_options()
    nodes, tasks = int(options["nodes"]), int(options["ntasks-per-node"])
    return {
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NAME": "my-run",
        "SLURM_CPUS_PER_TASK": options["cpus-per-task"],
        "SLURM_NTASKS": str(nodes * tasks),
        "SLURM_STEP_NUM_TASKS": str(nodes * tasks),
        "SLURM_TASKS_PER_NODE": f"{tasks}(x{nodes})",
        "SLURM_NODELIST": f"gpu[03-{2 + nodes:02}]",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % tasks),
    }


def test_the_sbatch_file_starts_a_task_for_each_gpu():
    options = sbatch_options()
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == (
        str(NODES),
        str(GPUS),
        str(GPUS),
    )
    last = NODES * GPUS - 1
    environment = rank_environment(slurm_variables(last))
    assert environment_problem(environment) is None
    assert {name: environment[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")} == {
        "RANK": str(last),
        "LOCAL_RANK": str(GPUS - 1),
        "LOCAL_WORLD_SIZE": str(GPUS),
        "MASTER_ADDR": "gpu03",
    }


def test_the_sbatch_file_gives_its_ranks_a_valid_command():
    script = (CLUSTERS / "slurm.sbatch").read_text()
    arguments = printed_arguments(script, **slurm_variables(0))
    before, after = arguments[: arguments.index("python")], arguments[arguments.index("python") :]
    assert before == ["srun", "--kill-on-bad-exit=1"] and after[:3] == ["python", "-m", "colocated_grpo"]
    check_rank_arguments(after[3:])


def check_rank_arguments(arguments: list[str]) -> None:
    """Check the arguments of a rank: its flags, and settings that override the file."""
    parser = OneLineParser(allow_abbrev=False)
    add_run_arguments(parser)
    options, overrides = parser.parse_known_args(arguments)
    assert options.resume == "auto"
    config = read_config(options.config, overrides).config
    check_world(config, NODES * GPUS)
    assert config.run_name == "my-run"


@pytest.mark.parametrize("node", range(NODES))
def test_the_skypilot_file_starts_a_launcher_for_each_node(node):
    task = yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text())
    gpus = task["resources"]["accelerators"].partition(":")[2]
    variables = {
        "SKYPILOT_NUM_GPUS_PER_NODE": gpus,
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NODE_RANK": str(node),
        "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8",
        "SKYPILOT_TASK_ID": "sky-managed-2026-01-01-00-00-00-000000_grpo_1-0",
    }
    launch = launch_of(printed_arguments(task["run"], **variables))
    assert (launch.gpus, launch.nodes, launch.node_rank, launch.master_addr) == (GPUS, NODES, node, "10.0.0.7")
    assert launch.resume == "auto"
    config, _ = read_settings(launch)
    assert config.run_name == variables["SKYPILOT_TASK_ID"]
    assert config.output_dir in task["volumes"]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert shlex.split(task["setup"])[0] == "make" and shlex.split(task["setup"])[1] in targets


@pytest.mark.parametrize("node", range(NODES))
def test_the_kubernetes_file_starts_a_launcher_in_each_pod(node):
    service, job = yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    arguments = [text.replace("$(JOB_COMPLETION_INDEX)", str(node)) for text in container["args"]]
    launch = launch_of(arguments)
    assert (launch.nodes, launch.node_rank, launch.resume) == (NODES, node, "auto")
    assert launch.nodes == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert launch.gpus == container["resources"]["limits"]["nvidia.com/gpu"]
    assert launch.master_addr == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    config, _ = read_settings(launch)
    assert config.output_dir in [mount["mountPath"] for mount in container["volumeMounts"]]


def test_the_pods_of_the_kubernetes_file_find_each_other_and_their_volumes():
    service, job = yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert (service["spec"]["clusterIP"], pod["subdomain"]) == ("None", service["metadata"]["name"])
    assert job["spec"]["completionMode"] == "Indexed"
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_torchrun_command_of_the_guide_gives_its_ranks_a_valid_command():
    from torch.distributed.run import get_args_parser

    (command,) = re.findall(r"^torchrun (?:.*\\\n)*.*$", GUIDE, re.MULTILINE)
    options = get_args_parser().parse_args(shlex.split(command.replace("\\\n", " "))[1:])
    assert (options.nnodes, options.nproc_per_node) == (str(NODES), str(GPUS))
    assert (options.module, options.training_script) == (True, "colocated_grpo")
    check_rank_arguments(options.training_script_args)


def test_the_guide_names_every_variable_of_slurm_that_a_rank_reads():
    source = (ROOT / "colocated_grpo/runtime/program.py").read_text()
    read = set(re.findall(r"SLURM_[A-Z_]+[A-Z]", source))
    read |= {
        f"{prefix}_{name}" for name in re.findall(r'step_or_job\("(\w+)"', source) for prefix in ("SLURM", "SLURM_STEP")
    }
    assert sorted(name for name in read - {"SLURM_STEP"} if f"`{name}`" not in GUIDE) == []
