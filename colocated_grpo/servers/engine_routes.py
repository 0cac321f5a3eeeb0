"""HTTP routes for a trainer that drives this engine remotely: /engine/*. The client is `servers/remote.py`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from colocated_grpo.rollout.engine import Request as EngineRequest
from colocated_grpo.rollout.engine import Sampling, TokenDelta
from colocated_grpo.rollout.inbox import Inbox
from colocated_grpo.servers.control_routes import result_or_400
from colocated_grpo.servers.engine_control import EngineControl
from colocated_grpo.servers.rank_links import Outcome, PeerRequests
from colocated_grpo.servers.remote import CONFLICT
from colocated_grpo.servers.request_bodies import StrictBody, TokenIds
from colocated_grpo.servers.text import Limits
from colocated_grpo.types import JsonObject
from colocated_grpo.web.bodies import read_json

HEARTBEAT_SECONDS = 5.0
LARGE_PATHS = frozenset({"/engine/requests", "/engine/top_logprobs"})
"""Routes whose request bodies contain tokens."""
MAX_REQUESTS_PER_POST = 4096
SEED_LIMIT = 1 << 63

Number = Annotated[int, Field(ge=0, lt=SEED_LIMIT)]
ClientName = Annotated[str, Field(min_length=16, max_length=64)]


class RequestBody(StrictBody):
    """A request written by `remote.request_message`. It has a number of the client in place of the request's key."""

    model_config = ConfigDict(allow_inf_nan=False)
    id: Number
    token_ids: TokenIds
    seed: int = Field(ge=-SEED_LIMIT, lt=SEED_LIMIT)
    sampling: Sampling
    pattern: str | None
    stream: bool

    def request(self, key: Hashable) -> EngineRequest:
        return EngineRequest(
            key=key,
            token_ids=self.token_ids,
            seed=self.seed,
            sampling=self.sampling,
            pattern=self.pattern,
            stream=self.stream,
        )


class RequestsBody(StrictBody):
    client: ClientName
    policy_version: int
    """Weight version required for sampling the requests."""
    requests: list[RequestBody] = Field(max_length=MAX_REQUESTS_PER_POST, fail_fast=True)


class AbortBody(StrictBody):
    client: ClientName
    ids: list[Number] = Field(fail_fast=True)


class VersionBody(StrictBody):
    policy_version: int


class TopLogprobsBody(StrictBody):
    token_ids: Annotated[TokenIds, Field(min_length=2)]
    k: int = Field(ge=0)


class TrainerSession:
    """Requests of one client and the messages for its stream. Use only on the event loop's thread."""

    def __init__(self, client: str, inbox: Inbox) -> None:
        self.client = client
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[JsonObject | None] = asyncio.Queue()
        self.requests = PeerRequests(inbox, self._send)

    def put(self, bodies: Sequence[RequestBody]) -> None:
        self.requests.put({body.id: body.request((self.client, body.id)) for body in bodies})

    def _send(self, number: int, outcome: Outcome) -> None:
        with suppress(RuntimeError):  # the loop is closed because the server is shutting down
            self._loop.call_soon_threadsafe(self._queue, number, outcome)

    def _queue(self, number: int, outcome: Outcome) -> None:
        """Queue the message. If the engine has stopped, queue none: the client posts its requests to the next
        engine."""
        if isinstance(outcome, TokenDelta):
            self._messages.put_nowait({"id": number, "delta": outcome})
        elif isinstance(outcome, str):
            self._messages.put_nowait({"id": number, "error": outcome})
        elif outcome is not None:
            self._messages.put_nowait({"id": number, "completion": asdict(outcome)})

    async def lines(self) -> AsyncIterator[str]:
        """Yield an opening line and one line per message. After HEARTBEAT_SECONDS without a message, yield an empty
        line."""
        yield json.dumps({"client": self.client}) + "\n"
        while True:
            try:
                message = await asyncio.wait_for(self._messages.get(), HEARTBEAT_SECONDS)
            except TimeoutError:
                yield "\n"
                continue
            if message is None:
                return
            yield json.dumps(message) + "\n"

    def close(self) -> None:
        """End the stream and abort all requests."""
        self.requests.cancel()
        self._messages.put_nowait(None)


class Sessions:
    """Open sessions by client."""

    def __init__(self, inbox: Inbox, note: Callable[[str], None]) -> None:
        """note: logs one line."""
        self._inbox = inbox
        self._note = note
        self._open: dict[str, TrainerSession] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, client: str) -> TrainerSession:
        """Return a new session. It replaces the client's earlier session, whose connection was lost."""
        self._loop = asyncio.get_running_loop()
        if (former := self._open.pop(client, None)) is not None:
            former.close()
        else:
            self._note(f"trainer {client[:8]} has connected")
        self._open[client] = session = TrainerSession(client, self._inbox)
        return session

    def get(self, client: str) -> TrainerSession | None:
        return self._open.get(client)

    def close(self, session: TrainerSession) -> None:
        session.close()
        if self._open.get(session.client) is session:
            del self._open[session.client]
            self._note(f"trainer {session.client[:8]} has disconnected; another may connect")

    def close_all(self) -> None:
        """End all streams before the server closes, because open streams would delay closing. Call from another
        thread."""

        def close() -> None:
            for session in list(self._open.values()):
                self.close(session)

        if self._loop is not None:
            self._loop.call_soon_threadsafe(close)


class SessionStream(StreamingResponse):
    """The response that carries a session's messages. The session ends with it."""

    def __init__(self, session: TrainerSession, sessions: Sessions) -> None:
        super().__init__(session.lines(), media_type="application/x-ndjson")
        self._session = session
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._sessions.close(self._session)


def add_engine_routes(app: FastAPI, control: EngineControl, inbox: Inbox, sessions: Sessions, limits: Limits) -> None:
    _add_request_routes(app, control, sessions, limits)

    @app.post("/engine/version")
    async def version(request: Request) -> JSONResponse:
        body = await read_json(request, VersionBody.from_json)
        return JSONResponse(await result_or_400(control.set_version(body.policy_version)))

    @app.post("/engine/top_logprobs")
    async def top_logprobs(request: Request) -> JSONResponse:
        body = await read_json(request, TopLogprobsBody.from_json)
        limits.check_prompt(body.token_ids)
        call = inbox.call(lambda engine: engine.top_logprobs(body.token_ids, body.k))
        return JSONResponse(await result_or_400(call))


def _add_request_routes(app: FastAPI, control: EngineControl, sessions: Sessions, limits: Limits) -> None:
    @app.get("/engine/stream")
    async def stream(client: ClientName) -> SessionStream:
        return SessionStream(sessions.open(client), sessions)

    @app.post("/engine/requests")
    async def requests(request: Request) -> JSONResponse:
        body = await read_json(request, RequestsBody.from_json)
        session = sessions.get(body.client)
        if session is None:
            raise HTTPException(CONFLICT, "no stream of this client is open; GET /engine/stream first")
        if body.policy_version != control.policy_version:
            raise HTTPException(
                CONFLICT, f"the weights have version {control.policy_version}, not {body.policy_version}"
            )
        for one in body.requests:
            limits.check_prompt(one.token_ids)
        session.put(body.requests)
        return JSONResponse(None)

    @app.post("/engine/abort")
    async def abort(request: Request) -> JSONResponse:
        body = await read_json(request, AbortBody.from_json)
        if (session := sessions.get(body.client)) is not None:
            session.requests.cancel(body.ids)
        return JSONResponse(None)
