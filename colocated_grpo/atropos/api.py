"""`python -m colocated_grpo.atropos.api`: Atropos' API server, for installations without atroposlib.

Endpoints and JSON are those of `run-api` (atroposlib 0.4.0). The state is in memory and is lost when the process exits.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware

from colocated_grpo.atropos.exchange import Exchange, QueueFull, UnknownEnvironment
from colocated_grpo.atropos.wire import EnvIdentifier, EnvRegistration, Registration, ScoredData
from colocated_grpo.runtime.descriptors import raise_descriptor_limit
from colocated_grpo.types import JsonObject
from colocated_grpo.web.bodies import BodyLimit
from colocated_grpo.web.server import Connection

MAX_BODY_BYTES = 256 << 20
MAX_QUEUED = 1 << 20
"""Sequences in the queue: tens of GB at a thousand tokens each. Further posts are rejected with status 503."""
GZIP_MIN_BYTES = 1000
GZIP_LEVEL = 1
"""Compression blocks the event loop, and higher levels take several times as long."""


def create_app(*, max_body_bytes: int = MAX_BODY_BYTES, max_queued: int = MAX_QUEUED) -> FastAPI:
    """Return the server with an empty state of its own. The state needs no locks on a single event loop."""
    app = FastAPI(title="Atropos API", docs_url=None, redoc_url=None)
    exchange = Exchange(max_queued)
    # Environments that render a page read the API from a browser. atroposlib allows it too.
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(GZipMiddleware, minimum_size=GZIP_MIN_BYTES, compresslevel=GZIP_LEVEL)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes, error_response=_error_response)
    _add_exception_handlers(app)
    _add_trainer_routes(app, exchange)
    _add_environment_routes(app, exchange)
    return app


def _error_response(status: int, message: str) -> JSONResponse:
    return JSONResponse({"detail": message}, status)


def _add_exception_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def malformed(_request: Request, error: RequestValidationError) -> JSONResponse:
        # Without the offending value, which may be megabytes, or a NaN that JSON cannot represent.
        problems = [{name: problem[name] for name in ("type", "loc", "msg")} for problem in error.errors()]
        return JSONResponse({"detail": problems}, 422)

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
    async def register(registration: Registration) -> JsonObject:
        return exchange.register(registration)

    @app.get("/batch")
    async def batch() -> JSONResponse:
        return JSONResponse(exchange.batch())

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
    async def latest_example() -> JSONResponse:
        return JSONResponse(exchange.latest_example())

    @app.get("/reset_data")
    async def reset_data() -> PlainTextResponse:
        exchange.reset()
        return PlainTextResponse("Reset successful")


def _add_environment_routes(app: FastAPI, exchange: Exchange) -> None:
    @app.post("/register-env")
    async def register_env(settings: EnvRegistration) -> JsonObject:
        return exchange.register_env(settings)

    @app.post("/disconnect-env")
    async def disconnect_env(env: EnvIdentifier) -> JsonObject:
        return exchange.disconnect_env(env.env_id)

    @app.get("/status-env")
    async def status_env(env: EnvIdentifier) -> JsonObject:
        return exchange.status_env(env.env_id)

    @app.post("/scored_data")
    async def scored_data(group: ScoredData) -> JsonObject:
        return exchange.post(group)

    @app.post("/scored_data_list")
    async def scored_data_list(groups: list[ScoredData]) -> JsonObject:
        responses = exchange.post_all(groups)
        buffered = [response["buffer_size"] for response in responses if response["status"] == "buffered"]
        counts = {"buffered": len(buffered), "last_buffer_size": buffered[-1]} if buffered else {}
        return {"status": "received", "groups_processed": len(groups), **counts}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="colocated_grpo.atropos.api", description="Atropos' API server. Its state is lost when it exits."
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 allows other machines")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--max-body-bytes", type=int, default=MAX_BODY_BYTES, help="limit of a decompressed request body"
    )
    parser.add_argument("--max-queued", type=int, default=MAX_QUEUED, help="limit of sequences queued for the trainer")
    options = parser.parse_args(arguments)
    app = create_app(max_body_bytes=options.max_body_bytes, max_queued=options.max_queued)
    raise_descriptor_limit()
    uvicorn.run(app, host=options.host, port=options.port, http=Connection, ws="none", log_level="error")


if __name__ == "__main__":
    main()
