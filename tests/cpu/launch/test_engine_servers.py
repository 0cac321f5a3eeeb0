"""Engine servers that the launcher starts: commands, devices, errors, and their end."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from colocated_grpo.launch.launcher import main
from colocated_grpo.runtime import processes
from colocated_grpo.runtime.processes import Ended
from colocated_grpo.runtime.program import KEY_VARIABLE, URLS_VARIABLE
from colocated_grpo.servers.engine_servers import EngineServers, ServerPlan, free_ports
from colocated_grpo.servers.options import parse
from tests.support.servers import until

SERVER = ["--engine.placement", "server"]
LONG = [sys.executable, "-c", "import time; time.sleep(600)"]
"""Command of a server that runs until it is ended."""

pytestmark = pytest.mark.usefixtures("eight_gpus")


@pytest.fixture
def planned(config, monkeypatch):
    """Return the plan of a launch, and the environment of its ranks, without starting either."""

    def planned(*flags: str) -> tuple[ServerPlan, dict[str, str]]:
        plans: list[ServerPlan] = []
        ranks: list[dict[str, str]] = []

        class Planned(EngineServers):
            def __enter__(self) -> EngineServers:
                plans.append(self._plan)
                return self

        monkeypatch.setattr("colocated_grpo.launch.launcher.EngineServers", Planned)
        monkeypatch.setattr(
            processes,
            "run_command",
            lambda _command, environments, *_: ranks.append(environments[0]) or Ended(3),
        )
        assert main(["--config", config, *SERVER, *flags]) == 3
        return plans[0], ranks[0]

    return planned


@pytest.mark.parametrize(
    ("flags", "visible", "servers", "trainers"),
    [
        (["--gpus", "4", "--engine-gpus", "2"], None, ["2", "3"], "0,1"),
        (["--engine-gpus", "4", "--engine.tensor_parallel_size", "2"], None, ["4,5", "6,7"], "0,1,2,3"),
        (["--gpus", "2", "--engine-gpus", "1"], "5,3,1", ["3"], "5"),
        (["--engine-gpus", "1"], "GPU-a,GPU-b,GPU-c", ["GPU-c"], "GPU-a,GPU-b"),
    ],
)
def test_servers_get_the_last_gpus_and_ranks_the_first(planned, monkeypatch, flags, visible, servers, trainers):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    plan, environment = planned(*flags)
    assert plan.devices == servers
    assert environment["CUDA_VISIBLE_DEVICES"] == trainers
    assert environment[URLS_VARIABLE].split() == plan.urls
    assert len(set(plan.urls)) == len(servers)
    assert len(environment[KEY_VARIABLE]) > 30
    names = ["server.log"] if len(servers) == 1 else ["server_0.log", "server_1.log"]
    assert [log.name for log in plan.logs] == names
    assert all(log.parent.is_dir() for log in plan.logs)


def test_on_the_cpu_one_server_serves_all_ranks(planned):
    plan, environment = planned("--gpus", "0", "--nproc", "2")
    assert plan.devices == [None]
    assert environment["CUDA_VISIBLE_DEVICES"] == ""


def test_settings_of_the_run_are_the_servers_flags(planned):
    flags = {
        "engine.bridge": "adapter",
        "policy.lora": "{rank: 12}",
        "policy.compute_dtype": "float32",
        "engine.max_num_seqs": "7",
        "engine.kv_cache_memory_bytes": "1000",
        "engine.enforce_eager": "true",
        "engine.args": '{"block_size": 32}',
        "model.revision": "main",
        "model.chat_template": '"{{ a }}"',
        "model.chat_template_kwargs": "{a: 1}",
        "rollout.max_prompt_tokens": "100",
        "rollout.max_completion_tokens": "28",
    }
    plan, _ = planned("--gpus", "2", "--engine-gpus", "1", *[f"--{key}={value}" for key, value in flags.items()])
    [command] = plan.commands
    assert command[:4] == [sys.executable, "-m", "colocated_grpo.servers", "./model"]
    given = dict(zip(command[4:], [*command[5:], ""], strict=True))
    for flag, value in {
        "--dtype": "float32",
        "--max-model-len": "128",
        "--max-lora-rank": "16",  # vLLM has no 12
        "--max-num-seqs": "7",
        "--kv-cache-memory-bytes": "1000",
        "--engine-args": '{"block_size": 32}',
        "--revision": "main",
        "--chat-template": "{{ a }}",
        "--chat-template-kwargs": '{"a": 1}',
        "--port": plan.urls[0].rpartition(":")[2],
        "--api-key-variable": KEY_VARIABLE,
    }.items():
        assert given[flag] == value, flag
    assert {"--enable-lora", "--enforce-eager"} <= given.keys()
    assert not {"--share-weights", "--gpu-memory-utilization", "--trust-remote-code"} & given.keys()
    assert parse(command[3:]).max_lora_rank == 16


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--engine-gpus 8", "--engine-gpus=8: must be less than --gpus=8, of which the rest trains"),
        ("--engine-gpus -1", "--engine-gpus=-1: must be less than --gpus=8, of which the rest trains"),
        (
            "--engine-gpus 3 --engine.tensor_parallel_size 2",
            "--engine-gpus=3: must be a multiple of engine.tensor_parallel_size=2, the GPUs of one server",
        ),
        (
            "--engine-gpus 2 --engine.urls [http://a:1]",
            "--engine-gpus=2: must be absent, as engine.urls names running servers",
        ),
        (
            "--engine-gpus 2 --engine.placement colocated",
            "--engine-gpus=2: must be absent, as engine.placement is colocated",
        ),
        (
            "--engine-gpus 2 --nodes 2",
            "--engine-gpus=2: valid on one node; with --nodes 2 start servers with colocated-grpo serve and set "
            "engine.urls",
        ),
        (
            "--nodes 2 --master-addr node0",
            "engine.urls: empty; with several nodes start servers with colocated-grpo serve and name them",
        ),
        (
            "--engine-gpus 1 --engine.bridge shared --gpus 2",
            "--engine-gpus=1: must be absent with engine.bridge: shared, one copy",
        ),
        (
            "--gpus 2",
            "--engine-gpus=0: must be at least 1 with engine.bridge: broadcast, as NCCL does not connect two processes "
            "on one GPU; on one GPU use engine.placement: colocated, or engine.bridge: shared",
        ),
        (
            "--engine-gpus 1 --engine.bridge adapter --policy.lora.rank 600",
            "policy.lora.rank=600: vLLM loads adapters up to rank 512; train with engine.bridge: broadcast, or "
            "export merged weights (checkpoint.export_merged)",
        ),
        (
            "--engine-gpus 1 --log-dir x.yaml/a",
            "--log-dir='x.yaml/a': cannot write (Not a directory)",
        ),
        (
            "--engine.urls [http://a:1] --engine.api_key_variable NO_SUCH_KEY",
            "engine.api_key_variable='NO_SUCH_KEY': this environment variable is not set; export it",
        ),
    ],
)
def test_flags_that_do_not_fit_are_one_line(config, monkeypatch, capsys, flags, line):
    monkeypatch.setattr(processes, "run_command", lambda *_: pytest.fail("started"))
    monkeypatch.setattr("colocated_grpo.launch.launcher._show", lambda *_: None)
    assert main(["--config", config, *SERVER, *flags.split()]) == 2
    assert capsys.readouterr().err == f"error: {line}\n"


def test_running_servers_are_left_to_their_owner(config, monkeypatch):
    monkeypatch.setattr("colocated_grpo.launch.launcher.EngineServers", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(processes, "run_command", lambda *_: Ended(3))
    assert main(["--config", config, *SERVER, "--engine.urls", "[http://a:1]"]) == 3


@pytest.mark.parametrize(
    ("visible", "warnings"),
    [
        (None, []),
        ("0", ["warning: --gpus=4: only 1 GPUs are visible (nvidia-smi, CUDA_VISIBLE_DEVICES)"]),
        ("0,1,2", ["warning: --gpus=4: only 3 GPUs are visible (nvidia-smi, CUDA_VISIBLE_DEVICES)"]),
    ],
)
def test_a_dry_run_shows_the_servers_also_without_the_gpus(config, monkeypatch, capsys, visible, warnings):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert main(["--config", config, *SERVER, "--gpus", "4", "--engine-gpus", "2", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("warning")] == warnings
    banner = dict(line.strip().split(maxsplit=2)[1:] for line in lines if "Engine" in line)
    assert banner["GPUs"] == "2 3"
    assert banner["servers"].count("http://127.0.0.1:") == 2
    assert not Path("outputs").exists()


def plan_of(folder: Path, *commands: list[str]) -> ServerPlan:
    return ServerPlan(
        commands=list(commands),
        devices=["7"] * len(commands),
        urls=["http://127.0.0.1:1"] * len(commands),
        trainer_devices="0",
        logs=[folder / f"{number}.log" for number in range(len(commands))],
    )


def test_servers_and_their_children_end_with_the_context(tmp_path):
    family = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).wait()"
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    plan = plan_of(tmp_path, [sys.executable, "-c", family], [sys.executable, "-c", stubborn], LONG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("colocated_grpo.servers.engine_servers.END_SECONDS", 0.5)
        patch.setattr("colocated_grpo.servers.engine_servers.KILL_SECONDS", 120.0)
        with EngineServers(plan, os.environ) as running:
            roots = [psutil.Process(process.pid) for process in running._processes]
            until(lambda: roots[0].children() and "ready" in plan.logs[1].read_text())
            everyone = [*roots, *roots[0].children()]
            assert all(process.environ()["CUDA_VISIBLE_DEVICES"] == "7" for process in roots)
    assert running.failure is None
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in everyone)


def test_the_end_of_a_server_stops_the_run_with_the_end_of_its_log(tmp_path):
    broken = [sys.executable, "-c", "print('one\\ntwo\\nthree\\nfour\\nfive\\nsix'); raise SystemExit(4)"]
    received: list[Any] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with EngineServers(plan_of(tmp_path, broken, LONG), os.environ) as running:
            until(lambda: received)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]
    log = tmp_path / "0.log"
    assert running.failure is not None
    assert running.failure.splitlines() == [
        f"error: an engine server ended with exit code 4; the end of {log}:",
        *["two", "three", "four", "five", "six"],
    ]


def test_a_server_that_ends_before_the_run_has_begun_does_not_kill_the_launcher(tmp_path):
    """Without a handler of SIGTERM, which the run sets, a signal would end this process."""
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with EngineServers(plan_of(tmp_path, [sys.executable, "-c", "raise SystemExit(4)"]), os.environ) as running:
        until(lambda: running.failure)
        received: list[Any] = []
        signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
        try:
            until(lambda: received)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_no_other_socket_gets_the_port_of_a_server_that_loads_its_model():
    first, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = free_ports(50)
    assert len(set(ports)) == 50 and max(ports) < first
