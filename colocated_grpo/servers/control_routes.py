"""HTTP routes that control an engine and change its weights: /bridge/* and /lora/*, as in Atropos' example server."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from colocated_grpo.servers.engine_control import EngineControl
from colocated_grpo.servers.options import Restart
from colocated_grpo.servers.rank_links import result_of
from colocated_grpo.servers.receiver import Offer
from colocated_grpo.servers.request_bodies import StrictBody
from colocated_grpo.servers.text import InvalidRequest
from colocated_grpo.settings.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from colocated_grpo.types import JsonObject
from colocated_grpo.web.bodies import read_json

T = TypeVar("T")


def add_control_routes(app: FastAPI, control: EngineControl, facts: JsonObject, parameters: JsonObject) -> None:
    """facts: further entries of /bridge/info. parameters: shape and type of each engine parameter, by vLLM's names."""
    _add_queries(app, control, facts, parameters)
    _add_commands(app, control)


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


class LoadBody(StrictBody):
    """The body of /lora/load."""

    adapter_path: str
    adapter_name: str | None = None
    """Default: the folder's name."""


class NamedLoadBody(StrictBody):
    """The body of /v1/load_lora_adapter, as in vLLM."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    """Accepted and ignored: an adapter always replaces the previous one."""


class NamedUnloadBody(StrictBody):
    """The body of /v1/unload_lora_adapter, as in vLLM."""

    lora_name: str
    lora_int_id: int | None = None


class RestartBody(StrictBody):
    """The body of /bridge/restart."""

    model: str
    """Folder of the model to load, on this server's machine."""


def add_weight_routes(
    app: FastAPI,
    control: EngineControl,
    call: Callable[..., object],
    adapters: Callable[[], JsonObject],
    restart: Restart,
    note: Callable[[str], None],
) -> None:
    """call: `EveryRank.call` of the engine. adapters: returns the status of the adapters. note: logs one line."""
    _add_adapter_routes(app, control, call, adapters)

    @app.post("/bridge/init")
    async def init(request: Request) -> JSONResponse:
        offer = await read_json(request, Offer.from_json)
        # The response does not wait for the join, because the trainer joins the group only after all servers have
        # accepted.
        joined = control.join_trainer(partial(call, "join", offer))
        joined.add_done_callback(lambda done: _note_failure(done, note))
        return JSONResponse({"accepted": True})

    @app.post("/bridge/update")
    async def received() -> JSONResponse:
        return JSONResponse(await result_or_400(control.receive_weights(partial(call, "update"))))

    @app.post("/bridge/restart")
    async def restarted(request: Request) -> JSONResponse:
        body = await read_json(request, RestartBody.from_json)
        _require_file(body.model, "config.json", "model")
        return JSONResponse(await result_or_400(control.submit_idle(lambda: restart.request(body.model))))


def _note_failure(joined: Future[object], note: Callable[[str], None]) -> None:
    if not joined.cancelled() and (error := joined.exception()) is not None:
        note(str(error))


def _add_adapter_routes(
    app: FastAPI, control: EngineControl, call: Callable[..., object], adapters: Callable[[], JsonObject]
) -> None:
    """Add the routes that load and unload adapters.

    A loaded adapter applies to all later requests, regardless of their `model`. Requests that already run finish first.
    """

    async def load(name: str, path: str) -> JSONResponse:
        for file in (CONFIG_FILE, WEIGHTS_FILE):
            _require_file(path, file, "adapter")
        return await changed("load_adapter", name, path)

    async def changed(*command: str | None) -> JSONResponse:
        return JSONResponse(await result_or_400(control.change_weights(partial(call, *command))))

    @app.post("/lora/load")
    async def load_adapter(request: Request) -> JSONResponse:
        body = await read_json(request, LoadBody.from_json)
        return await load(body.adapter_name or Path(body.adapter_path).resolve().name, body.adapter_path)

    @app.post("/v1/load_lora_adapter")
    async def load_named(request: Request) -> JSONResponse:
        body = await read_json(request, NamedLoadBody.from_json)
        return await load(body.lora_name, body.lora_path)

    @app.post("/lora/unload")
    async def unload_adapter() -> JSONResponse:
        return await changed("unload_adapter", None)

    @app.post("/v1/unload_lora_adapter")
    async def unload_named(request: Request) -> JSONResponse:
        body = await read_json(request, NamedUnloadBody.from_json)
        return await changed("unload_adapter", body.lora_name)

    @app.get("/lora/status")
    async def status() -> JSONResponse:
        return JSONResponse(adapters())


def _require_file(folder: str, name: str, key: str) -> None:
    try:
        exists = (Path(folder) / name).is_file()
    except (OSError, ValueError):  # name too long, or contains NUL
        exists = False
    if not exists:
        raise InvalidRequest(f"{key}={folder[:200]!r}: no {name} in this folder of the server's machine")
