"""Stopping a run: each signal reaches the right processes, and no process is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from colocated_grpo.runtime import processes
from tests.support.paths import ROOT
from tests.support.servers import free_port

TIMEOUT = 300

# Takes the place of the launcher: runs a command and exits with its exit code. The bystander is a child of its own.
DRIVER = """
import os, signal, subprocess, sys
from pathlib import Path
from colocated_grpo.launch.launcher import SAVING
from colocated_grpo.runtime.processes import run_command
hangup, redirect, *command = sys.argv[1:]
signal.signal(signal.SIGHUP, signal.Handlers[hangup])
bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
redirect = Path(redirect) if redirect else None
code = run_command([sys.executable, *command], os.environ, redirect, lambda number: (SAVING, None))
assert bystander.poll() is None, "a process from before the run was killed"
bystander.kill()
sys.exit(code)
"""

# Takes the place of torchrun: starts ranks in sessions of their own, as torchrun does, and waits for them.
TORCHRUN = """
import os, signal, subprocess, sys
def on_signal(number, frame):
    os.write(1, b"torchrun was signalled\\n")
signal.signal(signal.SIGTERM, on_signal)
ranks = [subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True) for _ in range(2)]
sys.exit(max(rank.wait() for rank in ranks))
"""

RANK = """
import os, signal, sys
def on_signal(number, frame):
    os.write(1, b"saved\\n")
    EXIT
signal.signal(signal.SIGTERM, on_signal)
os.write(1, b"ready %d\\n" % os.getpid())
while True:
    signal.pause()
"""
SAVING_RANK = RANK.replace("EXIT", "sys.exit(0)")
STUBBORN_RANK = RANK.replace("EXIT", "pass")


def start(*command: str, redirect: str = "", hangup: signal.Handlers = signal.SIG_DFL) -> subprocess.Popen[str]:
    """Start the driver. hangup: its SIGHUP disposition, which it would otherwise inherit from the tests' own start."""
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, hangup.name, redirect, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def lines(process: subprocess.Popen[str], count: int) -> list[str]:
    return [process.stdout.readline().strip() for _ in range(count)]


def ready_ranks(process: subprocess.Popen[str]) -> list[int]:
    return [int(line.removeprefix("ready ")) for line in lines(process, 2)]


@pytest.mark.parametrize(
    ("code", "expected"), [("pass", 0), ("import sys; sys.exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_the_exit_code_is_that_of_the_command(code, expected):
    process = start("-c", code)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == expected


def test_redirected_output_reaches_the_file_and_not_the_console(tmp_path):
    file = tmp_path / "x.log"
    process = start("-c", "import sys; print('out', flush=True); print('err', file=sys.stderr)", redirect=str(file))
    assert process.communicate(timeout=TIMEOUT) == ("", "")
    assert file.read_text() == "out\nerr\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_lets_the_ranks_save_and_does_not_reach_torchrun(number):
    process = start("-c", TORCHRUN, SAVING_RANK)
    ranks = ready_ranks(process)
    process.send_signal(number)
    output, shown = process.communicate(timeout=TIMEOUT)
    assert output == "saved\nsaved\n"
    assert shown == (
        "\nstopping: the run saves a checkpoint at the next safe point and ends; "
        "Ctrl-C again, or SIGTERM, kills it at once\n"
    )
    assert process.returncode == 128 + number
    assert not any(map(psutil.pid_exists, ranks))


def test_a_launcher_under_nohup_keeps_ignoring_hangups():
    process = start("-c", TORCHRUN, SAVING_RANK, hangup=signal.SIG_IGN)
    ready_ranks(process)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + signal.SIGTERM, "the exit code is that of the first signal handled"


def test_the_second_signal_kills_ranks_that_do_not_stop():
    process = start("-c", TORCHRUN, STUBBORN_RANK)
    ranks = ready_ranks(process)
    process.send_signal(signal.SIGTERM)
    assert lines(process, 2) == ["saved", "saved"]
    assert all(map(psutil.pid_exists, ranks))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + signal.SIGTERM
    assert not any(map(psutil.pid_exists, ranks))


HUP, INT, TERM = signal.SIGHUP, signal.SIGINT, signal.SIGTERM


@pytest.mark.parametrize(
    ("signals", "killed"),
    [
        ([(0, TERM), (0.1, INT)], True),
        ([(0, INT), (5, INT)], True),
        ([(0, INT), (0.1, INT)], False),
        ([(0, INT), (0.1, INT), (5, INT)], True),
        ([(0, HUP), (5, HUP), (9, HUP)], False),
        ([(0, TERM), (0.1, HUP)], False),
        ([(0, HUP), (5, TERM)], False),
        ([(0, HUP), (5, TERM), (9, TERM)], True),
    ],
)
def test_only_a_second_request_kills_and_a_hangup_never_does(monkeypatch, signals, killed):
    calls = []
    monkeypatch.setattr(processes, "kill_descendants", lambda spare: calls.append("kill"))
    stop = processes._StopSignals(set(), lambda number: (b"", None), ranks=True)
    monkeypatch.setattr(stop, "_request_stop", lambda process: calls.append("stop"))
    stop._process = object()
    for now, number in signals:
        monkeypatch.setattr(processes.time, "monotonic", lambda now=now: now)
        stop._on_signal(number, None)
    assert calls == ["stop", "kill"] if killed else ["stop"]


def test_a_command_without_ranks_is_signalled_itself():
    process = start("-c", SAVING_RANK)
    lines(process, 1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=TIMEOUT)
    assert (output, process.returncode) == ("saved\n", 143)


def test_ranks_that_outlive_torchrun_are_killed():
    leaving = TORCHRUN.replace("sys.exit(max(rank.wait() for rank in ranks))", "print(*[rank.pid for rank in ranks])")
    process = start("-c", leaving, "import signal; signal.pause()")
    output, _ = process.communicate(timeout=TIMEOUT)
    first, second = map(int, output.split())
    assert process.returncode == 0
    assert not psutil.pid_exists(first)
    assert not psutil.pid_exists(second)


def test_a_signal_while_torchrun_exits_changes_nothing(tmp_path):
    """The launcher forwards a signal that the ranks have received already, and torchrun may be about to exit."""
    script = tmp_path / "rank.py"
    script.write_text("")
    late = (
        "import atexit, os, signal, sys\n"
        "from colocated_grpo.launch import elastic\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))\n"
        "elastic.main()\n"
    )
    process = start("-c", late, "--standalone", "--nproc-per-node", "1", str(script))
    _, shown = process.communicate(timeout=TIMEOUT)
    assert (shown, process.returncode) == ("", 0)


def test_a_port_in_use_is_a_one_line_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags = ["--nnodes", "1", "--nproc-per-node", "1", "--node-rank", "0", "--master-port", str(port)]
        process = start("-m", "colocated_grpo.launch.elastic", *flags, "--master-addr", "127.0.0.1", "-m", "this")
        _, shown = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 2
    assert shown == f"error: --master-port={port} on --master-addr=127.0.0.1: already in use; choose another port\n"


def test_a_node_that_never_comes_is_one_line_after_the_time_limit():
    ports = [free_port(), free_port()]
    command = ["-m", "colocated_grpo.launch.elastic", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-conf", "timeout=1", "--master-addr", "127.0.0.1"]
    starts = [
        start(*command, "--node-rank", str(node), "--master-port", str(port), "-m", "this")
        for node, port in enumerate(ports)
    ]
    first, second = [(*process.communicate(timeout=TIMEOUT), process.returncode) for process in starts]
    where = f"--master-port={ports[1]} on --master-addr=127.0.0.1"
    assert first == (
        "waiting for node 1 of 2\n",
        "error: only 1 of 2 nodes have started after 1 s (--join-timeout)\n",
        1,
    )
    assert second == (
        "waiting for node 0 of 2 at 127.0.0.1\n",
        f"error: {where}: node 0 does not answer there after 1 s (--join-timeout): Connection refused\n",
        1,
    )


def test_ranks_that_are_killed_before_they_can_report_it_end_with_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the launcher does, or torchrun prints a warning
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, signal\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), signal.SIGKILL)\nsignal.pause()\n"
    )
    process = start("-m", "colocated_grpo.launch.elastic", "--standalone", "--nproc-per-node", "2", str(script))
    _, shown = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 1
    [line] = shown.splitlines()
    assert line.startswith("error: the run was ended from outside, rank 1 by SIGKILL: for example by the system ")
    assert line.endswith("; --resume auto continues from the last checkpoint")


def test_killing_the_launcher_ends_the_command():
    process = start("-c", SAVING_RANK)
    [ready] = lines(process, 1)
    command = psutil.Process(int(ready.removeprefix("ready ")))
    process.kill()
    _, alive = psutil.wait_procs([command], timeout=TIMEOUT)
    for survivor in alive:
        survivor.kill()
    assert not alive
    assert process.stdout.read() == "saved\n"


@pytest.mark.parametrize("target", ["launcher", "torchrun", "all"])
def test_ranks_under_the_real_torchrun_save_before_they_end(tmp_path, target):
    """A cluster's scheduler signals all processes of a job."""
    script = tmp_path / "rank.py"
    script.write_text(SAVING_RANK)
    process = start("-m", "colocated_grpo.launch.elastic", "--standalone", "--nproc-per-node", "2", str(script))
    ranks = ready_ranks(process)
    torchrun = psutil.Process(ranks[0]).ppid()
    targets = {"launcher": [process.pid], "torchrun": [torchrun], "all": [torchrun, *ranks, process.pid]}
    for pid in targets[target]:
        os.kill(pid, signal.SIGTERM)
    output, shown = process.communicate(timeout=TIMEOUT)
    assert set(output.splitlines()) == {"saved"}
    assert "Traceback" not in shown
    assert process.returncode == 143
    assert not any(map(psutil.pid_exists, ranks))
