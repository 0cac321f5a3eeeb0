"""Settings of environments in other processes, connected through Atropos' API server: docs/guides/atropos.md."""

import ipaddress
from typing import Annotated, Literal

from pydantic import Field

from colocated_grpo.settings.base import Integer, Number, Positive, Section
from colocated_grpo.settings.generation import Url

Port = Annotated[Integer, Field(ge=1, le=65535)]


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_wildcard(bound: str) -> bool:
    """True if a server bound to this address listens on all addresses of the machine."""
    return bound == "" or (is_address(bound) and ipaddress.ip_address(bound).is_unspecified)


def is_loopback(bound: str) -> bool:
    """True if a server bound to this address is reachable only from this machine."""
    return bound == "localhost" or (is_address(bound) and ipaddress.ip_address(bound).is_loopback)


class ServerConfig(Section):
    """HTTP server on rank 0. Environments sample through this server from the engines of all ranks."""

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 accepts requests from other machines. In this case also set api_key_variable:
    without a key, every machine that reaches the port can use the engines."""
    port: Port = 9001
    """Port of the server: environments are started with --openai.base_url http://HOST:PORT/v1."""
    more_ports: list[Port] = []
    """Further ports of the same server. Use [9004, 9005, 9006, 9007] for environments that ignore --openai.base_url."""
    api_key_variable: str | None = None
    """Environment variable with the key that requests must send. The key is never logged or saved. null: no key."""
    allowed_hosts: list[str] = []
    """Additional host names accepted in requests, such as a service name in a container network. Other host names are
    rejected with 403, because a web page can make its own name resolve to this machine. With an API key, all host names
    are accepted."""
    max_body_bytes: Positive = 8 << 20
    """Maximum bytes of a request body; larger ones are rejected with 413. The default fits a million prompt tokens."""
    max_requests: Positive = 4096
    """Maximum number of running and waiting requests. Further requests are rejected with 503."""


class AtroposSourceConfig(Section):
    """Groups that Atropos environments sample, score and post to an API server."""

    type: Literal["atropos"]
    name: str = "atropos"
    """Name of this source in logs and rollouts.jsonl."""
    url: Url = "http://localhost:8000"
    """Address of the API server (run-api, or python -m colocated_grpo.atropos.api)."""
    api_key_variable: str | None = None
    """Environment variable with the key of the API server, if that server requires a key. run-api requires none."""
    reset: bool = False
    """true: reset an API server that still serves a run with another batch size or sequence length. The server's queue
    is lost. false: stop with an error."""
    missing_logprobs: Literal["refuse", "recompute"] = "refuse"
    """Handling of groups without inference_logprobs. refuse: the groups are dropped and counted. recompute: the groups
    are trained with log-probabilities that the trainer computes before the first update. Mismatch and staleness then
    stay uncorrected."""
    unusable_timeout: Number | None = Field(900.0, gt=0)
    """Maximum seconds without a single trainable group while groups keep arriving. After this time, the run saves a
    checkpoint and stops with the reasons. One environment with valid groups is enough to continue. The default exceeds
    an environment's time limit for a rollout (600 s). null: no limit."""
    keep_last_batch: bool = False
    """Write the latest batch, as received, to atropos_batch.json in the run folder."""
    connect_timeout: Number = Field(30.0, gt=0)
    """Seconds to wait for the API server when the run starts. If it is lost later, the run waits without limit."""
    server: ServerConfig = ServerConfig()
    """The server from which environments sample."""
    weight: Number = Field(1.0, gt=0)
    """Relative share of a step's prompts supplied by Atropos, compared with the weights of other entries. The resulting
    number of prompts must be whole."""
