"""One engine behind the HTTP application, driven by the main thread of this process."""

import os
import secrets
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event

import torch
from fastapi import FastAPI

from colocated_grpo.errors import RunError
from colocated_grpo.policy.model_files import ModelFiles, read_model_files
from colocated_grpo.policy.model_loader import compute_dtype, dtype_of
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.rollout.vllm.spec import EngineSpec
from colocated_grpo.rollout.vllm.vllm_engine import VLLMEngine
from colocated_grpo.runtime import checksums, distributed, supervision
from colocated_grpo.servers import control_routes, engine_control, engine_routes, rank_links, sampler, text
from colocated_grpo.servers.app import create_app
from colocated_grpo.servers.exported import export, export_folder, move_to_shared_memory
from colocated_grpo.servers.options import RESTART, ServeOptions, model_settings, save_ready, save_requested
from colocated_grpo.settings.config_json import config_json_in, shape_of
from colocated_grpo.types import JsonObject
from colocated_grpo.web.server import Hosts, ServerThread
from colocated_grpo.weights.plan import checkpoint_shapes, verified_plan

BASE_PREFIX = "model"
"""Prefix of the base model in checkpoint names."""
IDLE_LIMIT = timedelta(days=3650)
"""The other ranks of an engine wait for rank 0's next call without limit."""


def serve(options: ServeOptions, state: Path) -> int:
    """Load the model, listen, and answer requests until SIGTERM, SIGINT or a restart. Returns the exit code.

    state: file for a restart. Raises ConfigError or RunError. The port opens only once the engine is ready.
    """
    world = distributed.init_world(engine_control.join_ranks(options.tensor_parallel_size))
    model = read_model_files(model_settings(options), world)
    exported = checksums.exported_digest(model.folder)  # before reading the weights: detects a replaced folder
    engine = VLLMEngine(spec_of(options, model.folder, world.device), world)
    facts = describe(options, model, engine, world) | {"exported": exported}
    if options.share_weights:
        _share_weights(engine, model, facts)
    receiver = control_routes.WeightReceiver(engine, model.folder, world)

    def load_adapter(name: str, path: str) -> JsonObject:
        control_routes.check_adapter(model.folder, path)
        return engine.adapters.load(name, path)

    if options.adapter is not None:
        try:
            load_adapter(options.adapter.name, str(options.adapter))
        except ValueError as error:
            raise RunError(str(error)) from None
    commands = {
        "load_adapter": load_adapter,
        "unload_adapter": engine.adapters.unload,
        "join": receiver.join,
        "update": receiver.update,
    }
    ranks = replace(world, control=distributed.new_gloo_group(IDLE_LIMIT))
    whole = engine_control.MirroredEngine(engine, ranks, commands)
    if world.is_main:
        stop = supervision.StopRequest(world.store)
        stop.listen()
        return _lead(options, state, model, engine, whole, stop, facts)
    whole.follow()
    return 0


def spec_of(options: ServeOptions, folder: Path, device: torch.device) -> EngineSpec:
    """Return the spec of an engine for any number of requests, with stop strings."""
    adapters = {"enable_lora": True, "max_lora_rank": options.max_lora_rank} if options.enable_lora else {}
    return EngineSpec(
        folder=folder,
        dtype=dtype_of(options.dtype, auto=compute_dtype("auto", device)),
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        trust_remote_code=options.trust_remote_code,
        tensor_parallel_size=options.tensor_parallel_size,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        gpu_memory_utilization=options.gpu_memory_utilization,
        enforce_eager=options.enforce_eager,
        reads_weights=True,
        sleep=False,
        keeps_weights=True,
        needs_tokenizer=True,
        args={**adapters, **options.engine_args},
    )


def _share_weights(engine: VLLMEngine, model: ModelFiles, facts: JsonObject) -> None:
    """Export the engine's parameters to a trainer on this machine. Raises RunError for a model without a copy plan."""
    if facts["device"] == "cpu":
        move_to_shared_memory(engine.model)
    tied = bool(model.hf_config.get_text_config().tie_word_embeddings)
    if (plan := verified_plan(engine, checkpoint_shapes(model.folder, tied=tied), BASE_PREFIX, model.folder)) is None:
        problem = f"the engine stores the weights of {facts['model']} in another layout than the checkpoint"
        advice = "start without it, and train with engine.bridge: broadcast"
        raise RunError(f"--share-weights: {problem}; {advice}")
    for rows in plan.padding:
        rows.zero_()
    file = export({name: target.view for name, target in plan.targets.items()}, facts, export_folder())
    print(f"weights are shared through {file.absolute()}", flush=True)


def _lead(
    options: ServeOptions,
    state: Path,
    model: ModelFiles,
    engine: VLLMEngine,
    whole: engine_control.MirroredEngine,
    stop: supervision.StopRequest,
    facts: JsonObject,
) -> int:
    """Serve on rank 0. engine: this rank's engine. whole: the engine of all ranks."""
    note = partial(print, "note:", flush=True)
    inbox, restarts = Inbox(), Event()
    control = engine_control.EngineControl(whole, inbox, Driver(whole, inbox))
    sessions = engine_routes.Sessions(inbox, note, attached=control.resume)
    limits = text.limits_of(model, options.max_model_len, seed=0, max_tokens_setting="--max-model-len")

    def restart(with_model: str) -> None:
        save_requested(state, with_model)
        restarts.set()

    def add_routes(app: FastAPI) -> None:
        status = engine.adapters.status
        control_routes.add_control_routes(app, control, sessions, facts, whole.call, status, restart)
        engine_routes.add_engine_routes(app, control, inbox, sessions, limits)

    codec = text.TextCodec(model.tokenizer, limits, options.chat_template_kwargs)
    app = create_app(
        sampler.Sampler(rank_links.LoadBalancer(inbox), codec, note),
        options.model,
        hosts=Hosts(options.host, options.allow_host),
        api_key=os.environ[options.api_key_variable] if options.api_key_variable else None,
        state=lambda: control.state,
        add_routes=add_routes,
        large_paths=engine_routes.LARGE_PATHS,
    )
    try:
        try:
            server = ServerThread(app, options.host, [options.port])
        except OSError as error:  # the port was taken while the engine was built
            raise RunError(f"--port={options.port}: cannot listen on {error.strerror}") from None
        save_ready(state, options.named, server.ports[0])
        host = f"[{options.host}]" if ":" in options.host else options.host
        print(f"serving {options.named} at http://{host}:{server.ports[0]}", flush=True)
        try:
            control.run(lambda: stop.requested() or restarts.is_set())
        finally:
            sessions.close_all()
            server.close()
    finally:
        whole.close()
    return RESTART if restarts.is_set() else 0


def describe(options: ServeOptions, model: ModelFiles, engine: VLLMEngine, world: distributed.World) -> JsonObject:
    """Return the entries of /bridge/info that describe this server."""
    parameters = list(engine.model.parameters())
    return {
        "model": options.model,
        "shape": shape_of(config_json_in(model.folder)),
        "instance": secrets.token_hex(8),
        "dtype": str(parameters[0].dtype).removeprefix("torch."),
        "is_quantized": engine.is_quantized,
        "chat_template": bool(model.tokenizer.chat_template),
        "device": world.device.type,
        "tensor_parallel_size": world.size,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "num_parameters": sum(parameter.numel() for parameter in parameters),
        "pid": os.getpid(),
    }
