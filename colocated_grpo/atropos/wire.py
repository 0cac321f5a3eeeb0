"""The JSON of Atropos' API server (atroposlib 0.4.0), as its endpoints read it."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

DEEPEST = 32


def _sendable(value: Any) -> Any:
    """Free-form JSON that can be written again: no NaN, and not nested until the writer's stack is used up."""
    level = [value]
    for _ in range(DEEPEST):
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
    raise ValueError(f"nested deeper than {DEEPEST} levels")


Anything = Annotated[Any, AfterValidator(_sendable)]
Settings = Annotated[dict[str, Any], AfterValidator(_sendable)]


# What one client registers is reckoned with for all of them: an overflow or a division by zero would be everybody's.
Count = Annotated[int, Field(ge=1, lt=2**31)]


class Payload(BaseModel):
    """Unknown keys are ignored, as there. NaN and infinity are not numbers: JSON has no word for them."""

    model_config = ConfigDict(allow_inf_nan=False)


class Registration(Payload):
    """What a trainer says of itself."""

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
    max_token_length: Count
    desired_name: str | None
    """None from environments started without --env.wandb_name."""
    weight: float = Field(ge=0, le=1e6)
    group_size: Count
    min_batch_allocation: float | None = Field(None, ge=0, le=1)
    """Least share of a batch that comes from this environment."""


class EnvIdentifier(Payload):
    env_id: int


class ScoredData(Payload):
    """One group. Lists hold one entry for each sequence; nothing says that their lengths agree."""

    tokens: list[list[int]]
    masks: list[list[int]]
    """-100, or the token itself where it is trained."""
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: list[list[Settings]] | None = None
    generation_params: Settings | None = None
    inference_logprobs: list[list[float]] | None = None
    overrides: list[Settings] | None = None
    group_overrides: Settings | None = None
    images: Anything = None
    env_id: int | None = None
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None

    @field_validator("messages")
    @classmethod
    def _messages_have_a_role_and_content(cls, value: list[list[dict[str, Any]]] | None) -> Any:
        for message in (message for turn in value or [] for message in turn):
            if "role" not in message or "content" not in message:
                raise ValueError("a message needs 'role' and 'content'")
        return value

    def as_group(self) -> dict[str, Any]:
        """Every key, None where absent. The lists are this object's own, not copied."""
        return {name: getattr(self, name) for name in type(self).model_fields}
