"""Settings of an environment in another process, behind Atropos' API server."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from colocated_grpo.config.base import Positive, Section

Port = Annotated[int, Field(ge=1, le=65535)]


class ServerConfig(Section):
    """The engine over HTTP, for environments in other processes."""

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 lets other machines in; set api_key_variable then."""
    port: Port = 9001
    """Where environments find the engine (--openai.base_url http://host:port/v1)."""
    more_ports: list[Port] = []
    """Further ports with the same server. [9004, 9005, 9006, 9007] for environments that ignore --openai.base_url."""
    api_key_variable: str | None = None
    """Environment variable that holds the key which requests must bring; the key itself is never written anywhere."""
    max_body_bytes: Positive = 32 << 20
    """Larger request bodies are refused."""
    max_requests: Positive = 4096
    """Requests held at one time; more are answered with 503."""


class AtroposSourceConfig(Section):
    type: Literal["atropos"]
    name: str = "atropos"
    """What its groups are called in logs."""
    url: str = "http://localhost:8000"
    """Atropos' API server (run-api, or python -m colocated_grpo.atropos.api)."""
    reset: bool = False
    """Empty an API server that is registered with another batch size or length; its queue is lost."""
    missing_logprobs: Literal["refuse", "recompute"] = "refuse"
    """Groups without inference_logprobs. recompute: the trainer's of before the batch stand in, so that neither
    mismatch nor staleness is corrected."""
    keep_last_batch: bool = False
    """Leave the latest batch as it came, in atropos_batch.json in the run folder."""
    connect_timeout: float = Field(30.0, gt=0)
    """Seconds to wait for the API server at the start."""
    server: ServerConfig = ServerConfig()
    """Where environments sample completions."""
    weight: float = Field(1.0, gt=0)
    """Share of a step's prompts that its batch stands for, relative to the other entries."""
