"""`RolloutEngine` over HTTP: the engine of one server, and a group of several engines.

Requests are posted in batches, and their completions arrive on one streamed response. After a lost connection, the
server aborts the requests under way, and the client posts them again with the same seeds: none is lost or repeated.
"""

import itertools
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import suppress
from queue import Empty

from pydantic_core import to_jsonable_python

from colocated_grpo.errors import RunError
from colocated_grpo.rollout.engine import Finished, Request, RolloutEngine
from colocated_grpo.servers.engine_servers import CONFLICT, REQUESTS_PER_POST, EngineServer, Messages
from colocated_grpo.types import Completion
from colocated_grpo.web.client import RequestRejected, Unavailable

STEP_SECONDS = 0.005
"""Maximum wait of one step, similar to the duration of a decode step."""
TOKENS_PER_POST = 1 << 19
"""Maximum prompt tokens of one post: far below the server's body limit, and usually enough for all new requests. The
engine admits the requests of a post in the same step, so a deterministic run's batches do not depend on timing."""
STOP_SECONDS = 30.0
"""Seconds for the run to stop after the engine is lost."""

Restore = Callable[[EngineServer], bool]
"""Restores a restarted server's weights. Returns False if only a weight sync of all ranks can. Raises Unavailable."""


class RemoteEngine(RolloutEngine):
    """The engine of one server, which never sleeps. Completions arrive whole. Not thread-safe: one thread drives it."""

    admission_cost = 0  # the server's driver admits requests in batches

    def __init__(self, server: EngineServer, restore: Restore, on_lost: Callable[[str], None]) -> None:
        """Wait for the server. on_lost: called once, with one line, when the server is lost for this run."""
        info = server.wait_until_ready()
        self._server = server
        self._restore = restore
        self._on_lost = on_lost
        self.max_num_seqs: int = info["max_num_seqs"]
        self._max_tokens: int = info["max_model_len"]
        self._instance: str = info["instance"]
        self._numbers = itertools.count()
        self.running: dict[int, Request] = {}
        """Requests under way, by their number at the server, in ascending order."""
        self._last_sent = -1
        """Number of the last request sent since the stream was opened."""
        self._messages: Messages | None = None
        """The open stream; None before the first request and after a lost connection."""
        self._unavailable_since: float | None = None
        self._lost: tuple[str, float] | None = None
        self._policy_version = 0

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if len(request.token_ids) >= self._max_tokens:
                raise ValueError(f"a prompt of {len(request.token_ids)} tokens: at most {self._max_tokens - 1}")
            self.running[next(self._numbers)] = request

    def step(self) -> Finished:
        """Return newly arrived completions. Waits up to STEP_SECONDS for the first completion."""
        if self._lost is not None:  # return no completions, so that the caller can stop the run
            line, since = self._lost
            if time.monotonic() - since > STOP_SECONDS:
                raise RunError(line)
            time.sleep(STEP_SECONDS)
            return []
        if self._messages is None:
            self._connect()
        if self._messages is not None:
            self._send()
        if self._messages is None:
            time.sleep(STEP_SECONDS)
            return []
        return self._receive(self._messages)

    def _connect(self) -> None:
        """Open the stream and queue all running requests again, if the server responds."""
        try:
            self._restore_if_restarted()
            self._messages = self._server.stream()
            self._last_sent = -1
        except (Unavailable, RequestRejected) as error:
            self._record_unavailable(str(error))
        except RunError as error:
            self._give_up(str(error))

    def _restore_if_restarted(self) -> None:
        """Restore a restarted server's weights. Raises Unavailable, RequestRejected, or RunError if they are lost."""
        if (instance := self._server.info()["instance"]) == self._instance:
            return
        if not self._restore(self._server):
            raise RunError(f"engine.urls={self._server.url}: it was restarted and has lost the policy's weights")
        self._server.post("/engine/version", {"policy_version": self._policy_version})
        self._instance = instance

    def _record_unavailable(self, reason: str) -> None:
        self._messages = None
        self._unavailable_since = self._unavailable_since or time.monotonic()
        if time.monotonic() - self._unavailable_since > self._server.timeout:
            problem = f"no requests accepted for engine.server_timeout={self._server.timeout:g} s ({reason})"
            self._give_up(f"engine.urls={self._server.url}: {problem}")

    def _give_up(self, line: str) -> None:
        self._lost = line, time.monotonic()
        self._on_lost(line)

    def _send(self) -> None:
        try:
            while batch := self._next_post():
                requests = [
                    {
                        "id": number,
                        "token_ids": request.token_ids,
                        "seed": request.seed,
                        "sampling": to_jsonable_python(request.sampling),
                        "pattern": request.pattern,
                    }
                    for number, request in batch.items()
                ]
                body = {"client": self._server.client, "policy_version": self._policy_version, "requests": requests}
                self._server.post("/engine/requests", body)
                self._last_sent = max(batch)
                self._unavailable_since = None
        except Unavailable as error:
            self._record_unavailable(str(error))
        except RequestRejected as error:
            if error.status != CONFLICT:
                raise RunError(f"engine.urls={self._server.url}: rejects a request: {error}") from None
            self._record_unavailable(str(error))  # the server restarted between two steps, or the stream ended

    def _next_post(self) -> dict[int, Request]:
        """Return as many of the next unsent requests as fit into one body, by number."""
        newest_first = itertools.takewhile(lambda one: one[0] > self._last_sent, reversed(self.running.items()))
        unsent = list(newest_first)[::-1][:REQUESTS_PER_POST]
        totals = itertools.accumulate(len(request.token_ids) for _, request in unsent)
        count = sum(total <= TOKENS_PER_POST for total in totals)
        return dict(unsent[: max(1, count)])

    def _receive(self, messages: Messages) -> Finished:
        finished: Finished = []
        with suppress(Empty):
            message = messages.get(timeout=STEP_SECONDS)
            while message is not None:
                request = self.running.pop(message["id"], None)
                if request is not None:  # else aborted on this side while the message was in transit
                    if "error" in message:
                        raise RunError(f"engine.urls={self._server.url}: rejects a request: {message['error']}")
                    finished.append((request.key, Completion(**message["completion"])))
                message = messages.get_nowait()
            self._messages = None
        return finished

    def abort(self, keys: Collection[Hashable] | None = None) -> None:
        numbers = [number for number, one in self.running.items() if keys is None or one.key in keys]
        sent = [number for number in numbers if number <= self._last_sent]
        for number in numbers:
            del self.running[number]
        if sent and self._messages is not None:
            try:
                self._server.post("/engine/abort", {"client": self._server.client, "ids": sent})
            except (Unavailable, RequestRejected):
                self._messages = None  # the server aborts all requests of a lost connection

    def top_logprobs(self, token_ids: Sequence[int], k: int) -> list[dict[int, float]]:
        try:
            entries = self._server.post("/engine/top_logprobs", {"token_ids": list(token_ids), "k": k})
        except RequestRejected as error:
            raise ValueError(str(error)) from None
        except Unavailable as error:
            raise ValueError(f"the engine server does not answer ({error})") from None
        return [{int(token): value for token, value in entry.items()} for entry in entries]

    def weights_changed(self, policy_version: int) -> None:
        self._policy_version = policy_version

        def post() -> None:
            self._restore_if_restarted()
            self._server.post("/engine/version", {"policy_version": policy_version})

        self._server.until_answered(post)

    def close(self) -> None:
        self.running.clear()
        self._server.close()


class EngineGroup(RolloutEngine):
    """Sends each request to the engine with the fewest running requests."""

    def __init__(self, engines: Sequence[RemoteEngine], max_num_seqs: int | None = None) -> None:
        """max_num_seqs: maximum requests submitted at the same time. Default: the engines' combined capacity."""
        self._engines = engines
        self.max_num_seqs = max_num_seqs or sum(engine.max_num_seqs for engine in engines)
        self.admission_cost = max(engine.admission_cost for engine in engines)

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            min(self._engines, key=lambda engine: len(engine.running)).submit([request])

    def step(self) -> Finished:
        return [pair for engine in self._engines for pair in engine.step()]

    def abort(self, keys: Collection[Hashable] | None = None) -> None:
        for engine in self._engines:
            engine.abort(keys)

    def top_logprobs(self, token_ids: Sequence[int], k: int) -> list[dict[int, float]]:
        return self._engines[0].top_logprobs(token_ids, k)

    def weights_changed(self, policy_version: int) -> None:
        for engine in self._engines:
            engine.weights_changed(policy_version)

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
