"""Generated requests to every route of each server, beside honest clients that must get their correct answers.

Each case is one to three requests. A case that fails is shrunk, and printed with a seed that repeats it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

from colocated_grpo.atropos import api
from colocated_grpo.atropos.reader import GroupReader, Origins
from colocated_grpo.atropos.source import AtroposClient
from colocated_grpo.servers import app, server
from colocated_grpo.servers.agent_app import create_agent_app
from colocated_grpo.types import JsonObject
from colocated_grpo.web.client import Unavailable
from tests.chaos.generators import endpoints_of
from tests.chaos.groups import good
from tests.chaos.promises import (
    ATTEMPTS,
    HEALTH_SECONDS,
    MEMORY_MIB,
    PROCESSOR_SECONDS,
    Attack,
    Running,
    Server,
    family,
)
from tests.chaos.sent import RESPONSE_SECONDS, Json, call
from tests.chaos.trial import Trial
from tests.support.atropos_source import TRAINER
from tests.support.engine_server_process import SAID, agent_server_process, engine_server_process
from tests.support.serve_process import ServeProcess
from tests.support.servers import EMBEDDED, ApiProcess, free_port
from tests.support.training_runs import ForkedRun, tiny_model
from tests.support.training_runs import settings as run_settings

KEY, VARIABLE = "the-key-of-the-attack", "CHAOS_KEY"
SHARE = 0.5
"""Of the usual cases, in a round: a part of the time is a few rounds."""
MAX_BATCHES = 300
"""Batches that a trainer may have to take before it has a group: more than requests that end a reservation."""
HEALTH = "/health", 200
SECRET, CLIENT = {"X-Trainer": "the-secret-of-the-trainer"}, "a" * 16
"""Of an attached trainer. Its name is one that the generators choose often."""
JOIN_SECONDS = 60.0
"""The engine waits while it tries to join a group that its trainer offers, 10 s and more if the address is wrong."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
EXAMPLES: dict[str, Json] = {
    COMPLETIONS: {"prompt": "sort 31", "max_tokens": 4, "temperature": 0, "seed": 3},
    CHAT: {"messages": [{"role": "user", "content": "sort 31"}], "max_tokens": 4},
}
"""Bodies of the honest clients."""
READER = GroupReader(
    source="atropos", vocab_size=1000, max_tokens=64, recompute_logprobs=False, origins=Origins(1), decode=str
)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def atropos() -> Server:
    """Return the API server. Its honest clients are an environment, and a trainer that takes its groups."""

    @contextmanager
    def start(folder: Path) -> Generator[Running]:
        log = folder / "atropos.log"
        with ApiProcess(EMBEDDED, log=log) as process:
            trainer = AtroposClient(process.url, TRAINER, may_reset=True)
            honest = partial(_train, trainer, process.port, count())
            yield Running(process.port, partial(family, process.process.pid), log, honest, ("/", 200))

    examples = {"/scored_data": good(0), "/scored_data_list": [good(0)]}
    return Server("Atropos API", endpoints_of(api.create_app), examples, start, samples=False)


def _train(trainer: AtroposClient, port: int, numbers: Iterator[int]) -> None:
    """Post groups, and take batches as a trainer does, until one has come.

    A hostile request for a batch takes that batch, and a reset empties the queue, as in atroposlib.
    """
    for _ in range(ATTEMPTS):
        try:
            if _comes_back(trainer, port, good(next(numbers))):
                return
        except Unavailable as error:
            assert "registration" in str(error), f"the trainer cannot read the queue: {error}"
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
    def start(folder: Path) -> Generator[Running]:
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
                processes = partial(family, process.process.pid)
                yield Running(process.port, processes, log, tried, HEALTH, headers=headers)

    adders = [add for name, add in vars(server).items() if name.startswith("add_") and name.endswith("_routes")]
    name = "engine server, by its trainer" if by_trainer else "engine server of a trainer"
    return Server(name, endpoints_of(app.create_app, *adders), EXAMPLES, start)


@contextmanager
def _attached(port: int) -> Generator[Callable[[], None]]:
    """Attach a trainer, and yield a function that attaches it again and lets the engine run."""
    connection = HTTPConnection("127.0.0.1", port, timeout=RESPONSE_SECONDS)

    def attach() -> None:
        connection.close()
        connection.request("GET", f"/engine/stream?client={CLIENT}", headers=SECRET)
        assert connection.getresponse().readline()
        for path, body in {"/bridge/resume": None, "/engine/version": {"policy_version": 0}}.items():
            status, _ = call(port, "POST", path, body, SECRET, JOIN_SECONDS)
            assert status == 200, f"POST {path}: {status}"

    attach()
    yield attach
    connection.close()


def fake_engine_server() -> Server:
    """Return the routes of a run's engine over a fake engine, which starts within seconds."""

    @contextmanager
    def start(folder: Path) -> Generator[Running]:
        log = folder / "fake.log"
        with engine_server_process(log) as (pid, port):
            yield Running(port, partial(family, pid), log, Completes(port), HEALTH)

    return Server("engine endpoint", endpoints_of(app.create_app), EXAMPLES, start)


def run_endpoint() -> Server:
    """Return the engine endpoint, with a key, of a run that waits for its first batch from the API."""

    @contextmanager
    def start(folder: Path) -> Generator[Running]:
        port = free_port()
        with ApiProcess(EMBEDDED) as api:
            server = {"port": port, "api_key_variable": VARIABLE}
            entry = {"type": "atropos", "url": api.url, "server": server}
            config = run_settings(tiny_model(), environments=[entry], evaluation={"every": 0})
            with ForkedRun(folder / f"run-{port}", config) as run:
                honest = Completes(port, bearer(KEY))
                run.wait_until(honest.is_served)
                yield Running(
                    port, partial(family, run.ranks()[0].pid), run._stderr, honest, HEALTH, headers=bearer(KEY)
                )

    os.environ[VARIABLE] = KEY  # before the fork server of the run starts
    return Server("engine endpoint of a run, with a key", endpoints_of(app.create_app), EXAMPLES, start)


def agents() -> Server:
    """Return the server of a rank's agents. One episode attacks, the other one is honest."""

    @contextmanager
    def start(folder: Path) -> Generator[Running]:
        log = folder / "agents.log"
        with agent_server_process(log) as (pid, [mine, other]):
            port = int(urlsplit(mine.base_url).port or 0)
            prefix, honest_prefix = (urlsplit(each.base_url).path.removesuffix("/v1") for each in (mine, other))
            honest = partial(_ask, port, honest_prefix, bearer(other.api_key))
            processes = partial(family, pid)
            yield Running(port, processes, log, honest, ("/health", 401), prefix, bearer(mine.api_key))

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
    servers = [each for each in servers if trial.only in each.name]
    figures = {}
    for number, each in enumerate(servers):
        began, seconds = time.monotonic(), trial.seconds_left() / (len(servers) - number)
        with Attack(each, trial.folder) as attacked:
            for turn in count():
                attacked.round(trial.seed + turn, SHARE)
                if time.monotonic() - began > seconds:
                    break
        for problem in attacked.problems:
            trial.check(False, problem)
        figures[each.name] = attacked.figures(time.monotonic() - began)
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
