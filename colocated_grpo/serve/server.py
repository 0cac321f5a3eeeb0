"""One engine behind the HTTP application, driven by the main thread of this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from fastapi import FastAPI

from colocated_grpo.build.data import ModelFiles, limits_of, read_model_files
from colocated_grpo.config.schema import Config
from colocated_grpo.errors import RunError
from colocated_grpo.policy.loading import compute_dtype, dtype_of
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.rollout.vllm.engine import VLLMEngine
from colocated_grpo.runtime.distributed import World, init_world
from colocated_grpo.runtime.supervision import StopRequest
from colocated_grpo.serve.options import ServeOptions
from colocated_grpo.serving.adapter_routes import add_adapter_routes
from colocated_grpo.serving.app import create_app
from colocated_grpo.serving.control_routes import add_control_routes
from colocated_grpo.serving.engine_control import EngineControl
from colocated_grpo.serving.load_balancer import LoadBalancer
from colocated_grpo.serving.origins import Origins
from colocated_grpo.serving.sampler import Sampler
from colocated_grpo.types import JsonObject
from colocated_grpo.web.browsers import Hosts
from colocated_grpo.web.server import ServerThread

MAX_BODY_BYTES = 8 << 20
MAX_REQUESTS = 4096
REMEMBERED_COMPLETIONS = 1
"""Only a trainer reads recorded completions, so this is the minimum."""


def serve(config: Config, options: ServeOptions) -> None:
    """Load the model, listen, and answer requests until SIGTERM or SIGINT.

    Raises ConfigError or RunError with one line. The port is opened once the engine is ready, so a client that waits
    for /health waits for the engine.
    """
    world = init_world(dist.HashStore())  # one process needs no store that listens on a port
    stop = StopRequest(world.store)
    model = read_model_files(config, world)
    dtype = dtype_of(config.engine.dtype, auto=compute_dtype(config, world.device))
    engine = VLLMEngine(config, model.folder, dtype, world)
    inbox = Inbox()
    driver = Driver(engine, inbox)
    control = EngineControl(engine, inbox, driver)
    facts = describe(config, options, engine, world)

    def add_routes(app: FastAPI) -> None:
        add_control_routes(app, control, facts)
        add_adapter_routes(app, control, engine.adapters)

    try:
        server = listen(config, options, model, inbox, add_routes)
        host = f"[{options.host}]" if ":" in options.host else options.host
        print(f"serving {config.model.name} at http://{host}:{server.ports[0]}", flush=True)
        try:
            control.run(stop.requested)
        finally:
            server.close()
    finally:
        engine.close()


def describe(config: Config, options: ServeOptions, engine: VLLMEngine, world: World) -> JsonObject:
    """Facts for /bridge/info."""
    parameters = list(engine.model.parameters())
    return {
        "model": config.model.name,
        "dtype": str(parameters[0].dtype).removeprefix("torch."),
        "device": world.device.type,
        "max_model_len": config.max_sequence_tokens,
        "max_num_seqs": options.max_num_seqs,
        "num_parameters": sum(parameter.numel() for parameter in parameters),
        "pid": os.getpid(),
    }


def listen(
    config: Config,
    options: ServeOptions,
    model: ModelFiles,
    inbox: Inbox,
    add_routes: Callable[[FastAPI], None],
) -> ServerThread:
    limits = limits_of(config, model, max_tokens_setting="--max-model-len")
    sampler = Sampler(
        LoadBalancer([inbox.put]),
        lambda token_ids, k: inbox.call(lambda engine: engine.top_logprobs(token_ids, k)),
        model.tokenizer,
        Origins(REMEMBERED_COMPLETIONS),
        limits,
        partial(print, "note:", flush=True),
    )
    app = create_app(
        sampler,
        config.model.name,
        limits.max_tokens,
        hosts=Hosts(options.host, options.allow_host),
        api_key=os.environ[options.api_key_variable] if options.api_key_variable else None,
        max_body_bytes=MAX_BODY_BYTES,
        max_requests=MAX_REQUESTS,
        add_routes=add_routes,
    )
    try:
        return ServerThread(app, options.host, [options.port])
    except OSError as error:  # taken while the engine was built
        raise RunError(f"--port={options.port}: cannot listen on {error.strerror}") from None
