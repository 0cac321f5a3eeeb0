"""Isolation of third-party games: a hanging call fails the next ones after a timeout."""

from __future__ import annotations

import io
import logging
import random
import sys
import threading
from contextlib import closing

import pytest

from colocated_grpo.environments.user_code import isolation
from colocated_grpo.environments.user_code.isolation import OwnLogs, isolated


def test_calls_behind_a_hanging_call_fail_after_a_timeout(monkeypatch):
    monkeypatch.setattr(isolation, "LOCK_TIMEOUT", 0.05)
    inside, leave = threading.Event(), threading.Event()

    def hang() -> None:
        with isolated(random.Random(0)):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=hang)
    thread.start()
    assert inside.wait(10)
    with pytest.raises(RuntimeError, match=r"has not returned for 0\.05 s"), isolated(random.Random(0)):
        pass
    leave.set()
    thread.join()
    with isolated(random.Random(0)):
        pass


def test_only_the_isolated_thread_is_silent(capfd):
    def elsewhere() -> None:
        print("another thread")
        print("its error", file=sys.stderr)

    with isolated(random.Random(0)):
        print("a game")
        print("its error", file=sys.stderr, end="")
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    print("afterwards")
    assert capfd.readouterr() == ("another thread\nafterwards\n", "its error\n")


def test_records_of_an_isolated_block_do_not_reach_the_consoles_handler(tmp_path):
    console, logger = io.StringIO(), logging.getLogger("town.of.somewhere")
    handler = logging.StreamHandler(console)
    logging.getLogger().addHandler(handler)
    try:
        with isolated(random.Random(0)), closing(OwnLogs()) as logs, logs.attached():
            logger.addHandler(logging.FileHandler(tmp_path / "game.log"))
            logger.warning("inside")
            other = threading.Thread(target=logging.getLogger("elsewhere").warning, args=["other thread"])
            other.start()
            other.join()
        logger.warning("after")
    finally:
        logging.getLogger().removeHandler(handler)
    assert console.getvalue() == "other thread\nafter\n"
    assert (tmp_path / "game.log").read_text() == "inside\n"
