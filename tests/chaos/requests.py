"""Generated requests to every route of each server, beside honest clients that must get their correct answers.

Each case is one to three requests. A case that fails is shrunk, and printed with a seed that repeats it.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import hypothesis
import psutil
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Flaky

from colocated_grpo.atropos import api
from colocated_grpo.atropos.origins import Origins
from colocated_grpo.atropos.reader import GroupReader
from colocated_grpo.atropos.source import AtroposClient
from colocated_grpo.servers import app, server
from colocated_grpo.servers.agent_app import create_agent_app
from colocated_grpo.types import JsonObject
from colocated_grpo.web.client import RequestRejected, Unavailable
from tests.chaos.generators import MIB, Endpoint, Json, Sent, cases, endpoints_of
from tests.chaos.groups import good
from tests.chaos.trial import Trial
from tests.support.atropos_source import TRAINER
from tests.support.engine_server_process import SAID, agent_server_process, engine_server_process
from tests.support.serve_process import ServeProcess
from tests.support.servers import EMBEDDED, ApiProcess, free_port
from tests.support.training_runs import ForkedRun, tiny_model
from tests.support.training_runs import settings as run_settings

KEY, VARIABLE = "the-key-of-the-attack", "CHAOS_KEY"
HEALTH_SECONDS = 2.0
PROCESSOR_SECONDS = 1.0
"""Bound of a server's processor time for a request, apart from sampling."""
MEMORY_MIB = 256
"""Bound of a server's memory above that at its start, at any moment."""
RESPONSE_SECONDS = 15.0
UNFINISHED_SECONDS = 0.05
"""How long to wait for a response to something that is no whole request."""
HELD = 32
"""Connections that stay open beside later cases."""
ATTEMPTS = 3
"""Repetitions of a case that takes too long, because other programs use the machine too."""
SHRINK_SECONDS = 60.0
MAX_BATCHES = 300
"""Batches that a trainer may have to take before it has a group: more than requests that end a reservation."""
SHOWN = 1500
HEALTH = "/health", 200
TOO_LATE, SILENT = "too late", "silent"
SECRET, CLIENT, VERSION = {"X-Trainer": "the-secret-of-the-trainer"}, "a" * 16, {"policy_version": 0}
"""Of an attached trainer. Its name is one that the generators choose often."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
EXAMPLES: dict[str, Json] = {
    COMPLETIONS: {"prompt": "sort 31", "max_tokens": 4, "temperature": 0, "seed": 3},
    CHAT: {"messages": [{"role": "user", "content": "sort 31"}], "max_tokens": 4},
}
"""Bodies of the honest clients."""
READER = GroupReader(
    source="atropos", vocab_size=1000, max_tokens=64, recompute_logprobs=False, origins=Origins(1), decode=str
)


class Broken(AssertionError):
    """A promise that a server has not kept."""


@dataclass
class Running:
    """A server under attack."""

    port: int
    process: psutil.Process
    """Its children belong to the server."""
    log: Path
    honest: Callable[[], None]
    """Send an honest request and check its response."""
    health: tuple[str, int]
    """A path, and the status of its response while the server is well."""
    prefix: str = ""
    """Of all paths."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Of most of the generated requests."""

    def processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]


@dataclass(frozen=True)
class Server:
    """A server that can be started."""

    name: str
    endpoints: Sequence[Endpoint]
    examples: dict[str, Json]
    """Valid bodies by path, where a schema cannot express them."""
    start: Callable[[Path], AbstractContextManager[Running]]
    samples: bool = True
    """True if accepted requests cost what they sample."""


@dataclass
class Attack:
    """The generated cases of one server, and the outcomes of all requests."""

    server: Server
    folder: Path
    problems: list[str] = field(default_factory=list)
    num_cases: int = 0
    honest_requests: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    """Seconds of each request for the server's health."""
    peaks: list[float] = field(default_factory=list)
    """MiB above the server's memory at its start, the largest during each case."""

    def __post_init__(self) -> None:
        self._failed: set[str] = set()
        """Endpoints with a problem. They are left out from then on."""

    def round(self, seed: int, share: float = 1.0) -> None:
        """Attack all endpoints once on a fresh server. share: of the usual number of cases."""
        self._stack = ExitStack()
        self._held: deque[socket.socket] = deque()
        with self._stack:
            self._start()
            for endpoint in self._endpoints():
                self._attack(endpoint, seed, max(1, round(share * endpoint.num_cases)))

    def _endpoints(self) -> list[Endpoint]:
        return [each for each in self.server.endpoints if each.name not in self._failed]

    def _attack(self, endpoint: Endpoint, seed: int, num_cases: int) -> None:
        self._failure: tuple[list[Sent], Broken] | None = None
        """The last case that has failed, which is the smallest."""

        @hypothesis.seed(f"{seed} {endpoint.name}")
        @settings(
            max_examples=num_cases,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(cases(endpoint, self._endpoints(), self.server.examples))
        def attack(case: list[Sent]) -> None:
            self._try(case)

        with suppress(Broken, Flaky):  # flaky: not again alone, or not after SHRINK_SECONDS
            attack()
        if self._failure is not None:
            case, error = self._failure
            self._failed.add(endpoint.name)
            self.problems.append(f"{self.server.name}, {endpoint.name}: {error}; seed {seed}; {str(case)[:SHOWN]}")
            self._start()

    def _try(self, case: list[Sent]) -> None:
        if self._failure is None:
            self._shrinks_until = time.monotonic() + SHRINK_SECONDS
        elif time.monotonic() > self._shrinks_until:
            return
        else:
            self._start()
        self.num_cases += 1
        try:
            for attempt in range(ATTEMPTS):
                try:
                    return self._check(case)
                except Broken as error:
                    if TOO_LATE not in str(error) or attempt == ATTEMPTS - 1:
                        raise
        except Broken as error:
            self._failure = case, error
            raise

    def _start(self) -> None:
        """Start the server, or start it again."""
        self._stack.close()
        while self._held:
            self._held.popleft().close()
        self._running = self._stack.enter_context(self.server.start(self.folder))
        self._running.honest()
        self._log_bytes = self._running.log.stat().st_size
        self._memory = sum(process.memory_info().rss for process in self._running.processes())

    def _check(self, case: list[Sent]) -> None:
        """Send the requests of a case and check the promises."""
        processes = self._running.processes()
        for process in processes:
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # the peak memory
        used = _processor_seconds(processes)
        opened = [_open(self._running, sent) for sent in case]
        self._check_health()
        self._check_honest()
        outcomes = [self._outcome(*each) for each in zip(case, opened, strict=True)]
        self.outcomes.update(outcomes)
        self._check_health()
        used = _processor_seconds(processes) - used
        samples = self.server.samples and not all(outcome.startswith("4") for outcome in outcomes)
        if not samples and used > PROCESSOR_SECONDS * len(outcomes):
            raise Broken(f"{TOO_LATE}: {used:.1f} s of processor time for responses {outcomes}")
        self._check_memory(processes)
        with self._running.log.open(errors="replace") as log:
            log.seek(self._log_bytes)
            if "Traceback" in (text := log.read()):
                self._log_bytes += len(text.encode())
                raise Broken(f"a traceback in the log: {' '.join(text.split())[-SHOWN:]}")

    def _check_health(self) -> None:
        began, (path, expected) = time.monotonic(), self._running.health
        status, _ = call(self._running.port, "GET", path)
        self.latencies.append(time.monotonic() - began)
        if status != expected:
            raise Broken(f"GET {path}: {status}")
        if self.latencies[-1] > HEALTH_SECONDS:
            raise Broken(f"{TOO_LATE}: GET {path} took {self.latencies[-1]:.1f} s")

    def _check_honest(self) -> None:
        try:
            self._running.honest()
        except (OSError, HTTPException, RequestRejected, AssertionError) as error:
            raise Broken(f"an honest request: {error!r}") from None
        self.honest_requests += 1

    def _check_memory(self, processes: Sequence[psutil.Process]) -> None:
        try:
            peak = (sum(_peak(process.pid) for process in processes) - self._memory) / MIB
        except FileNotFoundError:
            raise Broken("a process of the server has ended") from None
        self.peaks.append(peak)
        if peak > MEMORY_MIB:
            raise Broken(f"{peak:.0f} MiB above the memory at the start")

    def _outcome(self, sent: Sent, connection: socket.socket) -> str:
        """Return the status of the response, or how the connection ended."""
        if sent.ending == "hold":
            self._held.append(connection)
            if len(self._held) > HELD:
                self._held.popleft().close()
            return "held"
        if sent.ending == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if sent.ending in ("close", "reset"):
            connection.close()
            return sent.ending
        with connection:
            status = _status(connection, sent)
        if status == SILENT and sent.is_whole:
            raise Broken(f"no response within {RESPONSE_SECONDS:g} s")
        if status.startswith("5") and status != "503":
            raise Broken(f"status {status}")
        return status


def _open(running: Running, sent: Sent) -> socket.socket:
    """Send a request, as far as the server reads it, and return its connection."""
    connection = socket.create_connection(("127.0.0.1", running.port), timeout=RESPONSE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data = sent.data(running.prefix, running.headers)
    step = len(data) // (len(sent.pauses) + 1) + 1
    with suppress(OSError):  # the server has responded or closed before the end
        for start, pause in zip(range(0, len(data), step), (0.0, *sent.pauses), strict=False):
            time.sleep(pause)
            connection.sendall(data[start : start + step])
        if sent.ending == "half":
            connection.shutdown(socket.SHUT_WR)
    return connection


def _status(connection: socket.socket, sent: Sent) -> str:
    connection.settimeout(RESPONSE_SECONDS if sent.is_whole else UNFINISHED_SECONDS)
    response = HTTPResponse(connection, method=sent.method)
    try:
        response.begin()
        response.read1()
        return str(response.status)
    except TimeoutError:
        return SILENT
    except (OSError, HTTPException):
        return "closed"
    finally:
        response.close()


def _processor_seconds(processes: Sequence[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:2])
    return total


def _peak(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def call(
    port: int, method: str, path: str, body: Json = None, headers: Mapping[str, str] | None = None
) -> tuple[int | str, Any]:
    """Return the status and the parsed body of a response, or the error and None."""
    connection = HTTPConnection("127.0.0.1", port, timeout=RESPONSE_SECONDS)
    sent = {"Content-Type": "application/json", **(headers or {})}
    try:
        connection.request(method, path, None if body is None else json.dumps(body), sent)
        response = connection.getresponse()
        text = response.read()
        return response.status, json.loads(text) if text else None
    except (OSError, HTTPException) as error:
        return repr(error), None
    finally:
        connection.close()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def atropos() -> Server:
    """Return the API server. Its honest clients are an environment, and a trainer that takes its groups."""

    @contextmanager
    def start(folder: Path) -> Iterator[Running]:
        log = folder / "atropos.log"
        with ApiProcess(EMBEDDED, log=log) as process:
            trainer = AtroposClient(process.url, TRAINER, may_reset=True)
            honest = partial(_train, trainer, process.port, count())
            yield Running(process.port, psutil.Process(process.process.pid), log, honest, ("/", 200))

    examples = {"/scored_data": good(0), "/scored_data_list": [good(0)]}
    return Server("Atropos API", endpoints_of(api.create_app), examples, start, samples=False)


def _train(trainer: AtroposClient, port: int, numbers: Iterator[int]) -> None:
    """Post groups, and take batches as a trainer does, until one has come.

    A hostile request for a batch takes that batch, and a reset empties the queue, as in atroposlib.
    """
    for _ in range(ATTEMPTS):
        with suppress(Unavailable):
            if _comes_back(trainer, port, good(next(numbers))):
                return
    raise AssertionError(f"the trainer has not received one of {ATTEMPTS} honest groups, in {MAX_BATCHES} batches each")


def _comes_back(trainer: AtroposClient, port: int, group: JsonObject) -> bool:
    items = trainer.register(0, lambda line: None)
    status, _ = call(port, "POST", "/scored_data", group)
    assert status == 200, status
    for _ in range(MAX_BATCHES):
        read = READER.read(items or [], 0, 0)
        if any(each.rollouts[0].token_ids == group["tokens"][0] for each in read.groups):
            return True
        items = trainer.batch()
    return False


def engine_server(by_trainer: bool = False) -> Server:
    """Return a server with all routes that `servers/server.py` adds, to which a trainer is attached.

    by_trainer: the attacker has the secret of the trainer. What it changes is undone before each honest request.
    """

    @contextmanager
    def start(folder: Path) -> Iterator[Running]:
        log = folder / "engine.log"
        with ServeProcess(tiny_model(), log=log) as process:
            process.wait_until_ready()
            completes = Completes(process.port)
            with _attached(process.port) as attach:

                def honest() -> None:
                    attach()
                    completes()

                headers = SECRET if by_trainer else {}
                tried = honest if by_trainer else completes
                yield Running(process.port, psutil.Process(process.process.pid), log, tried, HEALTH, headers=headers)

    adders = [add for name, add in vars(server).items() if name.startswith("add_") and name.endswith("_routes")]
    name = "engine server, by its trainer" if by_trainer else "engine server of a trainer"
    return Server(name, endpoints_of(app.create_app, *adders), EXAMPLES, start)


@contextmanager
def _attached(port: int) -> Iterator[Callable[[], None]]:
    """Attach a trainer, and yield a function that attaches it again and lets the engine run."""
    connection = HTTPConnection("127.0.0.1", port, timeout=RESPONSE_SECONDS)

    def attach() -> None:
        connection.close()
        connection.request("GET", f"/engine/stream?client={CLIENT}", headers=SECRET)
        assert connection.getresponse().readline()
        for path, body in {"/bridge/wake_up": None, "/bridge/resume": None, "/engine/version": VERSION}.items():
            status, _ = call(port, "POST", path, body, SECRET)
            assert status == 200, f"POST {path}: {status}"

    attach()
    yield attach
    connection.close()


def fake_engine_server() -> Server:
    """Return the routes of a run's engine over a fake engine, which starts within seconds."""

    @contextmanager
    def start(folder: Path) -> Iterator[Running]:
        log = folder / "fake.log"
        with engine_server_process(log) as (pid, port):
            yield Running(port, psutil.Process(pid), log, Completes(port), HEALTH)

    return Server("engine endpoint", endpoints_of(app.create_app), EXAMPLES, start)


def run_endpoint() -> Server:
    """Return the engine endpoint, with a key, of a run that waits for its first batch from the API."""

    @contextmanager
    def start(folder: Path) -> Iterator[Running]:
        port = free_port()
        with ApiProcess(EMBEDDED) as api:
            server = {"port": port, "api_key_variable": VARIABLE}
            entry = {"type": "atropos", "url": api.url, "server": server}
            config = run_settings(tiny_model(), environments=[entry], evaluation={"every": 0})
            with ForkedRun(folder / f"run-{port}", config) as run:
                honest = Completes(port, bearer(KEY))
                run.wait_until(honest.is_served)
                yield Running(port, run.ranks()[0], run._stderr, honest, HEALTH, headers=bearer(KEY))

    os.environ[VARIABLE] = KEY  # before the fork server of the run starts
    return Server("engine endpoint of a run, with a key", endpoints_of(app.create_app), EXAMPLES, start)


def agents() -> Server:
    """Return the server of a rank's agents. One episode attacks, the other one is honest."""

    @contextmanager
    def start(folder: Path) -> Iterator[Running]:
        log = folder / "agents.log"
        with agent_server_process(log) as (pid, [mine, other]):
            port = int(urlsplit(mine.base_url).port or 0)
            prefix, honest_prefix = (urlsplit(each.base_url).path.removesuffix("/v1") for each in (mine, other))
            honest = partial(_ask, port, honest_prefix, bearer(other.api_key))
            yield Running(port, psutil.Process(pid), log, honest, ("/health", 401), prefix, bearer(mine.api_key))

    return Server("endpoint of agents", endpoints_of(create_agent_app), EXAMPLES, start)


def _ask(port: int, prefix: str, headers: Mapping[str, str]) -> None:
    status, response = call(port, "POST", prefix + CHAT, EXAMPLES[CHAT], headers)
    assert status == 200, status
    assert response["choices"][0]["message"]["content"] == SAID, response


class Completes:
    """An honest client whose completion must always be the same."""

    def __init__(self, port: int, headers: Mapping[str, str] | None = None) -> None:
        self._port = port
        self._headers = headers
        self._text: str | None = None

    def __call__(self) -> None:
        status, response = call(self._port, "POST", COMPLETIONS, EXAMPLES[COMPLETIONS], self._headers)
        assert status == 200, status
        text = response["choices"][0]["text"]
        self._text = self._text or text
        assert text == self._text, f"{text!r}, and before {self._text!r}"

    def is_served(self) -> bool:
        try:
            self()
        except AssertionError:
            return False
        return True


def attack(trial: Trial) -> JsonObject:
    """Attack each server in rounds, each with a seed of its own, until its part of the time is up."""
    servers = [atropos(), engine_server(), engine_server(by_trainer=True), run_endpoint(), agents()]
    figures = {}
    for number, each in enumerate(servers):
        attacked = Attack(each, trial.folder)
        began, seconds = time.monotonic(), trial.seconds_left() / (len(servers) - number)
        for turn in count():
            attacked.round(trial.seed + turn)
            if time.monotonic() - began > seconds:
                break
        for problem in attacked.problems:
            trial.check(False, problem)
        figures[each.name] = _figures(attacked, time.monotonic() - began)
        trial.say(f"{each.name}: {json.dumps(figures[each.name])}")
    return {
        "what": "cases of one to three generated requests to every route and every field, beside honest clients",
        "bounds": {
            "health_seconds": HEALTH_SECONDS,
            "processor_seconds_without_sampling": PROCESSOR_SECONDS,
            "memory_mib": MEMORY_MIB,
        },
        "servers": figures,
    }


def _figures(attacked: Attack, seconds: float) -> JsonObject:
    latencies = sorted(attacked.latencies)
    return {
        "endpoints": len(attacked.server.endpoints),
        "cases": attacked.num_cases,
        "cases_per_hour": round(3600 * attacked.num_cases / seconds),
        "outcomes": dict(sorted(attacked.outcomes.items())),
        "honest_requests": attacked.honest_requests,
        "health_seconds_max": round(latencies[-1], 3),
        "health_seconds_p99": round(latencies[int(0.99 * len(latencies))], 3),
        "memory_mib_max": round(max(attacked.peaks), 1),
        "problems": len(attacked.problems),
    }
