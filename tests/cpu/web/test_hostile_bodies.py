"""Bodies of up to 32 MB sent to both servers, each in a process of its own, and what they cost there."""

from __future__ import annotations

import gzip
import select
import socket
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest

from colocated_grpo.settings.atropos import ServerConfig
from colocated_grpo.web.bodies import BUFFERED_BODIES
from tests.chaos import bodies as servers
from tests.chaos.hostile_requests import Route, Target, send_all
from tests.support.engine_server_process import engine_server_process
from tests.support.hostile_bodies import MIB, SIZE, Cost, bodies, cost_of
from tests.support.servers import EMBEDDED, ApiProcess

CPU_SECONDS, HEALTH_SECONDS, MEMORY_MIB = 1.0, 0.5, 3 * SIZE / MIB
ENGINE_BODY_BYTES = ServerConfig().max_body_bytes
ENGINE_ROUTES = {
    "/v1/completions": (b"prompt", b"prompt"),
    "/generate": (b"prompt", b"prompt"),
    "/inference/v1/generate": (b"token_ids", b"model"),
    "/v1/chat/completions": (b"messages", b"model"),
}
"""Route -> keys of a list and of a text."""
RANDOM_REQUESTS = 300
GROUP = b'"masks": [[1]], "scores": [1], "tokens": [[1]], '


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[int, int]]:
    with engine_server_process() as process:
        yield process


@pytest.fixture(scope="module")
def api() -> Iterator[ApiProcess]:
    with ApiProcess(EMBEDDED) as process:
        yield process


def cost_within_bounds(pid: int, port: int, path: str, health: str, body: bytes, **headers: str) -> Cost:
    """Return what the body costs. Other work on the machine only adds to that, so an excess is measured again."""
    for _ in range(5):
        cost = cost_of(pid, port, path, health, body, **headers)
        if cost.cpu_seconds <= CPU_SECONDS and cost.mib <= MEMORY_MIB and cost.health_seconds <= HEALTH_SECONDS:
            return cost
    raise AssertionError(f"{body[:80]!r} costs {cost}")


def test_no_body_of_32_mb_stalls_the_api_server(api):
    for name, body in bodies(b"inference_logprobs", b"images", GROUP):
        cost = cost_within_bounds(api.process.pid, api.port, "/scored_data", "/info", body)
        assert cost.status in (200, 400, 422), (name, cost)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_no_body_of_the_largest_size_stalls_the_engine_server(engine, path):
    for name, body in bodies(*ENGINE_ROUTES[path], b"", size=ENGINE_BODY_BYTES):
        cost = cost_within_bounds(*engine, path, "/health", body)
        assert cost.status in (200, 400), (name, cost)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [' + b"[]," * 65_000 + b"[]]}",
        b'{"prompt": [' + b"-1," * 1_000_000 + b"-1]}",
        b'{"prompt": ["a"' + b",1" * 1_000_000 + b"]}",
        b'{"prompt": "a", "stop_token_ids": [' + b"-1," * 1_000_000 + b"-1]}",
        b'{"prompt": "a", "stop": [' + b"1," * 1_000_000 + b"1]}",
        b'{"prompt": "a", "logit_bias": {' + b",".join(b'"%d": 1' % number for number in range(60_000)) + b"}}",
        b'{"prompt": "a", ' + b",".join(b'"%d": 1' % number for number in range(60_000)) + b"}",
    ],
    ids=["lists", "numbers", "mixed", "stop tokens", "stop strings", "biases", "keys"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_the_first_of_many_errors_ends_the_check(engine, path, body):
    cost = cost_within_bounds(*engine, path, "/health", body)
    assert cost.status == 400 or (path == "/v1/completions" and b'"59999": 1}' in body), (
        "unknown keys are ignored there"
    )


@pytest.mark.parametrize("path", [*ENGINE_ROUTES, "/bridge/anything"])
def test_a_body_of_32_mb_is_rejected_by_the_engine_server_at_once(engine, path):
    cost = cost_within_bounds(*engine, path, "/health", gzip.compress(b" " * SIZE, 1))
    assert cost.status in (400, 404), "compressed, without saying so"
    cost = cost_within_bounds(*engine, path, "/health", gzip.compress(b" " * SIZE, 1), **{"Content-Encoding": "gzip"})
    assert cost.status == 413


def test_large_bodies_that_never_end_leave_room_for_ordinary_requests(engine):
    """And more of them than there is memory set aside for are rejected."""
    _, port = engine
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    connections = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(BUFFERED_BODIES + 1)]
    for connection in connections:
        connection.sendall(head % ENGINE_BODY_BYTES + b" " * (ENGINE_BODY_BYTES - 1))
    (rejected, *_), _, _ = select.select(connections, [], [], 30)
    assert rejected.recv(64).startswith(b"HTTP/1.1 503")
    client = HTTPConnection("127.0.0.1", port, timeout=30)
    client.request("POST", "/generate", b'{"prompt": [1, 2], "max_tokens": 2}', {"Content-Type": "application/json"})
    assert client.getresponse().status == 200
    client.close()
    for connection in connections:
        connection.close()


def test_no_random_request_makes_the_engine_server_fail(engine):
    assert_answered(engine[1], servers.ENGINE, ENGINE_BODY_BYTES)


def test_no_random_request_makes_the_api_server_fail(api):
    assert_answered(api.port, servers.API, SIZE)


def assert_answered(port: int, routes: tuple[Route, ...], largest: int) -> None:
    outcomes = send_all(Target(port, routes, None, largest), seed=3, count=RANDOM_REQUESTS, threads=2)
    assert outcomes.total() == RANDOM_REQUESTS
    assert outcomes["200"] and outcomes["400"] + outcomes["422"] > RANDOM_REQUESTS / 2
    expected = {"200", "400", "403", "405", "411", "413", "415", "422", "503", "broken off", "closed"}
    assert set(outcomes) <= expected, outcomes
