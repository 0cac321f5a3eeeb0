"""A short run of the requests that `make chaos` generates, and faults that it must find."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import psutil
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response

from colocated_grpo.servers.app import new_app
from colocated_grpo.servers.request_bodies import StrictBody
from colocated_grpo.settings.atropos import ServerConfig
from colocated_grpo.web.bodies import BUFFERED_BODIES, read_json
from colocated_grpo.web.server import ServerThread
from tests.chaos import promises
from tests.chaos.generators import endpoints_of
from tests.chaos.promises import MEMORY_MIB, Attack, Running, Server
from tests.chaos.requests import HEALTH, agents, atropos, fake_engine_server
from tests.support.engine_server_process import engine_server_process
from tests.support.paths import ROOT

SEED = 1


@pytest.mark.parametrize(("server", "share"), [(atropos, 0.6), (fake_engine_server, 0.3), (agents, 0.4)])
def test_no_generated_request_breaks_a_promise(tmp_path, server, share):
    with Attack(server(), tmp_path) as attack:
        attack.round(SEED, share)
    assert attack.problems == []
    rejected = sum(count for outcome, count in attack.outcomes.items() if outcome.startswith("4"))
    assert attack.num_cases >= 100 and attack.outcomes["200"] > 30 and rejected > 50, attack.outcomes


class FieldBody(StrictBody):
    small: int = 0
    large: int = 0


class Faulty:
    """A server that breaks one promise when a field exceeds a thousand."""

    def __init__(self, promise: str, folder: Path) -> None:
        self.promise = promise
        self.log = folder / "log"
        self.broken = False
        self.thread = ServerThread(self.app(), "127.0.0.1", [0])

    def app(self) -> FastAPI:
        app = new_app("faulty", "model", max_tokens=16)

        @app.get("/health")
        async def health() -> Response:
            return Response(status_code=503 if self.broken and self.promise == "health" else 200)

        @app.post("/field")
        async def field(request: Request) -> Response:
            body = await read_json(request, FieldBody.from_json)
            self.broken = self.broken or body.large > 1000
            return self.broken_response() if body.large > 1000 else Response()

        return app

    def broken_response(self) -> Response:
        match self.promise:
            case "log":
                self.log.write_text("Traceback (most recent call last)")
            case "memory":
                bytearray(MEMORY_MIB + 64 << 20)[::4096] = b"a" * (MEMORY_MIB + 64 << 8)
        return Response(status_code=500 if self.promise == "status" else 200)

    def honest(self) -> None:
        assert not (self.broken and self.promise == "honest")

    @contextmanager
    def start(self, _folder: Path) -> Generator[Running]:
        self.broken = False
        self.log.write_text("")
        yield Running(self.thread.ports[0], lambda: [psutil.Process()], self.log, self.honest, HEALTH)


FOUND = {
    "status": "status 500",
    "log": "a traceback in the log: Traceback (most recent call last)",
    "memory": "MiB above the memory at the start",
    "health": "GET /health: 503",
    "honest": "an honest request: AssertionError(",
}


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Let a busy machine take longer for a case, and for finding its shortest form."""
    monkeypatch.setattr(promises, "HEALTH_SECONDS", promises.RESPONSE_SECONDS)
    monkeypatch.setattr(promises, "SHRINK_SECONDS", 600.0)


@pytest.mark.parametrize("promise", FOUND)
def test_a_broken_promise_is_found_and_its_case_is_shrunk(tmp_path, promise):
    faulty = Faulty(promise, tmp_path)
    (problem,) = problems_of(faulty)
    assert problem.startswith("faulty, POST /field: ") and FOUND[promise] in problem and "; seed 1; " in problem
    assert problem.count("Sent(") == 1 and "body={'large': " in problem
    assert promise != "status" or problems_of(faulty) == [problem], "a seed repeats its cases"
    faulty.thread.close()


def problems_of(faulty: Faulty) -> list[str]:
    endpoints = [endpoint for endpoint in endpoints_of(faulty.app) if endpoint.schema is not None]
    with Attack(Server("faulty", endpoints, {}, faulty.start), faulty.log.parent) as attack:
        attack.round(SEED, share=4)
    return attack.problems


BODIES = """
import hypothesis
from tests.chaos.generators import bodies

fields = {name: {"type": "integer"} for name in "abcdef"}
schema = {"type": "object", "properties": fields, "required": ["a", "b", "c"]}

@hypothesis.seed(1)
@hypothesis.settings(max_examples=20, database=None, deadline=None)
@hypothesis.given(bodies(schema, None))
def show(body):
    print(body)

show()
"""


def test_a_seed_repeats_its_cases_in_other_processes():
    """Whose order of sets differs."""
    environments = [os.environ | {"PYTHONHASHSEED": seed} for seed in "12"]
    command = [sys.executable, "-c", BODIES]
    first, second = (subprocess.check_output(command, cwd=ROOT, env=each, timeout=300) for each in environments)
    assert first == second != b""


def test_large_bodies_that_never_end_leave_room_for_ordinary_requests():
    """And more of them than there is memory set aside for are rejected."""
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    size = ServerConfig().max_body_bytes
    with engine_server_process() as (_, port):
        connections = [socket.create_connection(("127.0.0.1", port), timeout=120) for _ in range(BUFFERED_BODIES + 1)]
        for connection in connections:
            connection.sendall(head % size + b" " * (size - 1))
        (rejected, *_), _, _ = select.select(connections, [], [], 120)
        # The last one for lack of memory, or an earlier one that took more than GRACE_SECONDS to arrive.
        assert rejected.recv(64)[:12] in (b"HTTP/1.1 503", b"HTTP/1.1 408")
        client = HTTPConnection("127.0.0.1", port, timeout=120)
        client.request(
            "POST", "/generate", b'{"prompt": [1, 2], "max_tokens": 2}', {"Content-Type": "application/json"}
        )
        assert client.getresponse().status == 200
        client.close()
        for connection in connections:
            connection.close()
