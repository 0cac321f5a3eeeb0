"""Requests of a trainer to an engine server: the local engine's completions, whatever happens to the connection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from colocated_grpo.errors import RunError
from colocated_grpo.rollout.engine import Sampling
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.servers import remote
from colocated_grpo.servers.remote import EngineGroup
from colocated_grpo.settings.generation import RepetitionDetectionConfig
from tests.support.engine_server import StepGate
from tests.support.fakes import FakeEngine
from tests.support.servers import until
from tests.support.trainer_server import Trainer, TrainerServer, alone, completed, requests

AT_ONCE = 0.0
"""Seconds after which a server counts as lost. Calls to it then have the client's own limit."""


@pytest.fixture
def server() -> Iterator[TrainerServer]:
    with TrainerServer() as server:
        yield server


@pytest.fixture
def gate() -> StepGate:
    return StepGate()


@pytest.fixture
def gated(gate: StepGate) -> Iterator[TrainerServer]:
    """A server whose engine steps when the test allows it."""
    with TrainerServer(FakeEngine(on_step=gate)) as server:
        yield server
        gate.allow(1000)


def step_until(trainer: Trainer, happened: Any) -> None:
    """Step the trainer's engine, which must not finish requests, until `happened()`."""

    def now() -> bool:
        assert trainer.engine.step() == []
        return bool(happened())

    until(now)


def test_completions_are_those_of_a_local_engine(server):
    sent = requests(500)
    trainer = Trainer(server)
    trainer.engine.submit(sent)
    finished = completed(trainer.engine, len(sent))
    assert len(finished) == len(sent)
    assert dict(finished) == alone(sent)
    assert trainer.engine.step() == []


def test_requests_submitted_together_are_admitted_in_one_step(gated, gate):
    trainer = Trainer(gated)
    trainer.engine.submit(requests(60))
    step_until(trainer, lambda: gated.process.engine.submitted)
    assert len(gated.process.engine.running) == 60
    gate.allow(20)
    assert dict(completed(trainer.engine, 60)) == alone(requests(60))


def test_long_prompts_are_posted_in_several_bodies(server, monkeypatch):
    monkeypatch.setattr(remote, "TOKENS_PER_POST", 5)
    sent = [*requests(3), *requests(1, key="long", token_ids=[1] * 20)]
    trainer = Trainer(server)
    bodies = []
    monkeypatch.setattr(trainer.server, "post", lambda path, body: bodies.append(len(body["requests"])))
    trainer.engine.submit(sent)
    trainer.engine.step()
    assert bodies == [2, 1, 1]


def test_aborted_requests_are_aborted_at_the_server_and_never_returned(gated, gate):
    sent = requests(4)
    trainer = Trainer(gated)
    trainer.engine.submit(sent)
    step_until(trainer, lambda: len(gated.process.engine.running) == 4)
    trainer.engine.submit(requests(1, key="unsent"))
    trainer.engine.abort([sent[0].key, sent[2].key, "unsent", "unknown"])
    gate.allow(20)
    finished = completed(trainer.engine, 2)
    assert dict(finished) == alone([sent[1], sent[3]])
    assert "unsent" not in {request.key for request in gated.process.engine.submitted}
    aborted = [event for event in gated.process.engine.events if event.startswith("abort")]
    assert len(aborted) == 2
    trainer.engine.submit(requests(1))  # a key may be used again
    assert completed(trainer.engine, 1) == [(sent[0].key, alone(sent)[sent[0].key])]
    trainer.engine.submit(sent)
    trainer.engine.close()
    assert trainer.engine.step() == []


@pytest.mark.parametrize("times", [1, 3])
def test_a_lost_connection_loses_and_repeats_no_request(gated, gate, times):
    sent = requests(40)
    trainer = Trainer(gated)
    trainer.engine.submit(sent)
    gate.allow(3)
    finished = completed(trainer.engine, 1)
    for number in range(times):
        gated.disconnect()
        finished += trainer.engine.step()
        gated.listen()
        gate.allow(1 + 5 + 2 * number)  # the step that was under way, and the running requests from their first token
        finished += completed(trainer.engine, 1)
    gate.allow(40)
    finished += completed(trainer.engine, len(sent) - len(finished))
    assert len(finished) == len(sent)
    assert dict(finished) == alone(sent)
    assert trainer.restored == trainer.lost == []


def test_a_restarted_server_gets_the_weights_and_the_requests_again(gated, gate):
    sent = requests(40)
    trainer = Trainer(gated)
    trainer.engine.weights_changed(7)
    trainer.engine.submit(sent)
    gate.allow(3)
    finished = completed(trainer.engine, 1)
    gated.restart(lambda: gate.allow(50))  # for the steps in which the first process ends
    finished += completed(trainer.engine, len(sent) - len(finished))
    assert len(finished) == len(sent)
    assert dict(finished) == alone(sent, policy_version=7)
    assert trainer.restored == [gated.process.instance]
    assert gated.process.engine.events == ["weights changed 7"]


def test_a_restarted_server_without_a_way_to_its_weights_stops_the_run(server):
    trainer = Trainer(server, restore=lambda server: False)
    trainer.engine.submit(requests(2))
    server.restart()
    until(lambda: trainer.engine.step() == [] and trainer.lost)
    for _ in range(3):
        assert trainer.engine.step() == []
    assert trainer.lost == [f"engine.urls={server.url}: it was restarted and has lost the policy's weights"]


def test_calls_between_two_phases_wait_for_a_restarted_server(server):
    trainer = Trainer(server)
    server.restart()
    trainer.engine.weights_changed(2)
    assert server.process.control.policy_version == 2
    assert len(trainer.restored) == 1
    lost = Trainer(server, restore=lambda server: False)
    server.restart()
    with pytest.raises(RunError, match=r"^engine.urls=http://\S+: it was restarted and has lost the policy's weights$"):
        lost.engine.weights_changed(2)


def test_requests_wait_while_the_server_has_other_weights(server):
    trainer = Trainer(server)
    other = Trainer(server)
    other.engine.weights_changed(5)
    trainer.engine.submit(requests(3))
    posts = counted_posts(trainer)
    step_until(trainer, lambda: len(posts) > 2)
    assert server.process.engine.submitted == []
    trainer.engine.weights_changed(1)
    assert dict(completed(trainer.engine, 3)) == alone(requests(3))
    assert trainer.lost == []


def counted_posts(trainer: Trainer) -> list[str]:
    posts: list[str] = []
    post = trainer.server.post

    def counted(path: str, body: Any = None) -> Any:
        posts.append(path)
        return post(path, body)

    trainer.server.post = counted  # pyrefly: ignore[bad-assignment]
    return posts


@pytest.mark.parametrize("away", ["silent", "other weights"])
def test_a_server_that_takes_no_requests_stops_the_run_once(server, away):
    trainer = Trainer(server, timeout=AT_ONCE)
    trainer.engine.submit(requests(2))
    if away == "silent":
        server.disconnect()
    else:
        Trainer(server).engine.weights_changed(5)
    step_until(trainer, lambda: trainer.lost)
    for _ in range(3):
        assert trainer.engine.step() == []
    [line] = trainer.lost
    reason = "Connection refused" if away == "silent" else "the weights have version 5, not 1"
    assert line.startswith(f"engine.urls={server.url}: no requests accepted for engine.server_timeout=0 s (")
    assert reason in line
    assert "\n" not in line
    trainer.engine.abort()
    if away == "silent":
        with pytest.raises(RunError, match=r"no answer within engine.server_timeout=0 s .*Connection refused"):
            trainer.engine.weights_changed(2)
        server.listen()


def test_a_prompt_that_is_too_long_is_the_callers_error(server):
    trainer = Trainer(server)
    with pytest.raises(ValueError, match="a prompt of 24 tokens: at most 23"):
        trainer.engine.submit(requests(1, token_ids=[1] * 24))
    assert trainer.engine.step() == []


def test_a_request_that_the_engine_rejects_ends_the_run(server, monkeypatch):
    trainer = Trainer(server)

    def reject(requests: Any) -> None:
        raise ValueError("top_k must be positive")

    monkeypatch.setattr(server.process.engine, "submit", reject)
    trainer.engine.submit(requests(1))
    with pytest.raises(RunError, match=rf"^engine.urls={server.url}: rejects a request: top_k must be positive$"):
        completed(trainer.engine, 1)


def test_probabilities_of_a_prompt_are_the_engines(server):
    trainer = Trainer(server)
    assert trainer.engine.top_logprobs([1, 2, 3], 1) == FakeEngine().top_logprobs([1, 2, 3], 1)
    with pytest.raises(ValueError, match="token 10 is not in the vocabulary of 10"):
        trainer.engine.top_logprobs([1, 10], 1)


def test_a_server_with_a_key_takes_calls_with_it_and_rejects_others_at_once():
    with TrainerServer(api_key="secret") as server:
        trainer = Trainer(server, api_key="secret")
        trainer.engine.submit(requests(3))
        assert dict(completed(trainer.engine, 3)) == alone(requests(3))
        with pytest.raises(
            RunError, match=r"401 this server requires its API key; name the variable .*api_key_variable"
        ):
            Trainer(server, api_key="wrong")


def test_several_servers_are_one_engine_with_equal_shares():
    gates = [StepGate() for _ in range(3)]
    servers = [TrainerServer(FakeEngine(on_step=gate)) for gate in gates]
    trainers = [Trainer(server) for server in servers]
    group = EngineGroup([trainer.engine for trainer in trainers])
    assert group.max_num_seqs == 3 * 64
    sent = requests(30)
    group.submit(sent)
    until(lambda: group.step() == [] and all(len(server.process.engine.running) == 10 for server in servers))
    for gate in gates[:2]:
        gate.allow(20)
    finished = completed(group, 20)
    more = requests(9, key=None)
    more = [type(r)(key=("more", n), token_ids=r.token_ids, seed=n, sampling=r.sampling) for n, r in enumerate(more)]
    group.submit(more)  # to the two idle ones
    gates[0].allow(20), gates[1].allow(20)
    finished += completed(group, 9)
    assert len(servers[2].process.engine.submitted) == 10
    group.abort([sent[2].key])
    gates[2].allow(20)
    finished += completed(group, 9)
    expected = alone([*sent, *more])
    del expected[sent[2].key]
    assert dict(finished) == expected
    for gate, server in zip(gates, servers, strict=True):
        gate.allow(1000)
        server.__exit__()


def test_a_driver_serves_inbox_and_batch_from_a_server(server):
    inbox = Inbox()
    driver = Driver(Trainer(server).engine, inbox)
    outside, *batch = requests(9)
    future = inbox.put(outside)
    driver.submit(batch)
    finished = completed(driver, 8)  # pyrefly: ignore[bad-argument-type]
    until(lambda: driver.step() == [] and future.done())
    assert dict([*finished, (outside.key, future.result())]) == alone([outside, *batch])


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"token_ids": "abc"}, "requests.0.token_ids: Input should be a valid list"),
        ({"token_ids": []}, "requests.0.token_ids: List should have at least 1 item"),
        ({"token_ids": [10]}, "token 10 is not in the vocabulary of 10"),
        ({"token_ids": [1] * 24}, "the prompt has 24 tokens"),
        ({"id": [1]}, "requests.0.id: Input should be a valid integer"),
        ({"seed": None}, "requests.0.seed: Input should be a valid integer"),
        ({"seed": 1 << 64}, "requests.0.seed: "),
        ({"sampling": {"temperature": "hot", "max_tokens": 3}}, "requests.0.sampling.temperature: "),
        ({"sampling": {"temperature": 1e300, "max_tokens": 3}}, "requests.0.sampling.temperature: "),
        ({"sampling": {"temperature": 1.0, "max_tokens": 10**30}}, "requests.0.sampling.max_tokens: "),
        ({"sampling": {"temperature": 1.0, "max_tokens": 3, "top_k": 1 << 40}}, "requests.0.sampling.top_k: "),
        (
            {"sampling": {"temperature": 1.0, "max_tokens": 3, "stop_token_ids": [10]}},
            "stop_token_ids: token 10 is not",
        ),
        ({"pattern": "a" * 1_000_000}, "requests.0.pattern: String should have at most 16384 characters"),
        ({"surprise": 1}, "requests.0: surprise: this key is not supported"),
    ],
)
def test_a_malformed_request_is_rejected_and_the_engine_goes_on(server, change, line):
    trainer = Trainer(server)
    trainer.engine.submit(requests(1))
    completed(trainer.engine, 1)
    message = {"id": 5, "token_ids": [1], "seed": 1, "pattern": None}
    message |= {"sampling": {"temperature": 1.0, "max_tokens": 3}} | change
    body = {"client": trainer.server.client, "policy_version": 1, "requests": [message]}
    with pytest.raises(remote.RequestRejected) as rejected:
        trainer.server.post("/engine/requests", body)
    assert rejected.value.status == 400
    assert line in str(rejected.value)
    trainer.engine.submit(requests(3))
    assert dict(completed(trainer.engine, 3)) == alone(requests(3))


def test_sampling_settings_arrive_as_sent(server):
    limits = RepetitionDetectionConfig(max_pattern_size=5, min_count=3)
    sampling = Sampling(
        temperature=0.5,
        max_tokens=3,
        top_p=0.9,
        top_k=4,
        min_p=0.1,
        stop=("a",),
        stop_token_ids=(3,),
        repetition_penalty=1.2,
        repetition_detection=limits,
    )
    [request] = requests(1, sampling=sampling, pattern="[0-9]+")
    trainer = Trainer(server)
    trainer.engine.submit([request])
    completed(trainer.engine, 1)
    [received] = server.process.engine.submitted
    assert type(received)(**{**{n: getattr(received, n) for n in received.__slots__}, "key": request.key}) == request


def test_the_server_notes_trainers_that_come_and_go(server):
    trainer = Trainer(server)
    trainer.engine.submit(requests(1))
    completed(trainer.engine, 1)
    name = trainer.server.client[:8]
    server.disconnect()
    assert server.notes == [
        f"trainer {name} has connected",
        f"trainer {name} has disconnected; another may connect",
    ]
    server.listen()
