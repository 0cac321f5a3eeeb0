"""The engine server's routes for trainers over a fake engine, whose connection and process tests interrupt."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from colocated_grpo.rollout.engine import Finished, Request, RolloutEngine, Sampling
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.servers.app import create_app
from colocated_grpo.servers.control_routes import add_control_routes
from colocated_grpo.servers.engine_control import EngineControl
from colocated_grpo.servers.engine_routes import Sessions, add_engine_routes
from colocated_grpo.servers.engine_servers import EngineServer
from colocated_grpo.servers.rank_links import LoadBalancer
from colocated_grpo.servers.remote import RemoteEngine, Restore
from colocated_grpo.servers.sampler import Sampler
from colocated_grpo.servers.text import TextCodec
from colocated_grpo.types import Completion
from colocated_grpo.web.server import Hosts, ServerThread
from tests.support.engine_server import LIMITS, MAX_TOKENS, MODEL, TIMEOUT, LetterTokenizer
from tests.support.fakes import VOCABULARY, FakeEngine
from tests.support.servers import until

MAX_BODY_BYTES = 1 << 20
TRAINER = "the same on all ranks"


class EngineProcess:
    """A fake engine that `EngineControl` drives on a thread, as an engine process does on its main thread."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine, self.inbox, self.instance = engine, Inbox(), secrets.token_hex(8)
        self.control = EngineControl(engine, self.inbox, Driver(engine, self.inbox))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self.control.run, args=(self._ended.is_set,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self.inbox.wake()
        self._thread.join(timeout=TIMEOUT)
        assert not self._thread.is_alive()


class TrainerServer:
    """The server of one engine process. Leaving the context ends both."""

    def __init__(self, engine: FakeEngine | None = None, **guards: Any) -> None:
        self._guards = {"api_key": None, "max_body_bytes": MAX_BODY_BYTES, "max_requests": 64, **guards}
        self.notes: list[str] = []
        self.process = EngineProcess(engine or FakeEngine())
        self.port = 0
        self.listen()
        self.url = f"http://127.0.0.1:{self.port}"

    def listen(self) -> None:
        """Accept connections, on the same port as before."""
        process = self.process
        self._sessions = Sessions(process.inbox, self.notes.append, process.control.resume)
        facts = {"instance": process.instance, "max_num_seqs": 64, "max_model_len": MAX_TOKENS, "dtype": "float32"}
        app = create_app(
            self._sampler(),
            MODEL,
            state=lambda: process.control.state,
            add_routes=lambda app: self._add_routes(app, facts),
            **{"hosts": Hosts("127.0.0.1"), **self._guards},
        )
        self._thread = ServerThread(app, "127.0.0.1", [self.port])
        [self.port] = self._thread.ports

    def _add_routes(self, app: Any, facts: dict[str, Any]) -> None:
        control = self.process.control
        add_control_routes(app, control, self._sessions, facts, self.call, dict, restart=lambda model: None)
        add_engine_routes(app, self.process.control, self.process.inbox, self._sessions, LIMITS)

    def call(self, name: str, *arguments: object) -> object:
        """Execute a command on the engine's ranks."""
        raise AssertionError(f"runs {name}{arguments}")

    def _sampler(self) -> Sampler:
        inbox = self.process.inbox
        return Sampler(LoadBalancer(inbox), TextCodec(LetterTokenizer(), LIMITS, {}), self.notes.append)

    def disconnect(self) -> None:
        """Close all connections, and accept no more. The engine's process stays."""
        self._sessions.close_all()
        self._thread.close()

    def restart(self, disconnected: Callable[[], None] = lambda: None) -> None:
        """Replace the engine's process, as after a crash: connections close, and requests under way are lost.

        disconnected: called before the process ends.
        """
        self.disconnect()
        disconnected()
        self.process.close()
        self.process = EngineProcess(FakeEngine())
        self.listen()

    def __enter__(self) -> TrainerServer:
        return self

    def __exit__(self, *_error: object) -> None:
        self.process.close()
        self.disconnect()


class Trainer:
    """A `RemoteEngine` at the first version of the weights, and the calls that it makes of its surroundings."""

    def __init__(
        self, server: TrainerServer, restore: Restore | None = None, timeout: float = TIMEOUT, **client: Any
    ) -> None:
        self.lost: list[str] = []
        self.restored: list[str] = []
        self.server = EngineServer(server.url, client.get("api_key"), client.get("trainer", TRAINER), timeout)
        self.engine = RemoteEngine(self.server, restore or self._restore, self.lost.append)
        self.engine.weights_changed(1)

    def _restore(self, server: EngineServer) -> bool:
        self.restored.append(server.info()["instance"])
        return True


def requests(count: int, **changes: Any) -> list[Request]:
    sampling = Sampling(temperature=1.0, max_tokens=12)
    return [
        Request(
            **{"key": ("prompt", n), "token_ids": [n % VOCABULARY, 1], "seed": 100 + n, "sampling": sampling, **changes}
        )
        for n in range(count)
    ]


def completed(engine: RolloutEngine, count: int) -> Finished:
    """Step until `count` requests have finished."""
    finished: Finished = []

    def enough() -> bool:
        finished.extend(engine.step())
        return len(finished) >= count

    until(enough)
    return finished


def alone(sent: Sequence[Request], policy_version: int = 1) -> dict[Hashable, Completion]:
    """Return the completions of a FakeEngine in this process."""
    engine = FakeEngine()
    engine.weights_changed(policy_version)
    engine.submit(sent)
    return dict(completed(engine, len(sent)))
