"""User code: its line, reports where the main thread waits for it, and the end of a rank that it keeps from running."""

from __future__ import annotations

import faulthandler
import os
import queue
import re
import subprocess
import sys
import threading
from pathlib import Path

from colocated_grpo.rollout.inbox import Inbox
from colocated_grpo.runtime import user_code
from colocated_grpo.runtime.user_code import (
    PACKAGE,
    Line,
    UserCodeWatch,
    foreign,
    innermost,
    line_of_thread,
    lines_in_dump,
    lines_of_error,
)
from colocated_grpo.runtime.verdict import VERDICT_VARIABLE, read_verdicts
from tests.support.paths import ROOT
from tests.support.servers import until

TIMEOUT = 300.0
RANK = """
import re, sys, threading, time
from colocated_grpo.runtime import user_code, verdict
user_code.MIN_SECONDS, user_code.POLL_SECONDS = 0.4, 0.05
watch = user_code.UserCodeWatch(0.4, "rollout.reward_timeout=0.4", print, stacks=verdict.stacks_file())
LONG = range(50_000_000)

def hold():
    re.fullmatch("(a+)+b", "a" * 45)

def hold_for_a_second():
    sum(LONG)

"""


def rank(folder: Path, body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script with a limit."""
    script = folder / "rank.py"
    script.write_text(RANK + body)
    env = {**os.environ, "RANK": "3", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=TIMEOUT)


def test_user_code_that_holds_the_lock_ends_its_rank_with_one_line(tmp_path):
    body = """
def other():
    time.sleep(60)

threading.Thread(target=other, daemon=True).start()
threading.Event().wait(0.1)
with user_code.limited():
    hold()
"""
    ended = rank(tmp_path, body, **{VERDICT_VARIABLE: str(tmp_path)})
    line = next(number for number, text in enumerate(RANK.splitlines(), 1) if "fullmatch" in text)
    assert (ended.returncode, ended.stderr) == (1, "")
    [verdict] = read_verdicts(tmp_path)
    assert verdict.code == 1
    [shown] = verdict.lines
    assert shown.startswith("error: rollout.reward_timeout=0.4: no thread of rank 3 could run, because ")
    assert f"hold (rank.py, line {line})" in shown
    assert shown.endswith(
        "holds Python's interpreter lock; the rank was ended; --resume auto continues from the last checkpoint"
    )


def test_without_a_launcher_the_stacks_are_printed(tmp_path):
    ended = rank(tmp_path, "with user_code.limited():\n    hold()\n")
    assert ended.returncode == 1
    assert ended.stderr.startswith("Timeout (") and "in hold" in ended.stderr


def test_a_rank_is_not_ended_by_user_code_that_is_not_a_reward(tmp_path):
    ended = rank(tmp_path, "hold_for_a_second()\nwatch.close()\n")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_time_limit_begins_anew_while_a_reward_waits_without_the_lock_and_is_cancelled_after_it(monkeypatch):
    timers: list[float | None] = []
    monkeypatch.setattr(user_code, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda seconds, **_: timers.append(seconds))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: timers.append(None))
    watch = UserCodeWatch(60.0, "", print)
    with watch.limited():
        until(lambda: len(timers) > 3)
        assert set(timers) == {60.0}
    until(lambda: timers[-1] is None)
    watch.close()


def test_the_line_is_one_of_user_code_that_the_package_has_called():
    own, library, ours = "/own/own.py", f"{foreign()[2]}/re.py", f"{PACKAGE}/rollout/reward_calls.py"

    def dump(*frames: tuple[str, str]) -> str:
        return "".join(f'  File "{file}", line 5 in {name}\n' for file, name in frames)

    waiting = dump((library, "wait"), (ours, "wait"), (own, "script"))
    working = dump((library, "fullmatch"), (own, "<listcomp>"), (own, "hang"), (ours, "_run"))
    assert [str(line) for line in lines_in_dump(f"{waiting}\n{working}\n{working}")] == ["hang (own.py, line 5)"]


def test_the_line_of_an_error_is_the_innermost_of_user_code():
    try:
        os.fspath(1)
    except TypeError as error:
        lines = lines_of_error(error)
    assert innermost(lines) == lines[0]
    assert lines[0].place.startswith("test_user_code.py, line ")
    assert innermost([Line(PACKAGE + "/x.py", 1, "f")]) is None


def test_user_code_that_does_not_return_is_reported_repeatedly_with_its_line(monkeypatch):
    monkeypatch.setattr(user_code, "FIRST_REPORT_SECONDS", 0.05)
    monkeypatch.setattr(user_code, "POLL_SECONDS", 0.01)
    lines: queue.Queue[str] = queue.Queue()
    watch = UserCodeWatch(60.0, "", lines.put)
    reported: list[str] = []
    until(lambda: reported.append(lines.get(timeout=TIMEOUT)) or len(reported) == 3)
    watch.close()
    for line in reported:
        assert re.fullmatch(r"blocked for \d+ s in .*; the run continues when this code returns", line)


def test_a_wait_of_the_package_itself_is_not_user_code():
    inbox = Inbox()
    thread = threading.Thread(target=inbox.wait, args=(TIMEOUT,), daemon=True)
    thread.start()
    until(lambda: any(frame.f_code is Inbox.wait.__code__ for frame in _frames(thread)))
    assert line_of_thread(thread.ident) is None
    inbox.wake()
    thread.join(TIMEOUT)
    assert line_of_thread(thread.ident) is None


def _frames(thread: threading.Thread) -> list:
    frame, found = sys._current_frames().get(thread.ident), []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found
