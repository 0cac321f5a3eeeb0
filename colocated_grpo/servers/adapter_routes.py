"""HTTP routes that load adapters, under the names of Atropos' example server and of vLLM."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from colocated_grpo.servers.control_routes import result_or_400
from colocated_grpo.servers.engine_control import EngineControl
from colocated_grpo.servers.limits import InvalidRequest
from colocated_grpo.servers.request_bodies import StrictBody
from colocated_grpo.settings.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from colocated_grpo.types import JsonObject
from colocated_grpo.web.json_bodies import read_json


class Adapters(Protocol):
    """The adapters of an engine. `load` and `unload` run on the driving thread, and raise ValueError."""

    def load(self, name: str, path: str) -> JsonObject:
        """Return the status afterwards."""
        ...

    def unload(self, name: str | None = None) -> JsonObject:
        """Return the status afterwards. name: of the adapter that must be active."""
        ...

    def status(self) -> JsonObject: ...


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
    """Accepted and not needed: an adapter always replaces the one before it."""


class NamedUnloadBody(StrictBody):
    """The body of /v1/unload_lora_adapter, as in vLLM."""

    lora_name: str
    lora_int_id: int | None = None


def add_adapter_routes(app: FastAPI, control: EngineControl, adapters: Adapters) -> None:
    """A loaded adapter applies to all later requests, whatever model they name. Running requests finish first."""

    async def load(name: str, path: str) -> JSONResponse:
        _require_adapter(path)
        return JSONResponse(await result_or_400(control.change_weights(partial(adapters.load, name, path))))

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
        return JSONResponse(await result_or_400(control.change_weights(adapters.unload)))

    @app.post("/v1/unload_lora_adapter")
    async def unload_named(request: Request) -> JSONResponse:
        body = await read_json(request, NamedUnloadBody.from_json)
        return JSONResponse(await result_or_400(control.change_weights(partial(adapters.unload, body.lora_name))))

    @app.get("/lora/status")
    async def status() -> JSONResponse:
        return JSONResponse(adapters.status())


def _require_adapter(path: str) -> None:
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        try:
            exists = (Path(path) / name).is_file()
        except (OSError, ValueError):  # a name that is too long, or with NUL
            exists = False
        if not exists:
            raise InvalidRequest(f"adapter {path[:200]!r}: no {name} in this folder of the server's machine")
