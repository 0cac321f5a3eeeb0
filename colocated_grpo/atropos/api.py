"""`python -m colocated_grpo.atropos.api`: Atropos' API server, for installations without atroposlib.

Endpoints and JSON are those of `run-api` (atroposlib 0.4.0). The state is in memory and is lost when the process exits.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from gzip import compress
from typing import Annotated, Any, TypeVar

import msgspec
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from colocated_grpo.atropos import exchange as state
from colocated_grpo.atropos.reader import Overrides, Registration
from colocated_grpo.runtime.program import raise_descriptor_limit
from colocated_grpo.settings.atropos import is_loopback
from colocated_grpo.types import JsonObject
from colocated_grpo.web.bodies import BodyLimit, BodyShape, InvalidBody, off_the_loop, read_json
from colocated_grpo.web.server import Connection, Hosts, OwnRequests, RareNote, RequireApiKey

MAX_BODY_BYTES = 64 << 20
"""64 sequences of 32,768 tokens with masks and log-probabilities, at 32 bytes of text per token."""
MAX_QUEUED = 1 << 20
"""Maximum sequences in the queue. Further posts are rejected with status 503."""
MAX_QUEUED_BYTES = 4 << 30
"""Maximum bytes of the queue: the decompressed JSON text of its groups. Further posts are rejected with status 503."""
GROUP_PATHS = frozenset({"/scored_data", "/scored_data_list"})
GROUPS = BodyShape(values=MAX_BODY_BYTES, containers=1 << 20, strings=1 << 18, depth=40)
"""Bounds of a request body. Numbers are not limited here, because they are parsed one sequence at a time."""
MAX_SEQUENCES = 1 << 14
MAX_ROW_NUMBERS = 1 << 20
"""Maximum numbers in one sequence until the trainer has registered its own maximum. Bounds the memory for a row."""
GZIP_MIN_BYTES = 1000
GZIP_LEVEL = 1
"""Higher levels take several times as long."""

T = TypeVar("T")
Rows = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_SEQUENCES)]
ABSENT = msgspec.Raw(b"null")


class PostedGroup(msgspec.Struct):
    """The fields that a trainer reads. Numbers stay JSON text, which takes a fifth of the memory of parsed lists."""

    tokens: Rows
    masks: Rows
    scores: msgspec.Raw
    advantages: Rows | None = None
    ref_logprobs: Rows | None = None
    inference_logprobs: Rows | None = None
    generation_params: Overrides | None = None
    overrides: Annotated[list[Overrides], msgspec.Meta(max_length=MAX_SEQUENCES)] | None = None
    group_overrides: Overrides | None = None
    images: msgspec.Raw = ABSENT
    """Stored as true if the group has images."""
    env_id: int | None = None


NOT_KEPT = b',"messages":null,"distill_token_ids":null,"distill_logprobs":null}'
ROWS: dict[str, msgspec.json.Decoder[Any]] = {
    **dict.fromkeys(("tokens", "masks"), msgspec.json.Decoder(list[int])),
    **dict.fromkeys(("advantages", "ref_logprobs", "inference_logprobs"), msgspec.json.Decoder(list[float])),
}
SCORES = msgspec.json.Decoder(Annotated[list[float | bool], msgspec.Meta(max_length=MAX_SEQUENCES)])
EMPTY_GROUP = {name: [] for name in [*ROWS, "scores", "generation_params", "messages", "images"]}


def read_group(posted: PostedGroup, longest: int) -> state.ScoredGroup:
    """Check that the trainer can parse a group. longest: maximum numbers of a sequence. Raises InvalidGroup."""
    for name, decoder in ROWS.items():
        for index, row in enumerate(getattr(posted, name) or []):
            _parsed(f"{name}: sequence {index}", row, decoder, longest)
    # atroposlib takes booleans too
    scores = [float(score) for score in _parsed("scores", posted.scores, SCORES, MAX_SEQUENCES)]
    has_images = bytes(posted.images).strip(b"[]{}nul, \t\r\n") != b""
    kept = msgspec.structs.replace(
        posted, scores=msgspec.Raw(msgspec.json.encode(scores)), images=msgspec.Raw(b"true") if has_images else ABSENT
    )
    return state.ScoredGroup(len(posted.tokens), posted.env_id, (msgspec.json.encode(kept)[:-1] + NOT_KEPT,))


def _parsed(name: str, row: msgspec.Raw, decoder: msgspec.json.Decoder[T], longest: int) -> T:
    text = bytes(row)
    if text.count(b",") >= longest:
        raise state.InvalidGroup(f"{name}: more than {longest} numbers")
    try:
        return decoder.decode(text)
    except msgspec.MsgspecError as error:
        raise state.InvalidGroup(f"{name}: {error}") from None


def create_app(
    *,
    hosts: Hosts,
    api_key: str | None = None,
    origins: Sequence[str] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
    max_queued: int = MAX_QUEUED,
    max_queued_bytes: int = MAX_QUEUED_BYTES,
) -> ASGIApp:
    """Return the server with its own state, which needs no locks on one event loop. hosts: unused with an API key."""
    app = FastAPI(title="Atropos API", docs_url=None, redoc_url=None, openapi_url=None)
    exchange = state.Exchange(max_queued, max_queued_bytes)
    note = RareNote(partial(print, file=sys.stderr, flush=True))  # clients do not log the text of an error response
    statuses = {InvalidBody: 422, state.InvalidGroup: 422, state.UnknownEnvironment: 404, state.QueueFull: 503}
    for error, status in statuses.items():
        app.add_exception_handler(error, partial(_on_exception, status, note))
    _add_trainer_routes(app, exchange)
    _add_environment_routes(app, exchange)
    guarded: ASGIApp = BodyLimit(app, max_body_bytes, GROUPS, GROUP_PATHS)
    if api_key is not None:
        guarded = RequireApiKey(guarded, api_key, {"/"})
    if origins:
        guarded = CORSMiddleware(guarded, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return OwnRequests(guarded, hosts if api_key is None else None, origins)


async def _on_exception(status: int, note: Callable[[str], None], request: Request, error: Exception) -> JSONResponse:
    note(f"rejected {request.method} {request.url.path} with {status}: {error}")
    return JSONResponse({"detail": str(error)}, status)


def _add_trainer_routes(app: FastAPI, exchange: state.Exchange) -> None:
    registration = msgspec.json.Decoder(Registration)

    @app.get("/")
    async def root() -> dict[str, str]:
        return {"message": "AtroposLib API"}

    @app.post("/register")
    async def register(request: Request) -> JsonObject:
        return exchange.register(await read_json(request, registration.decode))

    # GET and POST: atroposlib's clients use GET for batch and reset. A browser fetches any address on a page by GET, so
    # browsers must use POST, which carries the page's origin.
    @app.get("/batch")
    @app.post("/batch")
    async def batch(request: Request) -> Response:
        _refuse_get_of_browsers(request)
        if exchange.trainer is None:
            message = "Trainer not registered. Call /register first."
            return JSONResponse({"status": "error", "message": message, "batch": []})
        groups = exchange.batch()
        texts = [text for group in groups or [] for text in group.texts]
        return await _json(request, b'{"batch":' + (b"[" + b",".join(texts) + b"]" if texts else b"null") + b"}")

    @app.get("/info")
    async def info() -> dict[str, int]:
        if (trainer := exchange.trainer) is None:
            return {"batch_size": -1, "max_token_len": -1}
        return {"batch_size": trainer.batch_size, "max_token_len": trainer.max_token_len}

    @app.get("/wandb_info")
    async def wandb_info() -> dict[str, str | None]:
        if (trainer := exchange.trainer) is None:
            return {"group": None, "project": None}
        return {"group": trainer.wandb_group, "project": trainer.wandb_project}

    @app.get("/status")
    async def status() -> dict[str, int]:
        return exchange.status()

    @app.get("/latest_example")
    async def latest_example(request: Request) -> Response:
        return JSONResponse(EMPTY_GROUP) if exchange.latest is None else await _json(request, exchange.latest)

    @app.get("/reset_data")
    @app.post("/reset_data")
    async def reset_data(request: Request) -> PlainTextResponse:
        _refuse_get_of_browsers(request)
        exchange.reset()
        return PlainTextResponse("Reset successful")


def _refuse_get_of_browsers(request: Request) -> None:
    # Browsers without Sec-Fetch-Site are recognised by User-Agent.
    headers = request.headers
    is_browser = "sec-fetch-site" in headers or headers.get("user-agent", "").startswith("Mozilla/")
    if request.method == "GET" and is_browser:
        raise HTTPException(405, f"use POST {request.url.path} from a browser", {"Allow": "POST"})


async def _json(request: Request, text: bytes) -> Response:
    """Return a response with this text, compressed on another thread if the client accepts gzip."""
    headers = {"Vary": "Accept-Encoding"}
    if len(text) >= GZIP_MIN_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        text = await off_the_loop(partial(compress, text, GZIP_LEVEL))
        headers["Content-Encoding"] = "gzip"
    return Response(text, media_type="application/json", headers=headers)


class EnvIdentifier(msgspec.Struct):
    env_id: int


def _add_environment_routes(app: FastAPI, exchange: state.Exchange) -> None:
    env_registration, env_identifier = msgspec.json.Decoder(state.EnvRegistration), msgspec.json.Decoder(EnvIdentifier)
    one, several = msgspec.json.Decoder(PostedGroup), msgspec.json.Decoder(list[PostedGroup])

    def read(posted: PostedGroup) -> state.ScoredGroup:
        return read_group(posted, MAX_ROW_NUMBERS if exchange.trainer is None else exchange.trainer.max_token_len)

    @app.post("/register-env")
    async def register_env(request: Request) -> JsonObject:
        return exchange.register_env(await read_json(request, env_registration.decode))

    @app.post("/disconnect-env")
    async def disconnect_env(request: Request) -> JsonObject:
        return exchange.disconnect_env((await read_json(request, env_identifier.decode)).env_id)

    @app.get("/status-env")
    async def status_env(request: Request) -> JsonObject:
        return exchange.status_env((await read_json(request, env_identifier.decode)).env_id)

    @app.post("/scored_data")
    async def scored_data(request: Request) -> JsonObject:
        group = await read_json(request, lambda body: read(one.decode(body)))
        return exchange.post([group])[0]

    @app.post("/scored_data_list")
    async def scored_data_list(request: Request) -> JsonObject:
        groups = await read_json(request, lambda body: [read(posted) for posted in several.decode(body)])
        responses = exchange.post(groups)
        buffered = [response["buffer_size"] for response in responses if response["status"] == "buffered"]
        counts = {"buffered": len(buffered), "last_buffer_size": buffered[-1]} if buffered else {}
        return {"status": "received", "groups_processed": len(groups), **counts}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="colocated_grpo.atropos.api", description="Atropos' API server. Its state is lost when it exits."
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 allows other machines")
    add("--port", type=int, default=8000)
    add("--max-body-bytes", type=int, default=MAX_BODY_BYTES, help="limit of a decompressed request body")
    add("--max-queued", type=int, default=MAX_QUEUED, help="limit of sequences queued for the trainer")
    add("--max-queued-bytes", type=int, default=MAX_QUEUED_BYTES, help="limit of the memory for queued groups")
    key = "environment variable with a key; environments send it in --env.rollout_server_url http://any:KEY@HOST:PORT"
    add("--api-key-variable", metavar="NAME", help=key)
    several = partial(add, action="append", default=[])
    name = "a further name of this machine that clients use; repeat for several (not needed with a key)"
    several("--allow-host", metavar="NAME", help=name)
    origin = "origin of web pages that may send requests, such as http://localhost:3000; repeat for several"
    several("--allow-origin", metavar="URL", help=origin)
    options = parser.parse_args(arguments)
    variable = options.api_key_variable
    api_key = os.environ.get(variable) if variable else None
    if variable and not api_key:
        parser.exit(2, f"error: --api-key-variable={variable}: this environment variable is not set\n")
    if api_key is None and not is_loopback(options.host):
        warning = f"--host={options.host}: every machine that reaches it can post groups and reset the server"
        print(f"warning: {warning}; set --api-key-variable", file=sys.stderr)
    app = create_app(
        hosts=Hosts(options.host, options.allow_host),
        api_key=api_key,
        origins=options.allow_origin,
        max_body_bytes=options.max_body_bytes,
        max_queued=options.max_queued,
        max_queued_bytes=options.max_queued_bytes,
    )
    raise_descriptor_limit()
    uvicorn.run(
        app, host=options.host, port=options.port, http=Connection, ws="none", lifespan="off", log_level="error"
    )


if __name__ == "__main__":
    main()
