"""Other people's games in this process: quiet, with a chance of their own, and not waited for without end."""

from __future__ import annotations

import random
import threading

import pytest

from colocated_grpo.environments.user_code import isolation
from colocated_grpo.environments.user_code.isolation import isolated


def test_a_call_that_never_comes_back_does_not_stop_the_others_for_ever(monkeypatch):
    monkeypatch.setattr(isolation, "PATIENCE", 0.05)
    inside, leave = threading.Event(), threading.Event()

    def hang() -> None:
        with isolated(random.Random(0)):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=hang)
    thread.start()
    assert inside.wait(10)
    with pytest.raises(RuntimeError, match=r"has not come back for 0\.05 s"), isolated(random.Random(0)):
        pass
    leave.set()
    thread.join()
    with isolated(random.Random(0)):
        pass
