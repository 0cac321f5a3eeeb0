"""Commands run on the driving thread between decode steps, and those that do not fit the state are refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from colocated_grpo.rollout.engine import Request, Sampling
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.servers.engine_control import EngineControl
from colocated_grpo.types import Completion
from tests.support.engine_server import StepGate
from tests.support.fakes import FakeEngine
from tests.support.servers import until

TIMEOUT = 10


class Controlled:
    """A fake engine whose steps a test allows, driven by `EngineControl.run` on a thread."""

    def __init__(self) -> None:
        self.steps, self.inbox, self.ended = StepGate(), Inbox(), threading.Event()
        self.engine = FakeEngine(on_step=self.steps)
        self.control = EngineControl(self.engine, self.inbox, Driver(self.engine, self.inbox))
        self.thread = threading.Thread(target=self.control.run, args=(self.ended.is_set,))
        self.thread.start()

    def close(self) -> None:
        self.ended.set()
        self.inbox.wake()
        self.steps.allow(100)
        self.thread.join(timeout=TIMEOUT)
        assert not self.thread.is_alive()


@pytest.fixture
def controlled() -> Iterator[Controlled]:
    controlled = Controlled()
    yield controlled
    controlled.close()


def running_request(controlled: Controlled) -> Future[Completion]:
    """Return the future of a request that the engine has begun."""
    completion = controlled.inbox.put(request())
    until(lambda: controlled.engine.submitted)
    return completion


def request() -> Request:
    return Request(key="one", token_ids=[1, 2], seed=3, sampling=Sampling(temperature=1.0, max_tokens=4))


def test_a_paused_engine_keeps_its_requests_and_goes_on(controlled):
    completion = running_request(controlled)
    paused = controlled.control.pause()
    controlled.steps.allow(1)
    paused.result(TIMEOUT)
    assert controlled.control.is_paused
    assert not completion.done()
    controlled.steps.allow(100)
    controlled.control.resume().result(TIMEOUT)
    assert completion.result(TIMEOUT).token_ids


def test_an_engine_finishes_its_requests_before_it_sleeps_and_wakes_whole(controlled):
    completion = running_request(controlled)
    asleep = controlled.control.sleep()
    controlled.steps.allow(100)
    asleep.result(TIMEOUT)
    assert completion.done()
    controlled.control.sleep().result(TIMEOUT)  # again, without effect
    later = controlled.inbox.put(request())
    controlled.control.wake_up().result(TIMEOUT)
    assert later.result(TIMEOUT).token_ids
    assert controlled.engine.events == ["sleep", "wake weights", "wake kv_cache"]


def test_an_engine_paused_with_running_requests_does_not_sleep(controlled):
    running_request(controlled)
    paused = controlled.control.pause()
    controlled.steps.allow(1)
    paused.result(TIMEOUT)
    with pytest.raises(ValueError, match=r"paused with running requests; POST /bridge/resume first"):
        controlled.control.sleep().result(TIMEOUT)
    assert "sleep" not in controlled.engine.events


def test_a_stopped_server_cancels_what_runs():
    controlled = Controlled()
    completion = running_request(controlled)
    controlled.control.pause()
    controlled.steps.allow(1)
    controlled.close()
    assert completion.cancelled()


def test_weights_without_a_trainer_are_refused_and_requests_go_on(controlled):
    controlled.steps.allow(100)
    refused = controlled.control.receive_weights(lambda: pytest.fail("nothing is received"))
    with pytest.raises(ValueError, match="no trainer has joined"):
        refused.result(TIMEOUT)
    assert controlled.control.has_whole_weights
    assert controlled.inbox.put(request()).result(TIMEOUT).token_ids


def test_requests_wait_after_weights_of_a_lost_trainer_until_a_later_change_succeeds(controlled):
    def lose() -> None:
        raise ValueError("the trainer's connection is lost")

    controlled.steps.allow(100)
    control = controlled.control
    control.join_trainer(lambda: None).result(TIMEOUT)
    with pytest.raises(ValueError, match="lost"):
        control.receive_weights(lose).result(TIMEOUT)
    waiting = controlled.inbox.put(request())
    control.submit(lambda: None).result(TIMEOUT)
    assert not control.has_whole_weights and not waiting.done()
    control.join_trainer(lambda: None).result(TIMEOUT)
    control.receive_weights(lambda: None).result(TIMEOUT)
    assert waiting.result(TIMEOUT).token_ids
