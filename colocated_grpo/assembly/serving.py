"""Other processes of a run: engine servers, which get its weights, and environments, which sample from its engines.

Ports are opened and Atropos' API server is contacted before device memory is allocated. Requests wait for the engines.
"""

import copy
import os
import secrets
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from colocated_grpo.assembly.engines import Engines, Site
from colocated_grpo.atropos.reader import GroupReader, Origins
from colocated_grpo.atropos.source import AtroposClient, AtroposSource, trainer_of
from colocated_grpo.atropos.supply import AtroposSupply, MainSupply, WorkerSupply
from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.chat import ChatCodec
from colocated_grpo.errors import ConfigError
from colocated_grpo.policy import model_loader
from colocated_grpo.policy.export import AdapterExport, ModelExport
from colocated_grpo.policy.model_files import ModelFiles
from colocated_grpo.policy.policy import Policy
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.program import KEY_VARIABLE, URLS_VARIABLE
from colocated_grpo.runtime.supervision import StopRequest
from colocated_grpo.servers import broadcast, exported, rank_links, remote, text
from colocated_grpo.servers.app import create_app
from colocated_grpo.servers.engine_servers import EngineServer
from colocated_grpo.servers.sampler import Sampler
from colocated_grpo.settings.atropos import AtroposSourceConfig, ServerConfig
from colocated_grpo.settings.config_json import first_difference, read_config_json, shape_of
from colocated_grpo.settings.schema import Config, ModelConfig
from colocated_grpo.tracking import files
from colocated_grpo.types import JsonObject
from colocated_grpo.web.server import Hosts, ServerThread
from colocated_grpo.weights.colocated import SharedSync

WEIGHTS_FOLDER = "engine_weights"
"""In the run folder: weights that servers load from files."""


def connect_servers(config: Config, world: World, stop: StopRequest) -> list[EngineServer]:
    """Wait for the engine servers of the run, and check them. Collective. Raises ConfigError or RunError."""
    engine = config.engine
    urls, variable = engine.urls, engine.api_key_variable
    if not urls:
        urls, variable = os.environ.get(URLS_VARIABLE, "").split(), KEY_VARIABLE
    if not urls:
        advice = "start servers with colocated-grpo serve and give their addresses"
        raise ConfigError(f"engine.urls: empty; {advice}, or start the run with colocated-grpo, which starts them")
    key = _key(variable)
    trainer = world.broadcast_object(secrets.token_hex(16) if world.is_main else None)
    servers = [EngineServer(url, key, trainer, engine.server_timeout, stop.requested) for url in urls]
    dtype = None  # any: weights are cast when they are sent
    if engine.dtype != "auto" or engine.bridge == "shared":
        dtype = str(model_loader.engine_dtype(engine, config.policy, world.device)).removeprefix("torch.")
    prepare = partial(_prepare, config.model, config.max_sequence_tokens, engine.bridge, dtype)
    world.from_main(lambda: [prepare(server, server.wait_until_ready()) for server in servers] and None)
    return servers


def _prepare(
    model: ModelConfig, max_tokens: int, bridge: str, dtype: str | None, server: EngineServer, info: JsonObject
) -> None:
    """Check that the server fits the run, and unload an adapter left by an earlier trainer. Raises ConfigError."""
    shape, served, setting = shape_of(read_config_json(model)), info["shape"], f"engine.urls={server.url}"
    if (key := first_difference(shape, served)) is not None:
        rule = f"whose {key} is {served[key]}, but {shape[key]} in model.name={model.name!r}"
        raise ConfigError(f"{setting}: serves {info['model']}, {rule}; start it with the run's model")
    if info["max_model_len"] < max_tokens:
        advice = f"--max-model-len {max_tokens} (rollout.max_prompt_tokens + rollout.max_completion_tokens) or more"
        raise ConfigError(f"{setting}: reads {info['max_model_len']} tokens; start it with {advice}")
    if dtype not in (None, info["dtype"]):
        rule = f"its weights are {info['dtype']}, and {dtype} by engine.dtype and policy.compute_dtype"
        raise ConfigError(f"{setting}: {rule}; start it with --dtype {dtype}")
    adapters = server.until_answered(server.adapters)
    if bridge != "adapter":
        if adapters["adapter_name"] is not None:
            server.post_or_end("/lora/unload")
    elif not adapters["enabled"]:
        raise ConfigError(f"{setting}: started without --enable-lora, which engine.bridge=adapter needs")
    elif info["has_received_weights"]:
        raise ConfigError(f"{setting}: a run with engine.bridge: broadcast has changed its base model; start it again")


def build_remote(
    config: Config, servers: list[EngineServer], policy: Policy, model: ModelFiles, folder: Path, site: Site
) -> Engines:
    """Return the engines of the servers, with the bridge that sends weights to them. Collective."""
    world, engine, lora, base = site.world, config.engine, config.policy.lora, config.model.name
    prefix, files, check_every = policy.model.lm.base_model_prefix, folder / WEIGHTS_FOLDER, config.freshness.every
    sync: broadcast.BroadcastSync | broadcast.AdapterSync | broadcast.RestartSync | SharedSync
    match engine.bridge:
        case "broadcast":
            sync = broadcast.BroadcastSync(policy.weights.published(), prefix, servers, world, check_every)
        case "adapter":
            assert lora is not None  # the config requires an adapter for this bridge
            adapter = AdapterExport(policy=policy, lora=lora, base=base, tokenizer=model.tokenizer, world=world)
            sync = broadcast.AdapterSync(adapter, files / "adapter", servers)
        case "restart":
            export = ModelExport(policy=policy, files=model, dtype=policy.dtype, world=world)
            sync = broadcast.RestartSync(export, files, servers, base)
        case "shared":
            file = Path(engine.bridge_config or exported.export_folder() / exported.CONFIG_NAME)
            views = exported.attach(file, servers[0].wait_until_ready()["instance"])
            views = exported.adopt_exported(views, policy.model)
            sync = SharedSync(policy.weights.published(), views, world, check_every)
    restore: remote.Restore = (lambda server: False) if isinstance(sync, SharedSync) else sync.restore
    infos = [server.wait_until_ready() for server in servers]
    engines = [remote.RemoteEngine(server, restore, site.stop.request) for server in servers]
    # In a deterministic run, send all requests at once: the server's queue decides which decode together, not timing.
    limit = sys.maxsize if config.deterministic else None
    return Engines(
        local=None,
        engine=remote.EngineGroup(engines, max_num_seqs=limit),
        sync=sync,
        dtype=getattr(torch, infos[0]["dtype"]),
        is_quantized=any(info["is_quantized"] for info in infos),
    )


REMEMBERED_COMPLETIONS = 1 << 17
"""Limit of remembered completions: several batches of the largest size."""


class Serving:
    """Links between the inboxes of all ranks. Rank 0 also has the open ports and the source of batches."""

    def __init__(
        self, config: Config, atropos: AtroposSourceConfig, model: ModelFiles, inbox: Inbox, folder: Path, site: Site
    ) -> None:
        """Collective. Raises EnvironmentSetupError with one line, on every rank."""
        limits, tokenizer = text.limits_of(model, config.max_sequence_tokens, config.seed), model.tokenizer
        self._world, self._note = site.world, site.note
        self._inbox = inbox
        self._links, self._end = rank_links.link_ranks(inbox, site.world)
        self._engines = rank_links.LoadBalancer(inbox, self._links)
        self._servers: list[ServerThread] = []
        self.source: AtroposSource | None = None
        """Source of batches; None on all ranks except rank 0."""

        def open_ports() -> None:
            origins = Origins(REMEMBERED_COMPLETIONS)
            key, trainer = _key(atropos.api_key_variable), trainer_of(config, folder)
            client = AtroposClient(atropos.url, trainer, may_reset=atropos.reset, api_key=key)
            # Tokenizers are not thread-safe: one copy for batches, one for requests.
            self.source = AtroposSource(
                client,
                GroupReader(
                    source=atropos.name,
                    vocab_size=limits.vocab_size,
                    max_tokens=limits.max_tokens,
                    recompute_logprobs=atropos.missing_logprobs == "recompute",
                    origins=origins,
                    decode=ChatCodec(copy.deepcopy(tokenizer)).message_text,
                ),
                connect_timeout=atropos.connect_timeout,
                unusable_timeout=atropos.unusable_timeout,
                note=self._note,
                keep=partial(files.write_atropos_batch, folder) if atropos.keep_last_batch else lambda items: None,
            )
            self.source.connect()
            codec = text.TextCodec(copy.deepcopy(tokenizer), limits, config.model.chat_template_kwargs)
            sampler = Sampler(self._engines, codec, self._note, on_sampled=origins.record)
            self._servers.append(listen(sampler, config.model.name, atropos.server))
            ports = ", ".join(map(str, self._servers[0].ports))
            at = f"environments sample at {atropos.server.host}, port {ports}"
            self._note(f"atropos: batches from {atropos.url}; {at}")

        site.resources.callback(self.close)
        self._world.from_main(open_ports)

    def close(self) -> None:
        """Close ports and links. The supply of `start` calls this after its last response; later calls do nothing."""
        for server in self._servers:
            server.close()
        for link in self._links:
            link.close()
        if self._end is not None:
            self._end.close()

    def start(
        self, driver: Driver, step: int, stop_requested: Callable[[], bool], policy_version: Callable[[], int]
    ) -> AtroposSupply:
        """Register as the trainer at `step`, so that environments begin. Collective. driver: serves the same inbox."""
        source = self.source
        self._world.from_main(lambda: None if source is None else source.fetch(step))
        if source is None:
            assert self._end is not None  # every rank except 0 has a link to rank 0
            return WorkerSupply(self._world, driver, stop_requested, self.close, inbox=self._end)
        return MainSupply(
            self._world,
            driver,
            stop_requested,
            self.close,
            source=source,
            inbox=self._inbox,
            rank_links=self._links,
            engines=self._engines,
            policy_version=policy_version,
            note=self._note,
        )


def _key(variable: str | None) -> str | None:
    return os.environ[variable] if variable else None


def listen(sampler: Sampler, model: str, settings: ServerConfig) -> ServerThread:
    """Open the engine's ports. Raises EnvironmentSetupError if a port is taken."""
    app = create_app(
        sampler,
        model,
        hosts=Hosts(settings.host, settings.allowed_hosts),
        api_key=_key(settings.api_key_variable),
        max_body_bytes=settings.max_body_bytes,
        max_requests=settings.max_requests,
    )
    try:
        return ServerThread(app, settings.host, [settings.port, *settings.more_ports])
    except OSError as error:
        advice = f"stop the process that does (lsof -i :{settings.port}) or set another port"
        line = f"environments: atropos: server: cannot listen on {error.strerror}; {advice}"
        raise EnvironmentSetupError(line) from None
