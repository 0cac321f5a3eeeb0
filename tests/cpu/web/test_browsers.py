"""Web pages reach neither server: names of hosts, origins, keys."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import Iterator
from http.client import HTTPConnection

import aiohttp
import pytest

from colocated_grpo.atropos.api import create_app
from colocated_grpo.web.client import JsonClient, RequestRejected
from colocated_grpo.web.server import Hosts, ServerThread
from tests.support.engine_server import GENERATE, EngineServer

FIREFOX = "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"
KEY = "secret"


class Server:
    """One of the two servers, and requests to it with any headers."""

    def __init__(self, thread: ServerThread, path: str) -> None:
        self.thread, self.path, self.port = thread, path, thread.ports[0]

    def get(self, path: str | None = None, **headers: str) -> int:
        return self.call("GET", path or self.path, **headers)[0]

    def call(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, {"Host": f"localhost:{self.port}", **sent})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, text


def api_server(**guards: object) -> ServerThread:
    return ServerThread(create_app(**{"hosts": Hosts("127.0.0.1"), **guards}), "127.0.0.1", [0])


@pytest.fixture(params=["engine", "api"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    if request.param == "engine":
        engine = EngineServer()
        yield Server(engine.server, "/v1/models")
        engine.close()
    else:
        thread = api_server()
        yield Server(thread, "/info")
        thread.close()


@pytest.fixture
def api() -> Iterator[Server]:
    thread = api_server()
    yield Server(thread, "/info")
    thread.close()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.1:{port}", "LOCALHOST:{port}", "[::1]:{port}"])
def test_requests_to_this_machine_are_served(server, host):
    assert server.get(Host=host.format(port=server.port)) == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "localhost.evil.example", "", "[", "10.0.0.7"])
def test_a_page_whose_name_resolves_to_this_machine_is_rejected(server, host):
    status, text = server.call("GET", server.path, Host=host.format(port=server.port))
    assert status == 403
    assert "this server answers to 127.0.0.1, ::1, localhost" in text


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:3000"},
        {"Origin": "http://["},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_requests_of_pages_of_other_sites_are_rejected(server, method, headers):
    assert server.call(method, server.path, **headers)[0] == 403


def test_requests_of_its_own_pages_are_served(server):
    assert server.get(Origin=f"http://localhost:{server.port}", Sec_Fetch_Site="same-origin") == 200


@pytest.mark.parametrize("path", ["/batch", "/reset_data"])
@pytest.mark.parametrize("headers", [{"User_Agent": FIREFOX}, {"Sec_Fetch_Site": "none"}])
def test_a_browser_changes_no_state_with_get(api, path, headers):
    assert api.get(path, **headers) == 405
    assert api.call("POST", path, **headers)[0] == 200
    assert api.get(path) == 200, "clients of atroposlib"


def test_a_page_of_an_allowed_origin_reads_the_api():
    thread = api_server(origins=["http://localhost:3000"])
    api = Server(thread, "/info")
    assert api.get(Origin="http://localhost:3000", Sec_Fetch_Site="same-site") == 200
    assert api.get(Origin="http://localhost:3001", Sec_Fetch_Site="same-site") == 403
    preflight = {"Origin": "http://localhost:3000", "Access_Control_Request_Method": "POST"}
    assert api.call("OPTIONS", "/scored_data", **preflight)[0] == 200
    thread.close()


@pytest.mark.parametrize("host", ["10.0.0.7:9001", "[fe80::1]:9001", "localhost", socket.gethostname(), "trainer:9001"])
def test_a_server_on_all_addresses_answers_to_each_of_them_and_to_the_names_given(host):
    assert Hosts("0.0.0.0", ["trainer"]).accept(host)
    assert not Hosts("0.0.0.0", ["trainer"]).accept("evil.example")


def test_a_server_on_one_address_answers_to_it_and_to_loopback_names():
    hosts = Hosts("node7.cluster")
    assert [hosts.accept(host) for host in ("Node7.cluster:9001", "localhost", "10.0.0.7")] == [True, True, False]


def test_the_api_requires_its_key_from_trainer_and_environments_under_any_name():
    thread = api_server(api_key=KEY)
    api = Server(thread, "/info")
    basic = base64.b64encode(f"any:{KEY}".encode()).decode()
    assert api.get() == 401
    assert api.get(Authorization="Basic %%%") == 401
    assert api.get(Authorization=f"Bearer {KEY}x") == 401
    assert api.get(Authorization=f"Basic {basic}", Host="trainer:8000") == 200
    url = f"http://127.0.0.1:{api.port}"
    assert JsonClient(url, timeout=5, api_key=KEY).get("/info") == {"batch_size": -1, "max_token_len": -1}
    with pytest.raises(RequestRejected):
        JsonClient(url, timeout=5).get("/info")
    assert asyncio.run(_status(f"http://any:{KEY}@127.0.0.1:{api.port}/info")) == 200
    thread.close()


async def _status(url: str) -> int:
    """Call an address as Atropos' environments do."""
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status


def test_a_key_of_the_engine_replaces_the_check_of_names():
    server = EngineServer(api_key=KEY)
    key = {"Authorization": f"Bearer {KEY}"}
    assert server.call("POST", "/generate", GENERATE, Host="trainer", **key)[0] == 200
    assert server.call("POST", "/generate", GENERATE, Host="trainer", Origin="http://evil.example", **key)[0] == 403
    server.close()
