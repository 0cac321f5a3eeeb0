"""Requests from arrival to end: sleeping engines, disconnects, errors after the first chunk, shutdown."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import resource
import threading
import time
from collections.abc import AsyncGenerator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from colocated_grpo.rollout.engine import Request
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.runtime.program import DESCRIPTORS
from colocated_grpo.servers.rank_links import LoadBalancer, ServerClosing
from colocated_grpo.servers.request_bodies import SamplingParameters
from colocated_grpo.servers.responses import ClosingStream, as_json_lines, generate_chunks
from colocated_grpo.servers.sampler import CompletionPart, Sampler
from colocated_grpo.servers.text import TextCodec
from colocated_grpo.types import Completion
from colocated_grpo.web.server import ServerThread
from tests.support.engine_server import (
    CHAT,
    GENERATE,
    JSON_TYPE,
    LIMITS,
    MAX_TOKENS,
    TIMEOUT,
    EngineServer,
    LetterTokenizer,
    StepGate,
)
from tests.support.fakes import VOCABULARY, FakeEngine
from tests.support.servers import until

CLOSING = "the server is shutting down"
FOREVER = 10**9
"""Decode steps."""


def test_requests_wait_while_the_engine_sleeps_and_health_stays_200(server):
    server.fall_asleep()
    responses: list[Any] = []
    thread = threading.Thread(target=lambda: responses.append(server.call("POST", "/generate", GENERATE)))
    thread.start()
    until(lambda: server.inboxes[0])
    assert server.call("GET", "/health") == (200, {"status": "serving"})
    assert responses == []
    server.awake.set()
    thread.join(TIMEOUT)
    assert responses[0][0] == 200


def test_requests_are_spread_evenly_over_the_engines():
    server = EngineServer(engines=3)
    server.fall_asleep()
    body = {**GENERATE, "n": 2}
    threads = [threading.Thread(target=server.call, args=("POST", "/generate", body)) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: sum(len(inbox._requests) for inbox in server.inboxes) == 6)
    assert [len(inbox._requests) for inbox in server.inboxes] == [2, 2, 2]
    server.awake.set()
    for thread in threads:
        thread.join(TIMEOUT)
    server.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_aborts_the_requests_in_the_engine(server, stream):
    server.engines[0]._decode_steps = lambda request: FOREVER
    connection = server.connect()
    connection.request("POST", "/generate", json.dumps({**GENERATE, "stream": stream}), JSON_TYPE)
    until(lambda: len(server.engines[0].running) == 3)
    connection.close()
    until(lambda: not server.engines[0].running)
    assert all(event.startswith("abort") for event in server.engines[0].events)


def test_a_disconnect_within_a_stream_aborts_the_requests_in_the_engine(server, caplog):
    server.engines[0]._on_step = gate = StepGate()
    connection = server.connect()
    connection.request("POST", "/v1/chat/completions", json.dumps({**CHAT, "n": 2, "stream": True}), JSON_TYPE)
    gate.allow(1)
    response = connection.getresponse()
    response.readline()
    assert len(server.engines[0].running) == 2
    response.close()
    connection.close()
    until(lambda: len(server.inboxes[0]._cancelled) == 2)
    gate.allow(10)
    until(lambda: not server.engines[0].running)
    gc.collect()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


LONG = 1500
"""Tokens of each of MANY completions."""
MANY = 64
HEALTH_SECONDS = 15.0


def long_completion(request: Request, policy_version: int) -> Completion:
    return Completion(
        token_ids=[1] * LONG, sampling_logprobs=[-1.0] * LONG, finish_reason="length", policy_version=policy_version
    )


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_stream_that_is_not_read_delays_nobody(path):
    """Before, the server wrote a connection that was closed unread for 76 s, and answered nothing else meanwhile."""
    server = EngineServer(limits=replace(LIMITS, max_tokens=2 * LONG))
    server.engines[0]._complete = long_completion
    body = {"prompt": [1, 2, 3], "n": MANY, "max_tokens": LONG, "stream": True}
    with closing(server.connect()) as connection:
        connection.request("POST", path, json.dumps(body), JSON_TYPE)
        until(lambda: server.requests())
        until(lambda: not server.engines[0].running)
    start = time.monotonic()
    assert server.call("GET", "/health")[0] == 200
    assert time.monotonic() - start < HEALTH_SECONDS
    server.close()


def test_tokens_that_a_client_has_not_taken_are_one_part():
    inbox, gate = Inbox(), StepGate()
    engine = FakeEngine(on_step=gate, complete=long_completion)
    codec = TextCodec(LetterTokenizer(), replace(LIMITS, max_tokens=2 * LONG), {})
    sampler = Sampler(LoadBalancer(inbox), codec, lambda line: None)
    driver = Driver(engine, inbox)

    async def stream() -> list[int]:
        parts = sampler.stream([[1, 2]], SamplingParameters(max_tokens=LONG, n=2))
        first = asyncio.ensure_future(anext(parts))
        gate.allow(LONG)
        await asyncio.to_thread(until, lambda: inbox)
        await asyncio.to_thread(driver.step)
        sizes = [len((await first).token_ids)]
        await asyncio.to_thread(driver.drain)
        return [*sizes, *[len(part.token_ids) async for part in parts]]

    sizes = asyncio.run(stream())
    assert sum(sizes) == 2 * LONG
    assert len(sizes) <= 4


def test_a_stream_that_cannot_be_sent_closes_its_source():
    closed: list[bool] = []

    async def source() -> AsyncGenerator[CompletionPart]:
        try:
            while True:
                yield CompletionPart(index=0, text="a", token_ids=[1], logprobs=[-1.0])
        finally:
            closed.append(True)

    async def send(message: dict[str, Any]) -> None:
        if message.get("body"):
            raise OSError("the client has disconnected")

    async def respond() -> list[bool]:
        deltas = source()
        body = ClosingStream(as_json_lines(generate_chunks(deltas)), deltas.aclose, "text/plain")
        with pytest.raises(ClientDisconnect):
            await body({"type": "http", "asgi": {"spec_version": "2.4"}}, None, send)
        return list(closed)

    assert asyncio.run(respond()) == [True]


def test_an_error_before_the_first_chunk_sets_the_status(server):
    assert "24 tokens" in server.rejected("/generate", {"prompt": "a" * MAX_TOKENS, "stream": True})
    server.ended.set()
    until(lambda: not any(thread.is_alive() for thread in server.threads))
    cancelled: Future = Future()
    cancelled.cancel()
    server.inboxes[0].put = lambda request, on_delta: cancelled
    assert server.rejected("/v1/chat/completions", {**CHAT, "stream": True}, 503) == CLOSING


def test_a_chunk_is_sent_before_the_next_step_and_a_shutdown_is_an_event(server):
    server.engines[0]._on_step = gate = StepGate()
    connection = server.connect()
    connection.request("POST", "/v1/chat/completions", json.dumps({**CHAT, "stream": True}), JSON_TYPE)
    gate.allow(1)
    response = connection.getresponse()
    assert json.loads(response.readline()[6:])["choices"][0]["delta"]["content"] != ""
    server.ended.set()
    gate.allow(1)
    rest = response.read().decode()
    assert f'"message": "{CLOSING}"' in rest and rest.endswith("data: [DONE]\n\n")
    connection.close()


def test_a_shutdown_while_top_logprobs_are_computed_ends_the_stream():
    """Without an end the client would wait until the server closes the connection."""
    inbox, scored = Inbox(), [Future() for _ in range(2)]
    engines = LoadBalancer(inbox)
    engines.top_logprobs = lambda tokens, k: scored.pop()
    sampler = Sampler(engines, TextCodec(LetterTokenizer(), LIMITS, {}), lambda line: None)
    cancelled, done = scored
    done.set_result([dict.fromkeys(range(VOCABULARY), -1.0)] * MAX_TOKENS)

    async def stream() -> list[Any]:
        deltas = sampler.stream([[1, 2]], SamplingParameters(max_tokens=5, n=2), 2)
        first = await anext(deltas)
        cancelled.cancel()
        with pytest.raises(ServerClosing):
            await anext(deltas)
        return first.top_logprobs

    driver = Driver(FakeEngine(), inbox)
    with ThreadPoolExecutor(1) as pool:
        top_logprobs = pool.submit(asyncio.run, stream())
        until(lambda: inbox)
        driver.step()
        driver.drain()
        assert top_logprobs.result(TIMEOUT)


def test_a_shutdown_is_an_error_for_pending_requests(server):
    server.engines[0]._decode_steps = lambda request: FOREVER
    responses: list[Any] = []
    thread = threading.Thread(target=lambda: responses.append(server.call("POST", "/generate", GENERATE)))
    thread.start()
    until(lambda: len(server.engines[0].running) == 3)
    server.ended.set()
    thread.join(TIMEOUT)
    assert responses == [(503, {"error": {"message": CLOSING, "type": "server_error", "code": 503}})]


def test_one_invalid_prompt_rejects_the_request_before_any_is_sampled(server):
    submitted: list[Any] = []
    server.inboxes[0].put = lambda request, on_delta: submitted.append(request) or Future()
    server.rejected("/v1/completions", {"prompt": [[1, 2], [VOCABULARY]]})
    assert submitted == []


@pytest.mark.parametrize("stream", [False, True])
def test_one_failed_completion_aborts_the_others(server, stream):
    failed, others = Future(), [Future(), Future()]
    futures = iter([*others, failed])
    server.inboxes[0].put = lambda request, on_delta: next(futures)
    failed.set_exception(ValueError("the engine rejects it"))
    body = {"prompt": ["ab", "cd", "ef"], "stream": stream}
    assert server.rejected("/v1/completions", body) == "the engine rejects it"
    until(lambda: all(future.cancelled() for future in others))


def test_every_port_serves_the_same_application(server):
    assert [server.call("GET", "/v1/models", port=port)[0] for port in (0, 1)] == [200, 200]


def test_a_port_in_use_is_named(server):
    with pytest.raises(OSError, match=rf"127.0.0.1:{server.server.ports[0]}"):
        ServerThread(SimpleNamespace(), "127.0.0.1", [server.server.ports[0]])


def test_a_server_raises_the_limit_of_open_files():
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, soft), hard))
    try:
        ServerThread(SimpleNamespace(), "127.0.0.1", [0]).close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, DESCRIPTORS), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
