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
from colocated_grpo.runtime.rendezvous import connect_store, serve_store
from tests.support.paths import ROOT

TIMEOUT = 300
SECONDS_TO_END = 30

# Takes the place of the launcher: runs a command as several ranks. The bystander is a child of its own.
DRIVER = """
import os, signal, subprocess, sys
from pathlib import Path
from colocated_grpo.launch.launcher import SAVING
from colocated_grpo.runtime import processes
hangup, redirect, ranks, *command = sys.argv[1:]
processes.LEAVE_SECONDS = 0.2
signal.signal(signal.SIGHUP, signal.Handlers[hangup])
bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
redirect = Path(redirect) if redirect else None
environments = [{**os.environ, "RANK": str(rank)} for rank in range(int(ranks))]
ended = processes.run_command([sys.executable, *command], environments, redirect, lambda number: (SAVING, None))
assert bystander.poll() is None, "a process from before the run was killed"
bystander.kill()
if ended.local_rank:
    print("rank", ended.local_rank, "failed first")
sys.exit(ended.code)
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


def start(
    code: str, *, ranks: int = 2, redirect: str = "", hangup: signal.Handlers = signal.SIG_DFL
) -> subprocess.Popen[str]:
    """Start the driver. hangup: its SIGHUP disposition, which it would otherwise inherit from the tests' own start."""
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, hangup.name, redirect, str(ranks), "-c", code],
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
def test_the_exit_code_is_that_of_the_ranks(code, expected):
    process = start(code)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == expected


def test_redirected_output_reaches_the_file_and_not_the_console(tmp_path):
    file = tmp_path / "x.log"
    code = "import sys; print('out', flush=True); print('err', file=sys.stderr)"
    process = start(code, ranks=1, redirect=str(file))
    assert process.communicate(timeout=TIMEOUT) == ("", "")
    assert file.read_text() == "out\nerr\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_lets_the_ranks_save(number):
    process = start(SAVING_RANK)
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
    process = start(SAVING_RANK, hangup=signal.SIG_IGN)
    ready_ranks(process)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + signal.SIGTERM, "the exit code is that of the first signal handled"


def test_the_second_signal_kills_ranks_that_do_not_stop():
    process = start(STUBBORN_RANK)
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
    stop = processes._StopSignals(set(), lambda number: (b"", None))
    monkeypatch.setattr(stop, "_request_stop", lambda: calls.append("stop"))
    for now, number in signals:
        monkeypatch.setattr(processes.time, "monotonic", lambda now=now: now)
        stop._on_signal(number, None)
    assert calls == ["stop", "kill"] if killed else ["stop"]


def test_processes_that_outlive_their_rank_are_killed():
    pause = [sys.executable, "-c", "import signal; signal.pause()"]
    process = start(f"import subprocess; print(subprocess.Popen({pause}, start_new_session=True).pid)")
    output, _ = process.communicate(timeout=TIMEOUT)
    first, second = map(int, output.split())
    assert process.returncode == 0
    assert not psutil.pid_exists(first)
    assert not psutil.pid_exists(second)


ORPHAN = """
import os, psutil, time
orphan, deadline = int(os.popen("exit & echo $!").read()), time.monotonic() + 20
while psutil.pid_exists(orphan):
    assert time.monotonic() < deadline
"""


def test_an_orphan_that_has_ended_does_not_remain_as_a_zombie_until_the_end_of_the_run():
    assert start(ORPHAN, ranks=1).wait(TIMEOUT) == 0


def test_a_rank_that_fails_is_named_and_the_ranks_that_do_not_notice_are_killed():
    kill_1 = "import os, signal\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), 9)\nsignal.pause()\n"
    process = start(kill_1, ranks=3)
    output, _ = process.communicate(timeout=TIMEOUT)
    assert (output, process.returncode) == ("rank 1 failed first\n", 128 + signal.SIGKILL)


HANDLED = "from colocated_grpo.runtime import parents_death\nparents_death.stop_at_parents_death()\n"
SUSPENDED_RANK = """
import os, signal
os.write(1, b"ready %d\\n" % os.getpid())
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.parametrize(
    ("code", "output"),
    [(HANDLED + SAVING_RANK, "saved\nsaved\n"), (SUSPENDED_RANK, "")],
    ids=["prepared", "suspended before it is prepared"],
)
def test_killing_the_launcher_ends_its_ranks(code, output):
    process = start(code)
    ranks = list(map(psutil.Process, ready_ranks(process)))
    process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=SECONDS_TO_END)
    for survivor in alive:
        survivor.kill()
    assert not alive
    assert process.stdout.read() == output


CHILD_THAT_IS_CONTINUED = """
import os, signal
from colocated_grpo.runtime.parents_death import stop_at_parents_death
stop_at_parents_death()
if (child := os.fork()) == 0:
    os.kill(os.getpid(), signal.SIGCONT)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_of_a_rank_survives_that_a_scheduler_continues_it():
    output, _ = start(CHILD_THAT_IS_CONTINUED, ranks=1).communicate(timeout=TIMEOUT)
    assert output == "7\n"


def test_ranks_save_when_all_processes_are_signalled_as_by_a_clusters_scheduler():
    process = start(SAVING_RANK)
    ranks = ready_ranks(process)
    for pid in [*ranks, process.pid]:
        os.kill(pid, signal.SIGTERM)
    output, shown = process.communicate(timeout=TIMEOUT)
    assert set(output.splitlines()) == {"saved"}
    assert "Traceback" not in shown
    assert process.returncode == 143
    assert not any(map(psutil.pid_exists, ranks))


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_port_is_reserved_before_its_store_serves(host):
    with processes.bind_store(host, 0) as bound:
        port = bound.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            processes.bind_store(host, port)
        with socket.create_connection(("127.0.0.1", port)):  # waits in the kernel
            store = serve_store(bound, TIMEOUT)
            connect_store("127.0.0.1", port, TIMEOUT).set("key", "value")
            assert store.get("key") == b"value"
