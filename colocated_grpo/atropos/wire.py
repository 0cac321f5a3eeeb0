"""The JSON of Atropos' API server (atroposlib 0.4.0): its small request bodies, and the groups of GET /batch.

Unknown keys are ignored, as in atroposlib. Numbers are bounded: the server computes with them for all clients, so one
overflow or division by zero would fail them all.
"""

from __future__ import annotations

from typing import Annotated, Required, TypedDict

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=1, lt=2**31)]


class Registration(Struct):
    """POST /register: the trainer."""

    wandb_group: str
    wandb_project: str
    batch_size: Count
    """Sequences of one batch."""
    max_token_len: Count
    """Environments drop groups with a sequence of this length or longer."""
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int


class EnvRegistration(Struct):
    """POST /register-env: an environment."""

    max_token_length: Count
    desired_name: str | None
    """None from environments started without --env.wandb_name."""
    weight: Annotated[float, Meta(ge=0, le=1e6)]
    group_size: Count
    min_batch_allocation: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Smallest fraction of every batch that must come from this environment."""


class EnvIdentifier(Struct):
    env_id: int


class ReceivedGroup(TypedDict, total=False):
    """One group of GET /batch as received. Only `tokens` is certain to be a list; any other value may be malformed."""

    tokens: Required[list[object]]
    masks: object
    scores: object
    advantages: object
    ref_logprobs: object
    generation_params: object
    inference_logprobs: object
    overrides: object
    group_overrides: object
    images: object
    env_id: object
