"""The engine server over fake engines, and the requests that tests send to it."""

from __future__ import annotations

import json
import threading
from http.client import HTTPConnection
from typing import Any

import openai

from colocated_grpo.atropos.reader import Origins
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.servers.app import create_app
from colocated_grpo.servers.rank_links import LoadBalancer
from colocated_grpo.servers.sampler import Sampler
from colocated_grpo.servers.text import Limits, TextCodec
from colocated_grpo.web.server import Hosts, ServerThread
from tests.support.fakes import VOCABULARY, FakeEngine

JSON_TYPE = {"Content-Type": "application/json"}
MAX_TOKENS = 24
LIMITS = Limits(max_tokens=MAX_TOKENS, longest_token=2, vocab_size=VOCABULARY, stop_token_ids=(9,), seed=0)
MODEL = "tiny"
MAX_BODY_BYTES = 50_000
TIMEOUT = 120.0

GENERATE = {"prompt": {"prompt_token_ids": [1, 2, 3]}, "logprobs": 0, "n": 3, "max_tokens": 6, "temperature": 0.9}
"""The body of POST /generate, as Atropos' managed servers send it."""
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "abc"}], "max_tokens": 12, "seed": 4}


class LetterTokenizer:
    """A tokenizer of ten letters."""

    chat_template = "letters"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) % VOCABULARY for letter in text]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join("abcdefghij"[token] for token in token_ids)

    def apply_chat_template(self, conversation: list[dict[str, Any]], **settings: Any) -> str:
        if any(message["role"] not in ("user", "assistant", "system") for message in conversation):
            raise ValueError("roles are user, assistant and system")
        return "".join(message["content"] for message in conversation)


class EngineServer:
    """A server on two ports. One thread drives each engine while `awake` is set, until `ended` is."""

    def __init__(self, *, engines: int = 1, limits: Limits = LIMITS, **guards: Any) -> None:
        self.inboxes = [Inbox() for _ in range(engines)]
        self.engines = [FakeEngine() for _ in self.inboxes]
        self.origins = Origins(100)
        self.notes: list[str] = []
        self.awake, self.ended = threading.Event(), threading.Event()
        self.awake.set()
        self._asleep = [threading.Event() for _ in self.inboxes]
        sampler = Sampler(
            LoadBalancer(self.inboxes[0], self.inboxes[1:]),
            TextCodec(LetterTokenizer(), limits, {}),
            self.notes.append,
            on_sampled=self.origins.record,
        )
        guards = {
            "hosts": Hosts("127.0.0.1"),
            "api_key": None,
            "max_body_bytes": MAX_BODY_BYTES,
            "max_requests": 64,
            **guards,
        }
        self.server = ServerThread(create_app(sampler, MODEL, **guards), "127.0.0.1", [0, 0])
        self.url = f"http://127.0.0.1:{self.server.ports[0]}"
        self.threads = [
            threading.Thread(target=self._drive, args=(Driver(engine, inbox), asleep), daemon=True)
            for engine, inbox, asleep in zip(self.engines, self.inboxes, self._asleep, strict=True)
        ]
        for thread in self.threads:
            thread.start()

    def _drive(self, driver: Driver, asleep: threading.Event) -> None:
        while not self.ended.is_set():
            if self.awake.wait(0.01):
                driver.step()
            else:
                asleep.set()
        driver.abort()

    def fall_asleep(self) -> None:
        """Clear `awake`, and wait until no thread is in a step that it began before."""
        self.awake.clear()
        for inbox, asleep in zip(self.inboxes, self._asleep, strict=True):
            asleep.clear()
            inbox.wake()
            assert asleep.wait(TIMEOUT)

    def connect(self, port: int = 0) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.server.ports[port], timeout=TIMEOUT)

    def call(self, method: str, path: str, body: Any = None, port: int = 0, **headers: str) -> tuple[int, Any]:
        """Return the status and the body, parsed where it is JSON. Bytes are sent as they are."""
        connection = self.connect(port)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, {**JSON_TYPE, **headers})
        response = connection.getresponse()
        raw = response.read()
        connection.close()
        is_json = response.headers.get("Content-Type") == "application/json"
        return response.status, json.loads(raw) if is_json else raw.decode()

    def post(self, path: str, body: Any) -> Any:
        status, response = self.call("POST", path, body)
        assert status == 200, response
        return response

    def rejected(self, path: str, body: Any, status: int = 400) -> str:
        """Post a body that must be rejected with `status` and return the error message."""
        code, response = self.call("POST", path, body)
        assert code == status, response
        return response["error"]["message"]

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(api_key="x", base_url=f"{self.url}/v1", max_retries=0)

    def requests(self) -> list[Any]:
        """Return the requests submitted to all engines."""
        return [request for engine in self.engines for request in engine.submitted]

    def close(self) -> None:
        self.ended.set()
        for inbox in self.inboxes:
            inbox.wake()
        for thread in self.threads:
            thread.join()
        self.server.close()


class StepGate:
    """Blocks an engine's steps until they are allowed."""

    def __init__(self) -> None:
        self._allowed = threading.Semaphore(0)

    def __call__(self) -> None:
        assert self._allowed.acquire(timeout=TIMEOUT)

    def allow(self, count: int) -> None:
        self._allowed.release(count)
