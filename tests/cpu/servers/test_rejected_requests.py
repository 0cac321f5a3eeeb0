"""Invalid and hostile requests: each gets an error response and none makes the server fail."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket
import threading
import zlib
from collections.abc import Iterable
from http.client import HTTPConnection
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import Response
from starlette.types import ASGIApp

from colocated_grpo.servers.app import with_limits
from colocated_grpo.servers.request_bodies import (
    SAMPLED,
    ChatBody,
    CompletionBody,
    GenerateBody,
    SamplingParameters,
    TokensBody,
)
from colocated_grpo.web.bodies import BUFFERED_BODIES
from tests.support.engine_server import GENERATE, JSON_TYPE, MAX_BODY_BYTES, MAX_TOKENS, MODEL, EngineServer
from tests.support.fakes import VOCABULARY
from tests.support.servers import until


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nonsense": 1}, "nonsense: this key is not supported"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": {"prompt_token_ids": [VOCABULARY]}}, "token 10 is not in the vocabulary of 10"),
        ({"prompt": {"prompt_token_ids": [-1]}}, "greater than or equal to 0"),
        ({"prompt": {"prompt_token_ids": [1] * MAX_TOKENS}}, "the prompt has 24 tokens"),
        ({"prompt": "a" * 48}, "the prompt has 48 tokens"),
        (
            {"prompt": "a" * 49},
            "49 characters cannot fit into 24 tokens, the maximum context length (rollout.max_prompt_tokens",
        ),
        ({"stop_token_ids": [1, VOCABULARY]}, "stop_token_ids: token 10 is not in the vocabulary of 10"),
        ({"n": 0}, "n: Input should be greater than or equal to 1"),
        ({"temperature": -1}, "temperature"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"stop": [""]}, "stop strings"),
        ({"stop": 5}, "stop: "),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_an_invalid_request_gets_a_message_of_one_line(module_server, changes, message):
    assert message in module_server.rejected("/generate", {**GENERATE, **changes})


def test_a_body_that_is_no_object_is_named(module_server):
    assert "the body must be a JSON object" in module_server.rejected("/v1/chat/completions", [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text content is supported"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "the chat template rejects these messages: roles are"),
        ({"messages": [{"role": "user", "content": "a" * 60}]}, "characters cannot fit into 24 tokens"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "cannot be set"),
        ({"logit_bias": {"5": 10}}, "logit_bias"),
    ],
)
def test_an_invalid_chat_gets_a_message_of_one_line(module_server, changes, message):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "abc"}], **changes}
    assert message in module_server.rejected("/v1/chat/completions", body)


def test_a_body_above_the_limit_is_rejected(module_server):
    assert module_server.call("POST", "/generate", {"prompt": "a" * MAX_BODY_BYTES})[0] == 413


def test_unknown_paths_and_methods_are_rejected(module_server):
    assert module_server.call("GET", "/nowhere")[0] == 404
    connection = module_server.connect()
    connection.request("GET", "/generate")
    response = connection.getresponse()
    assert (response.status, response.headers["Allow"]) == (405, "POST")
    connection.close()


def test_requests_without_the_api_key_are_rejected():
    server = EngineServer(api_key="secret-\u00e9")
    as_sent = "secret-\u00e9".encode().decode("latin-1")
    for wrong in ({}, {"Authorization": "Bearer secret"}, {"Authorization": as_sent}):
        assert server.call("POST", "/generate", GENERATE, **wrong)[0] == 401
    assert server.call("GET", "/health")[0] == 200
    assert server.call("POST", "/generate", GENERATE, Authorization=f"Bearer {as_sent}")[0] == 200
    assert len(server.requests()) == 3
    server.close()


def test_unfinished_bodies_keep_no_request_out_and_the_oldest_gives_way(monkeypatch):
    """Before, each counted as a request for a minute: 4,100 of them answered everybody else with 503."""
    monkeypatch.setattr("colocated_grpo.web.bodies.MAX_ARRIVING", 3)
    server = EngineServer(max_requests=1)
    unfinished = []
    for _ in range(3):
        connection = server.connect()
        connection.putrequest("POST", "/generate")
        connection.putheader("Content-Length", "100")
        connection.endheaders(b"{")
        unfinished.append(connection)
    assert server.call("GET", "/v1/models")[0] == 200
    assert server.call("POST", "/generate", GENERATE)[0] == 200
    assert unfinished[0].getresponse().status == 408
    for connection in unfinished:
        connection.close()
    server.close()


def test_an_unfinished_body_ends_after_its_time(monkeypatch):
    monkeypatch.setattr("colocated_grpo.web.bodies.BODY_SECONDS", 0.05)
    server = EngineServer()
    connection = server.connect()
    connection.putrequest("POST", "/generate")
    connection.putheader("Content-Length", "100")
    connection.endheaders(b"{")
    assert connection.getresponse().status == 408
    connection.close()
    server.close()


def test_a_request_that_states_its_length_twice_is_rejected_and_its_connection_closed(module_server):
    """h11 takes the chunks and ignores the length: a proxy that takes the length passes on a second request."""
    body = json.dumps(GENERATE).encode()
    head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    both = f"{head}Content-Length: {len(body) + 20}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", module_server.server.ports[0]), timeout=10) as connection:
        connection.sendall(both + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) + b"GET /health HTTP/1.1\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert answer.count(b"HTTP/1.1 ") == answer.count(b"HTTP/1.1 400 ") == 1


def test_large_bodies_that_stall_make_room_for_others(monkeypatch):
    monkeypatch.setattr("colocated_grpo.web.bodies.GRACE_SECONDS", 0.0)
    size = 1 << 20
    server = EngineServer(max_body_bytes=size)
    stalled = []
    for _ in range(BUFFERED_BODIES):
        connection = HTTPConnection("127.0.0.1", server.server.ports[0], timeout=10)
        connection.putrequest("POST", "/generate")
        connection.putheader("Content-Length", str(size))
        connection.endheaders(b" " * (size - 1))
        stalled.append(connection)
    for _ in range(3):
        body = json.dumps(GENERATE).encode()
        assert server.call("POST", "/generate", b" " * (size - len(body)) + body)[0] == 200
    assert stalled[0].getresponse().status == 408
    for connection in stalled:
        connection.close()
    server.close()


def test_the_memory_of_a_body_that_makes_room_for_itself_is_free_once(monkeypatch):
    """Before, it was counted twice, so later bodies could fill more than the reserved memory."""
    monkeypatch.setattr("colocated_grpo.web.bodies.GRACE_SECONDS", 0.0)
    size, part = 1 << 20, 1 << 18
    arrived: list[object] = []

    async def post(limit: ASGIApp, *lengths: int) -> int:
        messages = [{"type": "http.request", "body": b" " * length, "more_body": True} for length in lengths]
        messages[-1]["more_body"] = False
        statuses = []

        async def receive() -> dict[str, object]:
            return messages.pop(0)

        async def send(message: dict[str, Any]) -> None:
            statuses.append(message.get("status"))

        await limit({"type": "http", "path": "/", "headers": []}, receive, send)
        return statuses[0]

    async def statuses() -> list[int]:
        served = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            arrived.append(scope)
            await served.wait()
            await Response()(scope, receive, send)

        limit = with_limits(app, 16, {"/"}, size)
        found = []
        for others, last in ([(size,)] * 3 + [(size - part,)], (part, 1)), ([(size,)] * 4, (part,)):
            served.clear()
            arrived.clear()
            held = [asyncio.ensure_future(post(limit, *lengths)) for lengths in others]
            while len(arrived) < BUFFERED_BODIES:
                await asyncio.sleep(0)
            probe = asyncio.ensure_future(post(limit, *last))
            while not probe.done() and len(arrived) == BUFFERED_BODIES:
                await asyncio.sleep(0)
            served.set()
            found += [await probe, *set(await asyncio.gather(*held))]
        return found

    assert asyncio.run(statuses()) == [503, 200, 503, 200]


def test_requests_above_the_concurrency_limit_are_rejected():
    server = EngineServer(max_requests=1)
    server.fall_asleep()
    thread = threading.Thread(target=server.call, args=("POST", "/generate", GENERATE))
    thread.start()
    until(lambda: server.inboxes[0])
    connection = server.connect()
    connection.request("POST", "/generate", json.dumps(GENERATE), JSON_TYPE)
    response = connection.getresponse()
    assert (response.status, response.headers["Retry-After"]) == (503, "1")
    connection.close()
    assert server.call("GET", "/health")[0] == 200
    server.awake.set()
    thread.join(10)
    server.close()


ODD = [
    10**400,
    -(10**30),
    2**63,
    1e308,
    float("nan"),
    float("inf"),
    "\ud800",
    "\0",
    "\U0001f600",
    [[[[[]]]]],
    {"": {"": {}}},
]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(ODD)
    | st.integers(-1, 5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
VALID = {
    "/generate": (GENERATE, GenerateBody),
    "/v1/completions": ({"prompt": "abc"}, CompletionBody),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "a"}]}, ChatBody),
    "/inference/v1/generate": ({"token_ids": [1]}, TokensBody),
}
"""For each route a valid body and its model."""
NESTED = {
    "sampling_params": SamplingParameters.model_fields,
    "stream_options": ("include_usage",),
    "prompt": ("prompt", "prompt_token_ids"),
    "messages": ("role", "content", "tool_calls"),
}


def fields_of(names: Iterable[str]) -> st.SearchStrategy:
    return st.dictionaries(st.sampled_from(sorted(names)), JSON, max_size=3)


@st.composite
def mutated_bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Return a route, and a valid body in which some fields, or fields within fields, are any JSON."""
    path = draw(st.sampled_from(sorted(VALID)))
    valid, model = VALID[path]
    body = {
        **valid,
        **draw(fields_of(SAMPLED.union(model.model_fields))),
        **draw(st.dictionaries(st.text(max_size=4), JSON, max_size=1)),
    }
    name = draw(st.sampled_from(["", *NESTED]))
    if name in model.model_fields:
        inner = draw(fields_of(NESTED[name]))
        body[name] = draw(st.sampled_from([inner, [inner], [{"role": "user", "content": "a", **inner}]]))
    return path, body


def test_no_json_body_makes_the_server_fail(module_server, caplog):
    @given(mutated_bodies())
    @settings(max_examples=400)
    def try_one(one: tuple[str, dict[str, Any]]) -> None:
        status, response = module_server.call("POST", *one)
        assert status in (200, 400), response
        if status == 400:
            message = response["error"]["message"]
            assert "\n" not in message.split("template rejects")[0]
            assert "Traceback" not in message

    try_one()
    module_server.post("/generate", GENERATE)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@given(path=st.sampled_from(sorted(VALID)), raw=st.binary(max_size=60))
@settings(max_examples=100)
def test_no_bytes_make_the_server_fail(module_server, path, raw):
    assert module_server.call("POST", path, raw)[0] == 400


def nested(depth: int) -> bytes:
    return (
        b'{"prompt": "a", "messages": [{"role": "user", "content": "a", "x": '
        + b'{"a":' * depth
        + b"1"
        + b"}" * depth
        + b"}]}"
    )


GZIP = {"Content-Encoding": "gzip"}
PROMPT = b'{"prompt": "a", "max_tokens": 2}'


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/v1/completions", b'{"prompt": "a", "model": "\\ud800"}', {}, 400),
        ("/v1/completions", b'{"prompt": "a", "model": "\xed\xa0\x80"}', {}, 400),
        ("/v1/completions", b'{"prompt": "a", "model": "\\ud83d\\ude00"}', {}, 200),
        ("/v1/completions", PROMPT.decode().encode("utf-16-le"), {}, 400),
        ("/v1/chat/completions", nested(60), {}, 200),
        ("/v1/chat/completions", nested(900), {}, 400),
        ("/v1/chat/completions", nested(20_000 // 6), {}, 400),
        ("/generate", b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", {}, 400),
        ("/generate", b'{"prompt": "a", "seed": ' + b"9" * 40_000 + b"}", {}, 400),
        ("/generate", b'{"prompt": "a", "temperature": 1e999}', {}, 400),
        ("/generate", PROMPT, {"Content-Type": "text/plain"}, 400),
        ("/generate", b"prompt=a", {"Content-Type": "application/x-www-form-urlencoded"}, 400),
        ("/generate", PROMPT, {"Content-Type": "multipart/form-data; boundary=x"}, 400),
        ("/generate", PROMPT, {"Content-Type": "\xff;;=\xfe"}, 400),
        ("/generate", gzip.compress(PROMPT), GZIP, 200),
        ("/generate", gzip.compress(PROMPT)[:-6], GZIP, 400),
        ("/generate", PROMPT, GZIP, 400),
        ("/generate", gzip.compress(b"a" * 100 * MAX_BODY_BYTES), GZIP, 413),
        ("/generate", zlib.compress(PROMPT), {"Content-Encoding": "deflate"}, 400),
        ("/generate", iter([b"a" * 4096] * 100), {}, 413),
        ("/generate", iter([PROMPT[:9], PROMPT[9:]]), {}, 200),
        # Without a body: closing a connection with unread data may discard the response on its way to the client.
        ("/generate", b"", {"Content-Length": "-5"}, 400),
        ("/generate", b"", {"Content-Length": "9" * 5000}, 400),
    ],
)
def test_odd_bodies_get_a_response(module_server, caplog, path, body, headers, status):
    connection = module_server.connect()
    connection.request("POST", path, body, JSON_TYPE | headers)
    response = connection.getresponse()
    text = response.read()
    connection.close()
    assert response.status == status, text
    assert b"Traceback" not in text
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(module_server.post("/generate", GENERATE)["text"]) == 3
