"""HTTP routes through which weights of a trainer reach this server: /bridge/init, /bridge/update, /bridge/restart."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ConfigDict, Field

from colocated_grpo.servers.control_routes import result_or_400
from colocated_grpo.servers.engine_control import EngineControl
from colocated_grpo.servers.limits import InvalidRequest
from colocated_grpo.servers.receiver import Offer
from colocated_grpo.servers.request_bodies import StrictBody
from colocated_grpo.servers.restarts import Restart
from colocated_grpo.types import JsonObject
from colocated_grpo.web.json_bodies import read_json

Port = Annotated[int, Field(gt=0, lt=1 << 16)]
Count = Annotated[int, Field(gt=0, le=1 << 16)]
Shape = Annotated[list[Annotated[int, Field(gt=0)]], Field(min_length=1, max_length=8)]


class OfferBody(StrictBody):
    """The body of /bridge/init; see `Offer`."""

    model_config = ConfigDict(allow_inf_nan=False)
    address: str
    port: Port
    first_rank: Count
    group_size: Count
    timeout: float = Field(gt=0)
    trainer_ranks: Count
    prefix: str
    shapes: dict[str, Shape] = Field(min_length=1)


class RestartBody(StrictBody):
    """The body of /bridge/restart."""

    model: str
    """Folder of this server's machine with the model to load."""


def add_bridge_routes(
    app: FastAPI,
    control: EngineControl,
    join: Callable[[Offer], None],
    update: Callable[[], JsonObject],
    restart: Restart,
    note: Callable[[str], None],
) -> None:
    """join, update: `WeightReceiver`'s, called on the driving thread. note: logs one line."""

    @app.post("/bridge/init")
    async def init(request: Request) -> JSONResponse:
        body = await read_json(request, OfferBody.from_json)
        # Not awaited: the trainer enters its group when all servers have accepted.
        joined = control.submit_idle(lambda: join(Offer(**body.model_dump())))
        joined.add_done_callback(lambda done: _note_failure(done, note))
        return JSONResponse({"accepted": True})

    @app.post("/bridge/update")
    async def received() -> JSONResponse:
        return JSONResponse(await result_or_400(control.receive_weights(update)))

    @app.post("/bridge/restart")
    async def restarted(request: Request) -> JSONResponse:
        body = await read_json(request, RestartBody.from_json)
        if not (Path(body.model) / "config.json").is_file():
            raise InvalidRequest(f"model={body.model[:200]!r}: no config.json in this folder of the server's machine")
        return JSONResponse(await result_or_400(control.submit_idle(lambda: restart.request(body.model))))


def _note_failure(joined: Future[None], note: Callable[[str], None]) -> None:
    if not joined.cancelled() and (error := joined.exception()) is not None:
        note(str(error))
