"""HTTP routes for a trainer that drives this engine remotely: /engine/*. The client is `servers/remote.py`."""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ConfigDict, Field
from starlette.exceptions import HTTPException

from colocated_grpo.rollout.engine import Request as EngineRequest
from colocated_grpo.rollout.inbox import Inbox
from colocated_grpo.servers.engine_control import EngineControl
from colocated_grpo.servers.engine_servers import CONFLICT, REQUESTS_PER_POST, TRAINER_HEADER
from colocated_grpo.servers.rank_links import Outcome, PeerRequests, result_of
from colocated_grpo.servers.request_bodies import MAX_LOGPROBS, SamplingParameters, StrictBody, TokenIds
from colocated_grpo.servers.responses import ClosingStream
from colocated_grpo.servers.text import Limits
from colocated_grpo.types import Completion, JsonObject
from colocated_grpo.web.bodies import read_json

HEARTBEAT_SECONDS = 5.0
LARGE_PATHS = frozenset({"/engine/requests", "/engine/top_logprobs"})
"""Routes whose request bodies contain tokens."""
MAX_PATTERN_CHARACTERS = 1 << 14
SEED_LIMIT = 1 << 63
FORBIDDEN = 403

Number = Annotated[int, Field(ge=0, lt=SEED_LIMIT)]
ClientName = Annotated[str, Field(min_length=16, max_length=64)]


class RequestBody(StrictBody):
    """A request of `RemoteEngine`. It has a number of the client in place of the request's key."""

    model_config = ConfigDict(allow_inf_nan=False)
    id: Number
    token_ids: TokenIds
    seed: int = Field(ge=-SEED_LIMIT, lt=SEED_LIMIT)
    sampling: SamplingParameters
    pattern: Annotated[str, Field(max_length=MAX_PATTERN_CHARACTERS)] | None

    def request(self, key: Hashable, limits: Limits) -> EngineRequest:
        """Raises InvalidRequest for a request beyond the limits."""
        sampling = self.sampling.for_engine(self.token_ids, limits)
        return EngineRequest(key=key, token_ids=self.token_ids, seed=self.seed, sampling=sampling, pattern=self.pattern)


class RequestsBody(StrictBody):
    client: ClientName
    policy_version: Number
    """Weight version required for sampling the requests."""
    requests: list[RequestBody] = Field(max_length=REQUESTS_PER_POST, fail_fast=True)


class AbortBody(StrictBody):
    client: ClientName
    ids: Annotated[list[Number], Field(fail_fast=True)] | None
    """None: all, and end the stream."""


class VersionBody(StrictBody):
    policy_version: Number


class TopLogprobsBody(StrictBody):
    token_ids: Annotated[TokenIds, Field(min_length=2)]
    k: int = Field(ge=0, le=MAX_LOGPROBS)


class TrainerSession:
    """Requests of one rank of a trainer and the messages for its stream. Use only on the event loop's thread."""

    def __init__(self, client: str, inbox: Inbox) -> None:
        self.client = client
        self.loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[JsonObject | None] = asyncio.Queue()
        self.requests = PeerRequests(inbox, self._send)

    def _send(self, number: int, outcome: Outcome) -> None:
        with suppress(RuntimeError):  # the loop is closed because the server is shutting down
            self.loop.call_soon_threadsafe(self._queue, number, outcome)

    def _queue(self, number: int, outcome: Outcome) -> None:
        """Queue the message, unless the engine has stopped: the client then posts its requests to the next engine."""
        if isinstance(outcome, Completion):
            self._messages.put_nowait({"id": number, "completion": asdict(outcome)})
        elif isinstance(outcome, str):
            self._messages.put_nowait({"id": number, "error": outcome})

    async def lines(self) -> AsyncIterator[str]:
        """Yield an opening line and one line per message. An empty line after HEARTBEAT_SECONDS without one."""
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
            await asyncio.sleep(0)  # let other requests run

    def close(self) -> None:
        """End the stream and abort all requests."""
        self.requests.cancel()
        self._messages.put_nowait(None)


class Sessions:
    """Open sessions by client. All of them belong to one trainer, which is attached to the server meanwhile."""

    def __init__(self, inbox: Inbox, note: Callable[[str], None], attached: Callable[[], object]) -> None:
        """note: logs one line. attached: called when a trainer attaches."""
        self._inbox = inbox
        self._attached = attached
        self.note = note
        self._open: dict[str, TrainerSession] = {}
        self._trainer = ""

    async def allow_command(self, request: Request) -> None:
        """Raise HTTPException for a client that is not the attached trainer, if there is one."""
        given = request.headers.get(TRAINER_HEADER, "").encode()
        if self._open and not hmac.compare_digest(given, self._trainer.encode()):
            raise HTTPException(FORBIDDEN, "a trainer is attached to this server; until it ends, no other client may")

    async def allow_trainer(self, request: Request) -> None:
        """Raise HTTPException for a client that is not the attached trainer."""
        await self.allow_command(request)
        if not self._open:
            raise HTTPException(CONFLICT, "no trainer is attached; GET /engine/stream first")

    def open(self, client: str, trainer: str) -> TrainerSession:
        """Return a new session, in place of the client's lost one. Raises HTTPException for another trainer."""
        if not trainer:
            raise HTTPException(CONFLICT, f"{TRAINER_HEADER}: missing")
        if self._open and trainer != self._trainer:
            raise HTTPException(CONFLICT, "another trainer is attached to this server")
        if not self._open:
            self._attached()
        self._trainer = trainer
        if (former := self._open.pop(client, None)) is not None:
            former.close()
        else:
            self.note(f"trainer {client[:8]} has connected")
        self._open[client] = session = TrainerSession(client, self._inbox)
        return session

    def get(self, client: str) -> TrainerSession | None:
        return self._open.get(client)

    async def close(self, session: TrainerSession) -> None:
        session.close()
        if self._open.get(session.client) is session:
            del self._open[session.client]
            self.note(f"trainer {session.client[:8]} has disconnected; another may connect")

    def close_all(self) -> None:
        """End all streams before the server closes, because open streams would delay it. Call from another thread."""
        for session in list(self._open.values()):
            session.loop.call_soon_threadsafe(session.close)


def add_engine_routes(app: FastAPI, control: EngineControl, inbox: Inbox, sessions: Sessions, limits: Limits) -> None:
    @app.get("/engine/stream")
    async def stream(request: Request, client: ClientName) -> ClosingStream:
        session = sessions.open(client, request.headers.get(TRAINER_HEADER, ""))
        return ClosingStream(session.lines(), lambda: sessions.close(session), "application/x-ndjson")

    routes = APIRouter(prefix="/engine", dependencies=[Depends(sessions.allow_trainer)])

    @routes.post("/version")
    async def version(request: Request) -> JSONResponse:
        body = await read_json(request, VersionBody.from_json)
        return JSONResponse(await result_of(control.set_version(body.policy_version)))

    @routes.post("/top_logprobs")
    async def top_logprobs(request: Request) -> JSONResponse:
        body = await read_json(request, TopLogprobsBody.from_json)
        limits.check_prompt(body.token_ids)
        call = inbox.calls.submit(lambda engine: engine.top_logprobs(body.token_ids, body.k))
        return JSONResponse(await result_of(call))

    @routes.post("/requests")
    async def requests(request: Request) -> JSONResponse:
        body = await read_json(request, RequestsBody.from_json)
        if (session := sessions.get(body.client)) is None:
            raise HTTPException(CONFLICT, "no stream of this client is open; GET /engine/stream first")
        if body.policy_version != (version := control.policy_version):
            raise HTTPException(CONFLICT, f"the weights have version {version}, not {body.policy_version}")
        session.requests.put({one.id: one.request((body.client, one.id), limits) for one in body.requests})
        return JSONResponse(None)

    @routes.post("/abort")
    async def abort(request: Request) -> JSONResponse:
        body = await read_json(request, AbortBody.from_json)
        if (session := sessions.get(body.client)) is not None:
            session.close() if body.ids is None else session.requests.cancel(body.ids)
        return JSONResponse(None)

    app.include_router(routes)
