"""The serving side of a run: the engines over HTTP, and batches from an Atropos API server.

Ports are opened and the API server is contacted before device memory is allocated; requests wait until the engines
start.
"""

import copy
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from colocated_grpo.assembly.engines import Site
from colocated_grpo.atropos.reader import GroupReader, Origins, Registration
from colocated_grpo.atropos.source import AtroposClient, AtroposSource
from colocated_grpo.atropos.supply import AtroposSupply, MainSupply, WorkerSupply
from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.chat import ChatCodec
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.servers.app import create_app
from colocated_grpo.servers.rank_links import LoadBalancer, link_ranks
from colocated_grpo.servers.sampler import Sampler
from colocated_grpo.servers.text import Limits
from colocated_grpo.settings.atropos import AtroposSourceConfig, ServerConfig
from colocated_grpo.settings.schema import ModelConfig
from colocated_grpo.tracking import files
from colocated_grpo.web.server import Hosts, ServerThread

REMEMBERED_COMPLETIONS = 1 << 17
"""Limit of remembered completions: several batches of the largest size."""


class Serving:
    """Links between the inboxes of all ranks. Rank 0 also has the open ports and the source of batches."""

    def __init__(
        self,
        atropos: AtroposSourceConfig,
        model: ModelConfig,
        registration: Registration,
        limits: Limits,
        tokenizer: PreTrainedTokenizerBase,
        inbox: Inbox,
        folder: Path,
        site: Site,
    ) -> None:
        """Collective. Raises EnvironmentSetupError with one line, on every rank. folder: the run folder."""
        self._world, self._note = site.world, site.note
        self._inbox = inbox
        self._links, self._end = link_ranks(inbox, site.world)
        self._engines = LoadBalancer(inbox, self._links)
        self._servers: list[ServerThread] = []
        self.source: AtroposSource | None = None
        """Source of batches; None on all ranks except rank 0."""

        def open_ports() -> None:
            origins = Origins(REMEMBERED_COMPLETIONS)
            key = _key(atropos.api_key_variable)
            client = AtroposClient(atropos.url, registration, may_reset=atropos.reset, api_key=key)
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
            sampler = Sampler(
                self._engines,
                copy.deepcopy(tokenizer),
                limits,
                self._note,
                template_variables=model.chat_template_kwargs,
                on_sampled=origins.record,
            )
            self._servers.append(listen(sampler, model.name, atropos.server, limits))
            ports = ", ".join(map(str, self._servers[0].ports))
            at = f"environments sample at {atropos.server.host}, port {ports}"
            self._note(f"atropos: batches from {atropos.url}; {at}")

        site.resources.callback(self.close)
        self._world.from_main(open_ports)

    def close(self) -> None:
        """Close ports and links. Call only if `start` was not called: the supply then closes both, once its requests
        have a response."""
        for server in self._servers:
            server.close()
        for link in self._links:
            link.close()
        if self._end is not None:
            self._end.close()

    def start(
        self, driver: Driver, step: int, stop_requested: Callable[[], bool], policy_version: Callable[[], int]
    ) -> AtroposSupply:
        """Register as the trainer at `step`, so that environments begin. Collective.

        driver: serves the inbox given at construction.
        """
        source = self.source
        self._world.from_main(lambda: None if source is None else source.begin(step))
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


def listen(sampler: Sampler, model: str, settings: ServerConfig, limits: Limits) -> ServerThread:
    """Open the engine's ports. Raises EnvironmentSetupError if a port is taken."""
    app = create_app(
        sampler,
        model,
        limits.max_tokens,
        hosts=Hosts(settings.host, settings.allowed_hosts),
        api_key=_key(settings.api_key_variable),
        max_body_bytes=settings.max_body_bytes,
        max_requests=settings.max_requests,
    )
    try:
        return ServerThread(app, settings.host, [settings.port, *settings.more_ports])
    except OSError as error:
        raise EnvironmentSetupError(
            f"environments: atropos: server: cannot listen on {error.strerror}; stop the process that does (lsof -i "
            f":{settings.port}) or set another port"
        ) from None
