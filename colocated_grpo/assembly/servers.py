"""Engines in other processes: connections to their servers, and the bridge that sends them weights."""

import os
import secrets
import sys
from functools import partial
from pathlib import Path

import torch

from colocated_grpo.assembly.engines import Engines
from colocated_grpo.assembly.policy import model_export
from colocated_grpo.errors import ConfigError
from colocated_grpo.phases import WeightSync
from colocated_grpo.policy.export import AdapterExport
from colocated_grpo.policy.masters import adopt
from colocated_grpo.policy.model_files import ModelFiles
from colocated_grpo.policy.model_loader import engine_dtype
from colocated_grpo.policy.policy import Policy
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.program import KEY_VARIABLE, URLS_VARIABLE
from colocated_grpo.runtime.supervision import StopRequest
from colocated_grpo.servers.broadcast import AdapterSync, BroadcastSync, RestartSync
from colocated_grpo.servers.engine_servers import EngineServer
from colocated_grpo.servers.exported import CONFIG_NAME, attach, export_folder, share_exported
from colocated_grpo.servers.remote import EngineGroup, RemoteEngine, Restore
from colocated_grpo.settings.config_json import first_difference, read_config_json, shape_of
from colocated_grpo.settings.schema import Config, EngineConfig, ModelConfig, PolicyConfig
from colocated_grpo.types import JsonObject

WEIGHTS_FOLDER = "engine_weights"
"""In the run folder: weights that servers load from files."""


def connect(
    engine: EngineConfig, model: ModelConfig, policy: PolicyConfig, max_tokens: int, world: World, stop: StopRequest
) -> list[EngineServer]:
    """Wait for the servers of a run, and check them. Collective. Raises ConfigError or RunError.

    max_tokens: longest sequence.
    """
    urls, variable = engine.urls, engine.api_key_variable
    if not urls:
        urls, variable = os.environ.get(URLS_VARIABLE, "").split(), KEY_VARIABLE
    if not urls:
        raise ConfigError(
            "engine.urls: empty; start servers with colocated-grpo serve and give their addresses, or start the run "
            "with colocated-grpo, which starts them"
        )
    key = None if variable is None else os.environ[variable]
    trainer = world.broadcast_object(secrets.token_hex(16) if world.is_main else None)
    servers = [EngineServer(url, key, trainer, engine.server_timeout, stop.requested) for url in urls]
    dtype = None  # any: weights are cast when they are sent
    if engine.dtype != "auto" or engine.bridge == "shared":
        dtype = str(engine_dtype(engine, policy, world.device)).removeprefix("torch.")
    prepare = partial(_prepare, model, max_tokens, engine.bridge, dtype)
    world.from_main(lambda: [prepare(server, server.wait_until_ready()) for server in servers] and None)
    return servers


def _prepare(
    model: ModelConfig, max_tokens: int, bridge: str, dtype: str | None, server: EngineServer, info: JsonObject
) -> None:
    """Check that the server fits the run, and unload an adapter left by an earlier trainer. Raises ConfigError."""
    shape, served = shape_of(read_config_json(model)), info["shape"]
    if (key := first_difference(shape, served)) is not None:
        raise ConfigError(
            f"engine.urls={server.url}: serves {info['model']}, whose {key} is {served[key]}, but {shape[key]} in "
            f"model.name={model.name!r}; start it with the run's model"
        )
    if info["max_model_len"] < max_tokens:
        raise ConfigError(
            f"engine.urls={server.url}: reads {info['max_model_len']} tokens; start it with --max-model-len "
            f"{max_tokens} (rollout.max_prompt_tokens + rollout.max_completion_tokens) or more"
        )
    if dtype not in (None, info["dtype"]):
        raise ConfigError(
            f"engine.urls={server.url}: its weights are {info['dtype']}, and {dtype} by engine.dtype and "
            f"policy.compute_dtype; start it with --dtype {dtype}"
        )
    adapters = server.until_answered(server.adapters)
    if bridge != "adapter":
        if adapters["adapter_name"] is not None:
            server.post_or_end("/lora/unload")
    elif not adapters["enabled"]:
        raise ConfigError(f"engine.urls={server.url}: started without --enable-lora, which engine.bridge=adapter needs")
    elif info["has_received_weights"]:
        raise ConfigError(
            f"engine.urls={server.url}: a run with engine.bridge: broadcast has changed the base model; start it again"
        )


def build_remote(
    config: Config,
    servers: list[EngineServer],
    policy: Policy,
    model: ModelFiles,
    folder: Path,
    world: World,
    stop: StopRequest,
) -> Engines:
    """Return the engines of the servers, with the bridge that sends weights to them. Collective.

    folder: the run folder.
    """
    engine, lora, base, check_every = config.engine, config.policy.lora, config.model.name, config.freshness.every
    prefix, files = policy.model.lm.base_model_prefix, folder / WEIGHTS_FOLDER
    sync: WeightSync
    restore: Restore
    match engine.bridge:
        case "broadcast":
            sync = broadcast = BroadcastSync(policy.weights.published(), prefix, servers, world, check_every)
            restore = broadcast.restore
        case "adapter":
            assert lora is not None  # the config requires an adapter for this bridge
            adapter = AdapterExport(policy=policy, lora=lora, base=base, tokenizer=model.tokenizer, world=world)
            sync = load = AdapterSync(adapter, files, servers, world)
            restore = load.restore
        case "restart":
            export = model_export(policy, model, policy.dtype, world)
            sync = restart = RestartSync(export, files, servers, world, base=base, version=lambda: policy.version)
            restore = restart.restore
        case "shared":
            file = Path(engine.bridge_config or export_folder() / CONFIG_NAME)
            views = attach(file, servers[0].wait_until_ready()["instance"])
            adopted = partial(adopt, policy.model)
            sync = share_exported(views, prefix, policy.weights.published, adopted, world, check_every)
            restore = lambda server: False  # noqa: E731
    infos = [server.wait_until_ready() for server in servers]
    # In a deterministic run, send all requests at once: the server's queue then decides which requests decode together,
    # not timing.
    limit = sys.maxsize if config.deterministic else None
    return Engines(
        local=None,
        engine=EngineGroup([RemoteEngine(server, restore, stop.request) for server in servers], max_num_seqs=limit),
        sync=sync,
        dtype=getattr(torch, infos[0]["dtype"]),
        is_quantized=any(info["is_quantized"] for info in infos),
    )
