"""HTTP routes that control an engine: /bridge/*, under the names of Atropos' example server."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TypeVar

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from colocated_grpo.servers.engine_control import EngineControl
from colocated_grpo.servers.limits import InvalidRequest
from colocated_grpo.servers.load_balancer import result_of
from colocated_grpo.types import JsonObject
from colocated_grpo.web.guards import error_response

T = TypeVar("T")

ABSENT = {
    "POST /bridge/notify_update": "POST /bridge/update receives a trainer's weights and waits for them",
    "POST /bridge/disable": "there is no bridge to disable",
    "GET /bridge/debug": "see GET /bridge/info and GET /bridge/state_dict_info",
    "GET /bridge/list_endpoints": "docs/guides/engines.md lists the routes",
}
"""Routes of Atropos' example server that this one does not have -> why, or what to use."""


def add_control_routes(app: FastAPI, control: EngineControl, facts: JsonObject, parameters: JsonObject) -> None:
    """facts: further entries of /bridge/info. parameters: shape and type of each of the engine's, by vLLM's names."""
    _add_queries(app, control, facts, parameters)
    _add_commands(app, control)
    for route, reason in ABSENT.items():
        _add_absent(app, route, reason)


def _add_queries(app: FastAPI, control: EngineControl, facts: JsonObject, parameters: JsonObject) -> None:
    @app.get("/bridge/info")
    async def info() -> JSONResponse:
        state = {
            "policy_version": control.policy_version,
            "has_whole_weights": control.has_whole_weights,
            "has_received_weights": control.has_received_weights,
            "is_paused": control.is_paused,
            "is_sleeping": control.is_sleeping,
        }
        return JSONResponse(facts | state)

    @app.get("/bridge/state_dict_info")
    async def state_dict_info() -> JSONResponse:
        return JSONResponse(parameters)

    @app.get("/bridge/is_paused")
    async def is_paused() -> JSONResponse:
        return JSONResponse({"is_paused": control.is_paused})

    @app.get("/bridge/is_sleeping")
    async def is_sleeping() -> JSONResponse:
        return JSONResponse({"is_sleeping": control.is_sleeping})


def _add_commands(app: FastAPI, control: EngineControl) -> None:
    @app.post("/bridge/pause")
    async def pause() -> JSONResponse:
        return await _state_after(control.pause())

    @app.post("/bridge/resume")
    async def resume() -> JSONResponse:
        return await _state_after(control.resume())

    @app.post("/bridge/sleep")
    async def sleep() -> JSONResponse:
        return await _state_after(control.sleep())

    @app.post("/bridge/wake_up")
    async def wake_up() -> JSONResponse:
        return await _state_after(control.wake_up())

    async def _state_after(command: Future[None]) -> JSONResponse:
        await result_or_400(command)
        return JSONResponse({"is_paused": control.is_paused, "is_sleeping": control.is_sleeping})


async def result_or_400(future: Future[T]) -> T:
    """Await a command; its ValueError becomes a response with status 400."""
    try:
        return await result_of(future)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def _add_absent(app: FastAPI, route: str, reason: str) -> None:
    method, path = route.split()

    @app.api_route(path, methods=[method])
    async def absent() -> JSONResponse:
        return error_response(404, f"{route} is not available: {reason}")
