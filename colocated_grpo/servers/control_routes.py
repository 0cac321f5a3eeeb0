"""HTTP routes that control an engine and change its weights: /bridge/* and /lora/*, as in Atropos' example server."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file

from colocated_grpo.policy.checkpoint_files import CheckpointReader
from colocated_grpo.servers.engine_control import EngineControl
from colocated_grpo.servers.engine_routes import Sessions
from colocated_grpo.servers.options import Restart
from colocated_grpo.servers.rank_links import result_of
from colocated_grpo.servers.receiver import Offer
from colocated_grpo.servers.request_bodies import StrictBody
from colocated_grpo.servers.text import InvalidRequest
from colocated_grpo.settings.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from colocated_grpo.types import JsonObject
from colocated_grpo.web.bodies import read_json


def add_control_routes(app: FastAPI, control: EngineControl, facts: JsonObject, sessions: Sessions) -> None:
    """facts: further entries of /bridge/info."""

    @app.get("/bridge/info")
    async def info() -> JSONResponse:
        state = {
            "policy_version": control.policy_version,
            "has_received_weights": control.has_received_weights,
            "is_paused": control.is_paused,
        }
        return JSONResponse(facts | state)

    @app.post("/bridge/pause", dependencies=[Depends(sessions.allow_command)])
    async def pause() -> JSONResponse:
        await result_of(control.pause())
        return JSONResponse({"is_paused": control.is_paused})

    @app.post("/bridge/resume", dependencies=[Depends(sessions.allow_command)])
    async def resume() -> JSONResponse:
        await result_of(control.resume())
        return JSONResponse({"is_paused": control.is_paused})


class LoadBody(StrictBody):
    """The body of /lora/load, and of vLLM's /v1/load_lora_adapter, which has other names."""

    adapter_path: str
    adapter_name: str | None = None
    """Default: the folder's name."""
    load_inplace: bool = False
    """Accepted and ignored: an adapter always replaces the previous one."""

    @model_validator(mode="before")
    @classmethod
    def _with_our_names(cls, values: object) -> object:
        ours = {"lora_name": "adapter_name", "lora_path": "adapter_path"}
        return {ours.get(name, name): value for name, value in values.items()} if isinstance(values, dict) else values


class RestartBody(StrictBody):
    """The body of /bridge/restart."""

    model: str
    """Folder of the model to load, on this server's machine."""


def add_weight_routes(
    app: FastAPI,
    control: EngineControl,
    sessions: Sessions,
    call: Callable[..., object],
    adapters: Callable[[], JsonObject],
    restart: Restart,
) -> None:
    """call: `MirroredEngine.call` of the engine. adapters: returns the status of the adapters.

    A loaded adapter applies to all later requests, regardless of their `model`. Requests that already run finish first.
    """
    commands = APIRouter(dependencies=[Depends(sessions.allow_command)])
    trainers = APIRouter(dependencies=[Depends(sessions.allow_trainer)])

    @commands.post("/lora/load")
    @commands.post("/v1/load_lora_adapter")
    async def load_adapter(request: Request) -> JSONResponse:
        body = await read_json(request, LoadBody.from_json)
        path = body.adapter_path
        for file in (CONFIG_FILE, WEIGHTS_FILE):
            _require_file(path, file, "adapter")
        load = partial(call, "load_adapter", body.adapter_name or Path(path).resolve().name, path)
        return JSONResponse(await result_of(control.change_weights(load)))

    @commands.post("/lora/unload")
    async def unload_adapter() -> JSONResponse:
        return JSONResponse(await result_of(control.change_weights(partial(call, "unload_adapter"))))

    @app.get("/lora/status")
    async def status() -> JSONResponse:
        return JSONResponse(adapters())

    def note_failure(joined: Future[object]) -> None:
        if not joined.cancelled() and (error := joined.exception()) is not None:
            sessions.note(str(error))

    @trainers.post("/bridge/init")
    async def init(request: Request) -> JSONResponse:
        offer = await read_json(request, Offer.from_json)
        # The response does not wait for the join, because the trainer joins the group only after all servers have
        # accepted.
        joined = control.join_trainer(partial(call, "join", offer))
        joined.add_done_callback(note_failure)
        return JSONResponse({"accepted": True})

    @trainers.post("/bridge/update")
    async def received() -> JSONResponse:
        return JSONResponse(await result_of(control.receive_weights(partial(call, "update"))))

    @commands.post("/bridge/restart")
    async def restarted(request: Request) -> JSONResponse:
        body = await read_json(request, RestartBody.from_json)
        _require_file(body.model, "config.json", "model")
        return JSONResponse(await result_of(control.submit_idle(lambda: restart.request(body.model))))

    app.include_router(commands)
    app.include_router(trainers)


def _require_file(folder: str, name: str, key: str) -> None:
    try:
        exists = (Path(folder) / name).is_file()
    except (OSError, ValueError):  # name too long, or contains NUL
        exists = False
    if not exists:
        raise InvalidRequest(f"{key}={folder[:200]!r}: no {name} in this folder of the server's machine")


def check_adapter(model: Path, folder: str) -> None:
    """Raise ValueError unless the adapter's numbers are finite, and its matrices fit the weights in `model`.

    vLLM copies what fits of a matrix, and computes with NaN.
    """
    try:
        factors = load_file(Path(folder) / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"adapter {folder!r}: {WEIGHTS_FILE} cannot be read: {error}") from None
    shapes = CheckpointReader(model).shapes
    for name, factor in factors.items():
        if not factor.isfinite().all():
            raise ValueError(f"adapter {folder!r}: {name} has numbers that are not finite")
        layer, _, kind = name.removeprefix("base_model.model.").rpartition(".lora_")
        weight, other = shapes.get(f"{layer}.weight"), factors.get(name.replace(".lora_A.", ".lora_B."))
        if kind == "A.weight" and weight is not None:
            rank = factor.shape[:1]
            if other is None or (factor.shape[1:], other.shape[:1], other.shape[1:]) != (weight[1:], weight[:1], rank):
                theirs = "none" if other is None else list(other.shape)
                raise ValueError(
                    f"adapter {folder!r}: {layer} has the factors {list(factor.shape)} and {theirs}, which do not fit "
                    f"the model's {list(weight)}"
                )
