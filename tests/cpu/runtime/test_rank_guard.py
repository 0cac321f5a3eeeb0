"""User code that holds the interpreter lock ends its rank at the limit or after a stop request; nothing else does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from colocated_grpo.runtime.guard_process import user_place
from tests.support.paths import ROOT

TIMEOUT = 60.0
SECONDS_TO_END = 10.0
RANK = """
import re, signal, threading, time
from colocated_grpo.runtime import rank_guard
rank_guard.MIN_SECONDS, rank_guard.STOP_SECONDS = 0.4, 0.8
signal.signal(signal.SIGTERM, lambda *_: None)
guard = rank_guard.RankGuard(LIMIT, "rollout.reward_timeout=LIMIT")
LONG = range(50_000_000)

def hold():
    print("holding", flush=True)
    re.fullmatch("(a+)+b", "a" * 45)

def hold_for_a_second():
    sum(LONG)

"""
AGENT = "import subprocess, sys; subprocess.run(sys.argv[1:])"


def rank(folder: Path, body: str, limit: float = 0.4, *before: str, **environment: str) -> subprocess.Popen[str]:
    """Run a script with a guard. before: a program that starts the rank."""
    script = folder / "rank.py"
    script.write_text(RANK.replace("LIMIT", f"{limit:g}") + body)
    env = {**os.environ, "RANK": "3", "PYTHONPATH": str(ROOT), **environment}
    command = [*before, sys.executable, str(script)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_user_code_that_holds_the_lock_ends_its_rank_with_one_line(tmp_path):
    process = rank(tmp_path, "with guard.armed():\n    hold()\n")
    _, error = process.communicate(timeout=TIMEOUT)
    line = next(number for number, text in enumerate(RANK.splitlines(), 1) if "fullmatch" in text)
    assert process.returncode == -signal.SIGKILL
    assert error == (
        "error: rollout.reward_timeout=0.4: no thread of rank 3 could run, because hold (rank.py, line "
        f"{line}) holds Python's interpreter lock; the rank was killed; "
        "--resume auto continues from the last checkpoint\n"
    )


def test_the_line_is_one_of_user_code_and_not_of_a_thread_that_waits_for_it():
    def dump(*frames: str) -> str:
        return "".join(f'  File "{file}", line 5 in {name}\n' for file, _, name in (f.partition(":") for f in frames))

    waiting = dump("/lib/threading.py:wait", "/pkg/rollout/reward_calls.py:wait", "/pkg/trainer.py:train")
    in_a_library = dump("/lib/re.py:fullmatch", "/lib/rewards.py:judge", "/pkg/rollout/reward_calls.py:_run")
    own = dump(
        "/lib/re.py:fullmatch", "/own/own.py:<listcomp>", "/own/own.py:hang", "/pkg/rollout/reward_calls.py:_run"
    )
    places = [
        user_place(dumps, ["/lib/", "/pkg/"], "/pkg/") for dumps in ([waiting, own], [waiting, in_a_library], [waiting])
    ]
    assert places == ["hang (own.py, line 5)", "judge (rewards.py, line 5)", None]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("hold_for_a_second()", id="user code that is not a reward"),
        pytest.param("with guard.armed():\n    pass\nhold_for_a_second()", id="user code after a reward"),
        pytest.param("with guard.armed():\n    time.sleep(1.5)", id="a reward that waits without the lock"),
        pytest.param(
            "with guard.armed():\n"
            "    thread = threading.Thread(target=sum, args=(LONG,))\n"
            "    thread.start(); thread.join()",
            id="library code beside a reward",
        ),
    ],
)
def test_a_rank_is_not_ended_by(tmp_path, body):
    process = rank(tmp_path, f"{body}\nguard.close()\n")
    _, error = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, error) == (0, "")


def test_a_stop_signal_and_the_death_of_torchrun_end_a_rank_whose_code_holds_the_lock(tmp_path):
    stopped = rank(tmp_path, "hold()\n", 3600)
    agent = rank(tmp_path, "hold()\n", 3600, sys.executable, "-c", AGENT, TORCHELASTIC_RUN_ID="x")
    for process in (stopped, agent):
        assert process.stdout.readline() == "holding\n"
    since = time.monotonic()
    agent.kill()
    for _ in range(2):
        stopped.send_signal(signal.SIGTERM)
    errors = [process.communicate(timeout=TIMEOUT)[1] for process in (stopped, agent)]
    assert time.monotonic() - since < SECONDS_TO_END
    for error in errors:
        assert error.startswith("error: a stop was requested, and hold (rank.py, line ")
