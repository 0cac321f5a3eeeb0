"""`python -m colocated_grpo.atropos.api`: Atropos' API server for people without atroposlib.

The endpoints and the JSON of `run-api` (atroposlib 0.4.0). State lives in this one process and dies with it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware

from colocated_grpo.atropos.exchange import Exchange, QueueFull, UnknownEnvironment
from colocated_grpo.atropos.wire import EnvIdentifier, EnvRegistration, Registration, ScoredData
from colocated_grpo.runtime.descriptors import allow_descriptors
from colocated_grpo.web.bodies import RequestBodies
from colocated_grpo.web.serving import Connection

MAX_BODY_BYTES = 256 << 20
MAX_QUEUED = 1 << 20
"""Sequences. At a thousand tokens each this is some tens of GB, so a trainer that stays away is noticed before."""
GZIP_FROM_BYTES = 1000
GZIP_LEVEL = 1
"""Nobody is answered while a batch is packed, and higher levels take many times as long."""


def create_app(*, max_body_bytes: int = MAX_BODY_BYTES, max_queued: int = MAX_QUEUED) -> FastAPI:
    """The server with its own empty state. Handlers run on one thread, so the state needs no lock."""
    app = FastAPI(title="Atropos API", docs_url=None, redoc_url=None)
    exchange = Exchange(max_queued)
    # Environments that render a page read the API from a browser, as upstream's may.
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(GZipMiddleware, minimum_size=GZIP_FROM_BYTES, compresslevel=GZIP_LEVEL)
    app.add_middleware(RequestBodies, max_bytes=max_body_bytes, refuse=_refuse)
    _add_refusals(app)
    _add_trainer_routes(app, exchange)
    _add_environment_routes(app, exchange)
    return app


def _refuse(status: int, reason: str) -> JSONResponse:
    return JSONResponse({"detail": reason}, status)


def _add_refusals(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def malformed(_request: Request, error: RequestValidationError) -> JSONResponse:
        # Not the offending value: it may be megabytes, or a NaN that JSON cannot carry back.
        lines = [{name: problem[name] for name in ("type", "loc", "msg")} for problem in error.errors()]
        return JSONResponse({"detail": lines}, 422)

    @app.exception_handler(UnknownEnvironment)
    async def unknown(_request: Request, error: UnknownEnvironment) -> JSONResponse:
        return _refuse(404, str(error))

    @app.exception_handler(QueueFull)
    async def full(_request: Request, error: QueueFull) -> JSONResponse:
        return _refuse(503, str(error))


def _add_trainer_routes(app: FastAPI, exchange: Exchange) -> None:
    @app.get("/")
    async def root() -> dict[str, str]:
        return {"message": "AtroposLib API"}

    @app.post("/register")
    async def register(registration: Registration) -> dict[str, Any]:
        return exchange.register(registration)

    @app.get("/batch")
    async def batch() -> JSONResponse:
        return JSONResponse(exchange.batch())

    @app.get("/info")
    async def info() -> dict[str, int]:
        return exchange.info()

    @app.get("/wandb_info")
    async def wandb_info() -> dict[str, Any]:
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
    async def register_env(settings: EnvRegistration) -> dict[str, Any]:
        return exchange.register_env(settings)

    @app.post("/disconnect-env")
    async def disconnect_env(env: EnvIdentifier) -> dict[str, Any]:
        return exchange.disconnect_env(env.env_id)

    @app.get("/status-env")
    async def status_env(env: EnvIdentifier) -> dict[str, Any]:
        return exchange.status_env(env.env_id)

    @app.post("/scored_data")
    async def scored_data(group: ScoredData) -> dict[str, Any]:
        return exchange.post(group.as_group())

    @app.post("/scored_data_list")
    async def scored_data_list(groups: list[ScoredData]) -> dict[str, Any]:
        answers = exchange.post_all([group.as_group() for group in groups])
        buffered = [answer["buffer_size"] for answer in answers if answer["status"] == "buffered"]
        counts = {"buffered": len(buffered), "last_buffer_size": buffered[-1]} if buffered else {}
        return {"status": "received", "groups_processed": len(groups), **counts}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="colocated_grpo.atropos.api", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 lets other machines in")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-body-bytes", type=int, default=MAX_BODY_BYTES)
    parser.add_argument("--max-queued", type=int, default=MAX_QUEUED, help="sequences held for the trainer")
    options = parser.parse_args(arguments)
    app = create_app(max_body_bytes=options.max_body_bytes, max_queued=options.max_queued)
    allow_descriptors()
    uvicorn.run(app, host=options.host, port=options.port, http=Connection, ws="none", log_level="error")


if __name__ == "__main__":
    main()
