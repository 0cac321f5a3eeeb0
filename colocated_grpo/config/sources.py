"""Settings of environments: tasks, episodes and datasets here, games and Atropos in files of their own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from colocated_grpo.config.atropos import AtroposSourceConfig
from colocated_grpo.config.base import FileName, NonNegative, Section
from colocated_grpo.config.turns import TurnsSourceConfig


class TaskSourceConfig(Section):
    type: Literal["task"] = "task"
    name: str
    """A built-in task, 'reasoning_gym:<dataset>', one of an installed package, or your own 'module:object'."""
    args: dict[str, Any] = {}
    """Keyword arguments of the task."""
    weight: float = Field(1.0, gt=0)
    """Share of prompts drawn from this source, relative to the others."""


class EpisodeSourceConfig(Section):
    type: Literal["episode"]
    name: str
    """A built-in episode, 'textarena:<game>' or another library's (docs/guides/adapters.md), one that an installed
    package announces, or your own 'module:object'."""
    args: dict[str, Any] = {}
    """Keyword arguments of the episode."""
    weight: float = Field(1.0, gt=0)
    """Share of prompts drawn from this source, relative to the others."""


class RewardConfig(Section):
    name: str
    """A built-in name, 'trl.rewards:accuracy_reward' or your own 'module:function' (TRL's signature)."""
    args: dict[str, Any] | None = None
    """Given (even empty): the name is a factory or class that is called with these and returns the reward function."""
    weight: float = Field(1.0, ge=-1e6, le=1e6)
    """Factor of this reward in the sum."""


def _reward_by_name(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class DatasetSourceConfig(Section):
    type: Literal["dataset"]
    name: FileName
    """A .jsonl/.json/.csv/.parquet file, a folder of save_to_disk(), or a Hugging Face dataset name."""
    rewards: list[Annotated[RewardConfig, BeforeValidator(_reward_by_name)]] = Field(min_length=1)
    """Reward functions; a bare name stands for {name: ...}."""
    subset: str | None = None
    """Hugging Face dataset configuration name."""
    split: str = "train"
    """Split that is trained on."""
    eval_split: str | None = None
    """Split for held-out prompts. Default: held_out rows taken from the end of `split`."""
    held_out: NonNegative | None = None
    """Rows kept for evaluation when eval_split is not given. Default: a tenth of them, at most 64."""
    prompt_column: str = "prompt"
    """Text or list of chat messages."""
    columns: dict[str, str] = {}
    """Rename columns before rewards see them, for example {answer: solution}."""
    system_prompt: str | None = None
    """Put before each prompt as a system message; text prompts become chat messages, for the rewards too."""
    shuffle: bool = True
    """Shuffle rows each epoch by the run's seed."""
    weight: float = Field(1.0, gt=0)
    """Share of prompts drawn from this source, relative to the others."""


EnvironmentConfig = Annotated[
    TaskSourceConfig | DatasetSourceConfig | EpisodeSourceConfig | TurnsSourceConfig | AtroposSourceConfig,
    Field(discriminator="type"),
]
