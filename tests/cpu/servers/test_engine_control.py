"""Commands run between decode steps, those that do not fit the state are refused, and so are those of strangers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from colocated_grpo.errors import RunError
from colocated_grpo.rollout.engine import Request, Sampling
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.servers import engine_servers
from colocated_grpo.servers.engine_control import EngineControl
from colocated_grpo.types import Completion
from colocated_grpo.web.client import JsonClient, RequestRejected, Unavailable
from tests.support.engine_server import StepGate
from tests.support.fakes import FakeEngine
from tests.support.servers import until
from tests.support.trainer_server import Trainer, TrainerServer, alone, completed, requests
from tests.support.training_runs import tiny_model

TIMEOUT, SHORT = 120.0, 0.3


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


def test_an_engine_paused_with_running_requests_does_not_change_its_weights(controlled):
    running_request(controlled)
    paused = controlled.control.pause()
    controlled.steps.allow(1)
    paused.result(TIMEOUT)
    with pytest.raises(ValueError, match=r"paused with running requests; POST /bridge/resume first"):
        controlled.control.change_weights(lambda: pytest.fail("nothing is changed")).result(TIMEOUT)
    assert controlled.engine.events == []


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
    control.change_weights(lambda: None).result(TIMEOUT)
    assert not control.has_whole_weights and not waiting.done()
    control.join_trainer(lambda: None).result(TIMEOUT)
    control.receive_weights(lambda: None).result(TIMEOUT)
    assert waiting.result(TIMEOUT).token_ids


STRANGER = "stranger-stranger"
COMMANDS = {
    **{path: {} for path in ("/bridge/pause", "/bridge/resume", "/lora/unload")},
    "/bridge/restart": {"model": str(tiny_model())},
    "/lora/load": {"adapter_path": "nowhere"},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "nowhere"},
}
TRAINERS_ROUTES = {
    "/bridge/init": {},
    "/bridge/update": {},
    "/engine/requests": {"client": STRANGER, "policy_version": 1, "requests": []},
    "/engine/abort": {"client": STRANGER, "ids": None},
    "/engine/version": {"policy_version": 5},
    "/engine/top_logprobs": {"token_ids": [1, 2], "k": 1},
}


class Complete(TrainerServer):
    """A server with all routes, whose weights no request may change."""

    def call(self, name: str, *arguments: object) -> object:
        pytest.fail(f"runs {name}{arguments}")


def status_of(server: TrainerServer, path: str, body: Any) -> int | None:
    """Post as a client that is no trainer. Returns None for a success."""
    try:
        JsonClient(server.url, timeout=TIMEOUT).post(path, body)
    except RequestRejected as error:
        return error.status
    return None


@pytest.mark.parametrize("path", [*COMMANDS, *TRAINERS_ROUTES])
def test_the_attached_trainer_alone_controls_the_engine(path):
    """Before, one /bridge/pause or /bridge/update of a stranger kept a run waiting without a line in any log."""
    with Complete() as server:
        trainer = Trainer(server)
        assert status_of(server, path, {**COMMANDS, **TRAINERS_ROUTES}[path]) == 403
        trainer.engine.submit(requests(3))
        assert dict(completed(trainer.engine, 3)) == alone(requests(3))
        assert server.process.control.state == "serving"


@pytest.mark.parametrize("path", TRAINERS_ROUTES)
def test_the_routes_of_a_trainer_need_its_stream(path):
    with Complete() as server:
        assert status_of(server, path, TRAINERS_ROUTES[path]) == 409
        assert server.process.control.policy_version is None


@pytest.fixture
def attachable() -> Iterator[TrainerServer]:
    with TrainerServer() as server:
        yield server


def test_a_stream_without_a_secret_attaches_no_trainer(attachable):
    client = JsonClient(attachable.url, timeout=TIMEOUT)
    with pytest.raises(RequestRejected, match="409 X-Trainer: missing"):
        client.get("/engine/stream?client=0123456789abcdef")
    assert status_of(attachable, "/engine/version", {"policy_version": 5}) == 409


def test_a_second_trainer_is_refused_until_the_first_has_ended(attachable, monkeypatch):
    first = Trainer(attachable)
    with (
        monkeypatch.context() as patch,
        pytest.raises(
            RunError, match=rf"^engine.urls={attachable.url}: 409 another trainer is attached to this server"
        ),
    ):
        patch.setattr(engine_servers, "BUSY_SECONDS", SHORT)
        Trainer(attachable, trainer="another")
    first.engine.close()
    second = Trainer(attachable, trainer="another")
    second.engine.submit(requests(3))
    assert dict(completed(second.engine, 3)) == alone(requests(3))


def test_a_trainer_finds_an_engine_that_runs_whatever_was_done_before(attachable):
    assert status_of(attachable, "/bridge/pause", {}) is None
    assert JsonClient(attachable.url, timeout=TIMEOUT).get("/health") == {"status": "paused"}
    trainer = Trainer(attachable)
    trainer.engine.submit(requests(3))
    assert dict(completed(trainer.engine, 3)) == alone(requests(3))


def test_a_server_without_whole_weights_is_unhealthy_until_it_has_received_some(attachable):
    def fail() -> None:
        raise ValueError("the trainer's connection is lost")

    control, client = attachable.process.control, JsonClient(attachable.url, timeout=TIMEOUT)
    control.join_trainer(lambda: None).result(TIMEOUT)
    assert control.receive_weights(fail).exception(TIMEOUT)
    with pytest.raises(Unavailable, match="503"):
        client.get("/health")
    control.join_trainer(lambda: None).result(TIMEOUT)
    control.receive_weights(lambda: None).result(TIMEOUT)
    assert client.get("/health") == {"status": "serving"}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"timeout": 1e300}, "timeout: "),
        ({"first_rank": 2}, "first_rank: must be below group_size=2"),
        ({"shapes": {"w": [1 << 39, 1 << 39]}}, "shapes: more than "),
        ({"shapes": {"w": [10**30]}}, "shapes.w.0: "),
        ({"address": "a" * 1000}, "address: "),
    ],
)
def test_an_offer_out_of_bounds_does_not_reach_the_engine(change, line):
    offer = {"address": "127.0.0.1", "port": 1, "first_rank": 1, "group_size": 2, "timeout": 1.0, "trainer_ranks": 1}
    with Complete() as server, pytest.raises(RequestRejected) as rejected:
        Trainer(server).server.post("/bridge/init", {**offer, "prefix": "model", "shapes": {"w": [1]}, **change})
    assert (rejected.value.status, line in str(rejected.value)) == (400, True)
