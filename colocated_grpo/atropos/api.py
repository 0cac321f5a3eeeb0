"""`python -m colocated_grpo.atropos.api`: Atropos' API server, for installations without atroposlib.

Endpoints and JSON are those of `run-api` (atroposlib 0.4.0). The state is in memory and is lost when the process exits.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from gzip import compress

import msgspec
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from colocated_grpo.atropos.exchange import Exchange, NotRegistered, QueueFull, UnknownEnvironment, Volume
from colocated_grpo.atropos.posted import InvalidGroup, no_group, read_group, read_groups
from colocated_grpo.atropos.wire import EnvIdentifier, EnvRegistration, Registration
from colocated_grpo.runtime.program import raise_descriptor_limit
from colocated_grpo.settings.addresses import is_loopback
from colocated_grpo.types import JsonObject
from colocated_grpo.web.bodies import BodyLimit, InvalidBody, off_the_loop, read_json
from colocated_grpo.web.guards import Hosts, OwnRequests, RequireApiKey, is_from_browser
from colocated_grpo.web.server import Connection
from colocated_grpo.web.shape import BodyShape

MAX_BODY_BYTES = 64 << 20
"""64 sequences of 32,768 tokens, with masks and log-probabilities: 32 bytes of text a token."""
MAX_QUEUED = 1 << 20
"""Sequences in the queue. Further posts are rejected with status 503."""
MAX_QUEUED_BYTES = 16 << 30
"""Text of the groups in the queue: its memory. Further posts are rejected with status 503."""
GROUP_PATHS = frozenset({"/scored_data", "/scored_data_list"})
GROUPS = BodyShape(values=MAX_BODY_BYTES, containers=MAX_BODY_BYTES, strings=1 << 18, depth=40)
"""Bounds of a request body. Numbers are not limited here: `posted` checks them one sequence at a time."""
PUBLIC_PATHS = frozenset({"/"})
GZIP_MIN_BYTES = 1000
GZIP_LEVEL = 1
"""Higher levels take several times as long."""


def create_app(
    *,
    hosts: Hosts,
    api_key: str | None = None,
    origins: Sequence[str] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
    max_queued: int = MAX_QUEUED,
    max_queued_bytes: int = MAX_QUEUED_BYTES,
) -> ASGIApp:
    """Return the server with an empty state of its own. The state needs no locks on a single event loop.

    hosts: not checked if there is an API key. origins: of web pages that may send requests.
    """
    app = FastAPI(title="Atropos API", docs_url=None, redoc_url=None, openapi_url=None)
    exchange = Exchange(Volume(max_queued, max_queued_bytes))
    _add_exception_handlers(app)
    _add_trainer_routes(app, exchange)
    _add_environment_routes(app, exchange)
    guarded: ASGIApp = BodyLimit(app, max_body_bytes, _error_response, GROUPS, GROUP_PATHS)
    if api_key is not None:
        guarded = RequireApiKey(guarded, api_key, PUBLIC_PATHS)
    if origins:
        guarded = CORSMiddleware(guarded, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return OwnRequests(guarded, hosts if api_key is None else None, _error_response, origins)


def _error_response(status: int, message: str) -> JSONResponse:
    return JSONResponse({"detail": message}, status)


def _add_exception_handlers(app: FastAPI) -> None:
    @app.exception_handler(InvalidBody)
    async def invalid_body(_request: Request, error: InvalidBody) -> JSONResponse:
        return _error_response(422, str(error))

    @app.exception_handler(InvalidGroup)
    async def invalid_group(_request: Request, error: InvalidGroup) -> JSONResponse:
        return _error_response(422, str(error))

    @app.exception_handler(UnknownEnvironment)
    async def unknown_environment(_request: Request, error: UnknownEnvironment) -> JSONResponse:
        return _error_response(404, str(error))

    @app.exception_handler(QueueFull)
    async def queue_full(_request: Request, error: QueueFull) -> JSONResponse:
        return _error_response(503, str(error))


def _add_trainer_routes(app: FastAPI, exchange: Exchange) -> None:
    @app.get("/")
    async def root() -> dict[str, str]:
        return {"message": "AtroposLib API"}

    @app.post("/register")
    async def register(request: Request) -> JsonObject:
        return exchange.register(await read_json(request, _REGISTRATION.decode))

    # Both verbs: clients of atroposlib take batches and reset with GET. A browser fetches any address that a page or a
    # person names, so it has to use POST, which marks its origin.
    @app.get("/batch")
    @app.post("/batch")
    async def batch(request: Request) -> Response:
        _refuse_get_of_browsers(request)
        try:
            groups = exchange.batch()
        except NotRegistered:
            message = "Trainer not registered. Call /register first."
            return JSONResponse({"status": "error", "message": message, "batch": []})
        text = b"null" if groups is None else b"[" + b",".join(group.text for group in groups) + b"]"
        return await _json(request, b'{"batch":' + text + b"}")

    @app.get("/info")
    async def info() -> dict[str, int]:
        return exchange.info()

    @app.get("/wandb_info")
    async def wandb_info() -> dict[str, str | None]:
        return exchange.wandb_info()

    @app.get("/status")
    async def status() -> dict[str, int]:
        return exchange.status()

    @app.get("/latest_example")
    async def latest_example(request: Request) -> Response:
        group = exchange.latest_example()
        return JSONResponse(no_group()) if group is None else await _json(request, group.text)

    @app.get("/reset_data")
    @app.post("/reset_data")
    async def reset_data(request: Request) -> PlainTextResponse:
        _refuse_get_of_browsers(request)
        exchange.reset()
        return PlainTextResponse("Reset successful")


def _refuse_get_of_browsers(request: Request) -> None:
    if request.method == "GET" and is_from_browser(request.headers):
        raise HTTPException(405, f"use POST {request.url.path} from a browser", {"Allow": "POST"})


async def _json(request: Request, text: bytes) -> Response:
    """Return a response with this text, compressed on another thread if the client accepts that."""
    headers = {"Vary": "Accept-Encoding"}
    if len(text) >= GZIP_MIN_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        text = await off_the_loop(partial(compress, text, GZIP_LEVEL))
        headers["Content-Encoding"] = "gzip"
    return Response(text, media_type="application/json", headers=headers)


def _add_environment_routes(app: FastAPI, exchange: Exchange) -> None:
    @app.post("/register-env")
    async def register_env(request: Request) -> JsonObject:
        return exchange.register_env(await read_json(request, _ENV_REGISTRATION.decode))

    @app.post("/disconnect-env")
    async def disconnect_env(request: Request) -> JsonObject:
        return exchange.disconnect_env((await read_json(request, _ENV_IDENTIFIER.decode)).env_id)

    @app.get("/status-env")
    async def status_env(request: Request) -> JsonObject:
        return exchange.status_env((await read_json(request, _ENV_IDENTIFIER.decode)).env_id)

    @app.post("/scored_data")
    async def scored_data(request: Request) -> JsonObject:
        return exchange.post(await read_json(request, read_group))

    @app.post("/scored_data_list")
    async def scored_data_list(request: Request) -> JsonObject:
        groups = await read_json(request, read_groups)
        responses = exchange.post_all(groups)
        buffered = [response["buffer_size"] for response in responses if response["status"] == "buffered"]
        counts = {"buffered": len(buffered), "last_buffer_size": buffered[-1]} if buffered else {}
        return {"status": "received", "groups_processed": len(groups), **counts}


_REGISTRATION = msgspec.json.Decoder(Registration)
_ENV_REGISTRATION, _ENV_IDENTIFIER = msgspec.json.Decoder(EnvRegistration), msgspec.json.Decoder(EnvIdentifier)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="colocated_grpo.atropos.api", description="Atropos' API server. Its state is lost when it exits."
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 allows other machines")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--max-body-bytes", type=int, default=MAX_BODY_BYTES, help="limit of a decompressed request body"
    )
    parser.add_argument("--max-queued", type=int, default=MAX_QUEUED, help="limit of sequences queued for the trainer")
    parser.add_argument(
        "--max-queued-bytes", type=int, default=MAX_QUEUED_BYTES, help="limit of the memory for queued groups"
    )
    parser.add_argument(
        "--api-key-variable",
        metavar="NAME",
        help="environment variable with a key; environments send it in --env.rollout_server_url http://any:KEY@HOST:PORT",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a further name of this machine that clients use; repeat for several (not needed with a key)",
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="URL",
        help="origin of web pages that may send requests, such as http://localhost:3000; repeat for several",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    api_key = os.environ.get(options.api_key_variable) if options.api_key_variable else None
    if options.api_key_variable and not api_key:
        parser.exit(2, f"error: --api-key-variable={options.api_key_variable}: this environment variable is not set\n")
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
    uvicorn.run(app, host=options.host, port=options.port, http=Connection, ws="none", log_level="error")


if __name__ == "__main__":
    main()
