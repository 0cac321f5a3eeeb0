"""The JSON of Atropos' API server (atroposlib 0.4.0): its request bodies, and the groups of GET /batch."""

from __future__ import annotations

import math
from typing import Annotated, Any, Required, TypedDict

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from colocated_grpo.types import JsonObject

MAX_DEPTH = 32


def _check_serializable(value: Any) -> Any:
    """Raise ValueError for NaN, infinity, and nesting that could overflow the JSON writer's stack."""
    level = [value]
    for _ in range(MAX_DEPTH):
        if any(isinstance(item, float) and not math.isfinite(item) for item in level):
            raise ValueError("numbers must be finite")
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return value
    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")


AnyJson = Annotated[Any, AfterValidator(_check_serializable)]
AnyJsonObject = Annotated[JsonObject, AfterValidator(_check_serializable)]

# Bounded: the server computes with these numbers for all clients, so one overflow or division by zero fails them all.
Count = Annotated[int, Field(ge=1, lt=2**31)]


class Payload(BaseModel):
    """A request body. Unknown keys are ignored, as in atroposlib. NaN and infinity are rejected: JSON has neither."""

    model_config = ConfigDict(allow_inf_nan=False)


class Registration(Payload):
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


class EnvRegistration(Payload):
    """POST /register-env: an environment."""

    max_token_length: Count
    desired_name: str | None
    """None from environments started without --env.wandb_name."""
    weight: float = Field(ge=0, le=1e6)
    group_size: Count
    min_batch_allocation: float | None = Field(None, ge=0, le=1)
    """Smallest fraction of every batch that must come from this environment."""


class EnvIdentifier(Payload):
    env_id: int


class ScoredData(Payload):
    """One scored group. Lists have one entry per sequence; their lengths are not checked here."""

    tokens: list[list[int]]
    masks: list[list[int]]
    """The token itself where it is trained, -100 elsewhere."""
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: list[list[AnyJsonObject]] | None = None
    generation_params: AnyJsonObject | None = None
    inference_logprobs: list[list[float]] | None = None
    overrides: list[AnyJsonObject] | None = None
    group_overrides: AnyJsonObject | None = None
    images: AnyJson = None
    env_id: int | None = None
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None

    @field_validator("messages")
    @classmethod
    def _messages_have_a_role_and_content(cls, value: list[list[JsonObject]] | None) -> list[list[JsonObject]] | None:
        for message in (message for turn in value or [] for message in turn):
            if "role" not in message or "content" not in message:
                raise ValueError("a message needs 'role' and 'content'")
        return value

    @property
    def size(self) -> int:
        """Number of sequences."""
        return len(self.tokens)

    def as_json(self) -> JsonObject:
        """Return every field, None where absent. The lists are not copied: a group may hold megabytes."""
        return {name: getattr(self, name) for name in type(self).model_fields}


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
