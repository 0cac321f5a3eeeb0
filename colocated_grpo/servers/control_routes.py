"""HTTP routes that control an engine and change its weights: /bridge/* and /lora/*, as in Atropos' example server."""

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Self

import torch
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ConfigDict, Field, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from colocated_grpo.errors import in_one_line
from colocated_grpo.policy.checkpoint_files import CheckpointReader, read_conversion
from colocated_grpo.rollout.engine import LocalEngine
from colocated_grpo.runtime import distributed, rendezvous
from colocated_grpo.servers import broadcast, engine_control, engine_routes, text
from colocated_grpo.servers.rank_links import result_of
from colocated_grpo.servers.request_bodies import StrictBody
from colocated_grpo.settings.inputs import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from colocated_grpo.types import JsonObject
from colocated_grpo.web.bodies import read_json
from colocated_grpo.weights import buckets, transport
from colocated_grpo.weights.fingerprints import rows_of
from colocated_grpo.weights.plan import verified_plan

Count = Annotated[int, Field(gt=0, le=1 << 16)]
Shape = Annotated[list[Annotated[int, Field(gt=0, lt=1 << 40)]], Field(min_length=1, max_length=8)]
MAX_TIMEOUT = 86_400.0
MAX_ELEMENTS = 1 << 42
"""Bound of a model's parameters: four trillion."""


class Offer(StrictBody):
    """Description of a trainer's process group: the body of /bridge/init."""

    model_config = ConfigDict(allow_inf_nan=False)
    address: str = Field(max_length=255)
    port: int = Field(gt=0, lt=1 << 16)
    first_rank: Count
    """Group rank of this server's first rank. The trainer has rank 0."""
    group_size: Count
    timeout: float = Field(gt=0, le=MAX_TIMEOUT)
    trainer_ranks: Count
    prefix: str = Field(max_length=255)
    """Prefix of the base model in checkpoint names, such as "model"."""
    shapes: dict[str, Shape] = Field(min_length=1)
    """Shapes of the trainer's parameters, by checkpoint name."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.first_rank >= self.group_size:
            raise ValueError(f"first_rank: must be below group_size={self.group_size}")
        if sum(map(math.prod, self.shapes.values())) > MAX_ELEMENTS:
            raise ValueError(f"shapes: more than {MAX_ELEMENTS} elements")
        return self


class WeightReceiver:
    """Receives a trainer's weights for the engine of this rank. Every method is collective over the engine's ranks."""

    def __init__(self, engine: LocalEngine, folder: Path, world: distributed.World) -> None:
        """folder: folder of the engine's loaded model. world: the engine's ranks."""
        self._engine = engine
        self._folder = folder
        self._conversion = read_conversion(folder)
        self._world = world
        self._dtype = next(engine.model.parameters()).dtype
        self._group: broadcast.JoinedGroup | None = None
        self._buckets: list[buckets.Bucket] = []
        self._views: transport.ViewFingerprints | None = None
        """The copy plan, and fingerprints of its views; None without a plan."""
        self._planned_shapes: Mapping[str, torch.Size] | None = None
        """Shapes of the last plan. For these shapes no further plan is made: after an update, the engine no longer has
        the folder's weights."""

    def join(self, offer: Offer) -> None:
        """Leave the previous group, if any, and join a trainer's group. Raises ValueError on failure."""
        rank = offer.first_rank + self._engine.tensor_parallel_rank
        if rank >= offer.group_size:
            raise ValueError(f"rank {rank} of this engine is not in the trainer's group of {offer.group_size}")
        shapes = {name: torch.Size(shape) for name, shape in offer.shapes.items()}
        if shapes != self._planned_shapes:
            plan = verified_plan(self._engine, shapes, offer.prefix, self._folder)
            planned = all(self._world.gather_objects(plan is not None))
            self._views = None
            if plan is not None and planned:
                self._views = transport.ViewFingerprints(plan, shapes, self._world)
            self._planned_shapes = shapes
        self._buckets = buckets.make_buckets(shapes, offer.trainer_ranks, self._dtype)
        self._leave()
        try:
            # The timeout is short, because the engine waits. The store starts before the offer is sent, so an
            # unreachable store is gone.
            store = rendezvous.connect_store(offer.address, offer.port, rendezvous.CONNECT_SECONDS)
            store.set_timeout(timedelta(seconds=offer.timeout))
            self._group = broadcast.JoinedGroup(store, rank, offer.group_size, self._world.device, offer.timeout)
        except RuntimeError as error:
            raise ValueError(f"cannot join the trainer at {offer.address}:{offer.port}: {in_one_line(error)}") from None

    @torch.no_grad()
    def update(self) -> JsonObject:
        """Receive and write all weights. Return fingerprints of the engine's views or, without a plan, of the tensors.

        Call only after `join`. Raises ValueError if the connection of the trainer is lost.
        """
        views, loaded = self._views, list[Tensor]()
        try:
            if views is None:
                self._engine.load_weights(self._stored(loaded))
            else:
                received = ((buckets.shard_slices(bucket, views.plan), values) for bucket, values in self._received())
                cut = ((slices, [part.source(values) for part in slices]) for slices, values in received)
                buckets.write_planned(cut, views.plan, self._world.device)
        except RuntimeError as error:
            self._leave()
            raise ValueError(f"the trainer's connection is lost: {in_one_line(error)}") from None
        own = torch.cat(loaded) if views is None else views.compute()
        copies = torch.full_like(own, self._world.size) if views is None else views.copies
        return transport.Summed(self._world.sum_(own), copies).to_json()

    def _stored(self, fingerprints: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors for the engine's loader, and append each bucket's fingerprints to `fingerprints`."""
        for bucket in self._received():
            values = dict(buckets.full_tensors(*bucket))
            parts = [rows_of(value, 0) for value in values.values()]
            fingerprints.append(transport.Fingerprints(parts, None, self._world.device).compute())
            for name, value in values.items():
                yield from self._conversion.stored(name, value)

    def _received(self) -> Iterator[tuple[buckets.Bucket, Tensor]]:
        assert self._group is not None  # `EngineControl.receive_weights` requires a trainer
        for bucket in self._buckets:
            values = torch.empty(bucket.num_shards, bucket.size, dtype=bucket.dtype, device=self._world.device)
            self._group.broadcast(values).wait()
            yield bucket, values

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


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


def add_control_routes(
    app: FastAPI,
    control: engine_control.EngineControl,
    sessions: engine_routes.Sessions,
    facts: JsonObject,
    call: Callable[..., object],
    adapters: Callable[[], JsonObject],
    restart: Callable[[str], object],
) -> None:
    """facts: of /bridge/info. call: `MirroredEngine.call`. adapters: returns their status. restart: with a model.

    A loaded adapter applies to all later requests, whatever their `model`. Running requests finish first.
    """
    commands = APIRouter(dependencies=[Depends(sessions.allow_command)])
    trainers = APIRouter(dependencies=[Depends(sessions.allow_trainer)])

    @app.get("/bridge/info")
    async def info() -> JSONResponse:
        state = {name: getattr(control, name) for name in ("policy_version", "has_received_weights", "is_paused")}
        return JSONResponse(facts | state)

    @commands.post("/bridge/pause")
    async def pause() -> JSONResponse:
        await result_of(control.pause())
        return JSONResponse({"is_paused": control.is_paused})

    @commands.post("/bridge/resume")
    async def resume() -> JSONResponse:
        await result_of(control.resume())
        return JSONResponse({"is_paused": control.is_paused})

    @commands.post("/lora/load")
    @commands.post("/v1/load_lora_adapter")
    async def load_adapter(request: Request) -> JSONResponse:
        body = await read_json(request, LoadBody.from_json)
        path = body.adapter_path
        for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            _require_file(path, file, "adapter")
        load = partial(call, "load_adapter", body.adapter_name or Path(path).resolve().name, path)
        return JSONResponse(await result_of(control.change_weights(load)))

    @commands.post("/lora/unload")
    async def unload_adapter() -> JSONResponse:
        return JSONResponse(await result_of(control.change_weights(partial(call, "unload_adapter"))))

    @app.get("/lora/status")
    async def status() -> JSONResponse:
        return JSONResponse(adapters())

    def note_failure(joined: Future[None]) -> None:
        if not joined.cancelled() and (error := joined.exception()) is not None:
            sessions.note(str(error))

    @trainers.post("/bridge/init")
    async def init(request: Request) -> JSONResponse:
        offer = await read_json(request, Offer.from_json)
        # The response does not wait for the join, because the trainer joins only after all servers have accepted.
        control.join_trainer(partial(call, "join", offer)).add_done_callback(note_failure)
        return JSONResponse({"accepted": True})

    @trainers.post("/bridge/update")
    async def received() -> JSONResponse:
        return JSONResponse(await result_of(control.receive_weights(partial(call, "update"))))

    @commands.post("/bridge/restart")
    async def restarted(request: Request) -> JSONResponse:
        body = await read_json(request, RestartBody.from_json)
        _require_file(body.model, "config.json", "model")
        return JSONResponse(await result_of(control.change_weights(partial(restart, body.model))))

    app.include_router(commands)
    app.include_router(trainers)


def _require_file(folder: str, name: str, key: str) -> None:
    try:
        exists = (Path(folder) / name).is_file()
    except (OSError, ValueError):  # name too long, or contains NUL
        exists = False
    if not exists:
        raise text.InvalidRequest(f"{key}={folder[:200]!r}: no {name} in this folder of the server's machine")


def check_adapter(model: Path, folder: str) -> None:
    """Raise ValueError unless all numbers are finite and fit `model`: vLLM copies what fits, and computes with NaN."""
    try:
        factors = load_file(Path(folder) / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"adapter {folder!r}: {ADAPTER_WEIGHTS} cannot be read: {error}") from None
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
                found = f"{layer} has the factors {list(factor.shape)} and {theirs}"
                raise ValueError(f"adapter {folder!r}: {found}, which do not fit the model's {list(weight)}")
