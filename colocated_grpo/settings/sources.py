"""Settings of environments: task, episode, dataset, agent and turns. Those of atropos are in a separate file."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from colocated_grpo.settings import base
from colocated_grpo.settings.atropos import AtroposSourceConfig
from colocated_grpo.settings.errors import KeyPath
from colocated_grpo.settings.generation import ModelConfig
from colocated_grpo.types import JsonObject

FROZEN = "frozen"
"""Entry in the `players` of a game. The opponent plays the seat of this entry."""


class OpponentConfig(base.Section):
    """A frozen model that plays against the policy, in the same engine. A run has at most one opponent."""

    name: base.InputFile = base.INITIAL
    """initial: the run's own model before the first step. Otherwise the folder or Hugging Face name of a model of the
    same shape, for example the final_model/ of another run."""
    revision: str | None = None
    """Branch, tag or commit on the Hub. Default: the main branch."""
    refresh_every: base.NonNegative = 0
    """Steps between copies of the current policy into the opponent. With such copies, checkpoints include the
    opponent's weights. 0: the opponent never changes."""


class TurnsSourceConfig(base.Section):
    """A game trained turn by turn. Each turn is a prompt. Its completions are one group, scored on one position."""

    type: Literal["turns"]
    name: base.CodeName
    """'town', 'tossim' or your own 'package.module:object' or 'path/to/file.py:object'."""
    args: JsonObject = {}
    """Keyword arguments of the environment, except `seed`, which is derived from the run's seed."""
    commit: Literal["first", "random", "best"] = "first"
    """Completion that is played in each turn. first and random follow the policy. best: the one with the highest
    reward; games are then played better than the policy plays, which biases returns from the end of a game."""
    max_wait: base.Positive = 64
    """Maximum steps that a turn waits for its game to end, if its reward includes the game's result. After that, the
    turn is trained with its immediate reward (metric turns_overdue). Longer waits make rollouts staler."""
    stop_at_parse_rate: base.Number | None = Field(None, gt=0, le=1)
    """End the run when the share of well-formed completions has been at least this for stop_after steps in a row. null:
    train for all training_steps."""
    stop_after: base.Positive = 1000
    """Number of consecutive steps for stop_at_parse_rate."""
    structured: bool = False
    """Constrain sampling to legal completions with a grammar. false: the policy learns the format from rewards. Needs
    loss.old_logprobs: trainer; such requests decode more slowly."""
    opponent: OpponentConfig | None = None
    """Frozen model for the seats that the game assigns to it (town: players: [policy, frozen]), the same in all
    entries. Its turns are sampled once and not trained. Its weights are in host memory and swapped into the engine."""
    weight: base.Number = Field(1.0, gt=0)
    """Relative share of the prompts: an entry of weight 3 beside one of weight 1 supplies three quarters."""


TRAIN_DATASET, EVAL_DATASETS = base.TRAIN_DATASET, "eval_datasets"
"""Names that stand for rows passed to Trainer as objects. train_dataset: an entry's training rows. eval_datasets: the
entry's held-out rows. eval_datasets[NAME]: the rows of evaluation set NAME."""


DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
"""Suffixes of dataset files. The readers are in `environments.rows.readers`, a layer above settings."""
SplitOrFile = Annotated[str, *base.file_names(lambda name: name.lower().endswith(DATA_SUFFIXES))]
Program = Annotated[str, *base.file_names(lambda name: not shutil.which(name))]
"""Name of a command in PATH, of a file, or of a function."""


class ItemSourceConfig(base.NamedObject):
    """Code that generates prompts and scores their completions."""

    type: str
    name: base.CodeName
    args: JsonObject = {}
    """Keyword arguments of the task's or episode's class."""
    system_prompt: str | None = None
    """System message added to the model's prompt if the prompt has none. `score` or `run` gets the item unchanged."""
    tools: list[base.Tool] = []
    """Tools that the chat template describes: docs/guides/prompts.md. `tools` of an item take precedence."""
    chat_template_kwargs: base.TemplateVariables = {}
    """Variables of the chat template, in addition to model.chat_template_kwargs. Example: {enable_thinking: false}.
    `chat_template_kwargs` of an item take precedence."""
    weight: base.Number = Field(1.0, gt=0)
    """Relative share of the prompts: an entry of weight 3 beside one of weight 1 supplies three quarters."""


class TaskSourceConfig(ItemSourceConfig):
    """A task generates prompts and scores single completions."""

    type: Literal["task"] = "task"
    name: base.CodeName
    """A built-in task (arithmetic, countdown, reversal, sorting), 'reasoning_gym:<dataset>', or your own
    'package.module:object' or 'path/to/file.py:object'."""


class EpisodeSourceConfig(ItemSourceConfig):
    """An episode runs a multi-turn conversation with the policy and scores it: docs/guides/episodes.md."""

    type: Literal["episode"]
    name: base.CodeName
    """A built-in episode, an environment of another library such as 'textarena:<game>' (docs/guides/libraries.md), or
    your own 'package.module:object' or 'path/to/file.py:object'."""


def names_model(reward: str) -> bool:
    """Return True for the folder or Hugging Face name of a reward model, which contains a slash."""
    return "/" in reward and ":" not in reward and not reward.endswith(".py")


class RewardConfig(base.NamedObject):
    """One reward function of a dataset. Functions have TRL's signature: docs/guides/from_trl.md."""

    name: Annotated[str, *base.file_names(lambda name: base.names_code(name) or names_model(name))]
    """A built-in reward, 'trl.rewards:accuracy_reward', or your own 'package.module:function' or
    'path/to/file.py:function'. With a slash and no colon, the Hugging Face name or the folder of a reward model:
    'organization/name' or './folder' (docs/guides/rewards.md)."""
    args: JsonObject | None = None
    """If set, even to {}, `name` is a class or factory that is called with these keyword arguments and returns the
    reward function. For a reward model: revision and trust_remote_code, as in `model`."""
    run_in: Literal["auto", "process", "thread"] = "auto"
    """process: the function runs in worker processes without access to GPUs (rollout.reward_workers per rank). A call
    that exceeds rollout.reward_timeout is killed, even in native code. thread: the function runs in threads of the
    rank, for rewards that use the rank's GPU or share state. A reward in a thread that holds Python's interpreter lock
    for longer than the timeout ends the run. auto: process for a plain function in your own files that uses no `global`
    statement and whose files import no deep learning library, else thread."""
    relative: bool = False
    """true: the function compares a prompt's completions with each other, so it always gets all of them. false: after
    an exception, the function is called once per completion, to find the completions on which it raises."""
    weight: base.Number = Field(1.0, ge=-1e6, le=1e6)
    """Factor of this reward in the sum of a completion's rewards. 0: the reward is only logged, as reward/<name>; its
    values and exceptions do not affect the sum."""

    @property
    def model(self) -> ModelConfig | None:
        """The reward model; None for a function."""
        revision = (self.args or {}).get("revision")
        return ModelConfig(name=self.name, revision=revision) if names_model(self.name) else None

    @model_validator(mode="after")
    def _runs_where_it_can(self) -> Self:
        if self.run_in == "process" and names_model(self.name):
            raise ValueError("run_in=process: a reward model runs in the rank; worker processes see no GPU")
        return self


def reward_by_name(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


def reward_name(name: object) -> object:
    """Convert a reward's name from the form of TRL's script to the form of a config. Other values are unchanged."""
    if name in ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment"):
        return f"trl.rewards:{name}"
    if not isinstance(name, str) or ":" in name or name.endswith(".py") or names_model(name):
        return name
    module, _, function = name.rpartition(".")
    return f"{module}:{function}" if module else name


class RowsSourceConfig(base.NamedObject):
    """Rows of a dataset as prompts."""

    type: str
    name: base.InputFile
    """A .jsonl, .json, .csv or .parquet file, a folder written by save_to_disk(), or a Hugging Face dataset name.
    Values of a .csv stay text."""
    subset: str | None = None
    """Configuration name of a Hugging Face dataset. Not for local files."""
    split: str = "train"
    """Training split of a Hugging Face dataset. Not for local files."""
    eval_split: SplitOrFile | None = None
    """Split of held-out prompts; for a local file, the path of another file. Default: the last `held_out` rows of the
    training data, which are then excluded from training."""
    held_out: base.NonNegative | None = None
    """Rows held out for evaluation if eval_split is not set. Default: a tenth of the rows, at most 64."""
    prompt_column: str = "prompt"
    """Column of the prompt: text, or chat messages. With a chat template, text becomes one user message."""
    columns: dict[str, str] = {}
    """Columns to rename before they are passed to rewards. Example: {answer: solution}."""
    system_prompt: str | None = None
    """System message added to each prompt without one. A text prompt then becomes a chat message, also for rewards."""
    shuffle: bool = True
    """Read the rows of each pass in a random order, from `seed`. false: in their order, such as from easy to hard."""
    filter: base.CodeName | None = None
    """Function 'package.module:function' or 'path/to/file.py:function'. It gets a row as a dictionary, with the
    columns as in the data, and returns true to keep the row."""
    weight: base.Number = Field(1.0, gt=0)
    """Relative share of the prompts: an entry of weight 3 beside one of weight 1 supplies three quarters."""

    _held_out: object = PrivateAttr(default=None)

    @property
    def given_held_out(self) -> Any:
        """Held-out rows passed to Trainer by the program; None: use `eval_split` or the last rows."""
        return self._held_out


class DatasetSourceConfig(RowsSourceConfig):
    """Rows of a dataset as prompts, scored by reward functions."""

    type: Literal["dataset"]
    rewards: list[Annotated[RewardConfig, BeforeValidator(reward_by_name)]]
    """Reward functions, summed by weight. A plain name is short for {name: ...}. []: none, where loss.kl alone trains
    (docs/guides/distillation.md)."""
    tools: list[base.Tool] = []
    """Tools that the chat template describes: docs/guides/prompts.md. A column `tools` takes precedence."""
    chat_template_kwargs: base.TemplateVariables = {}
    """Variables of the chat template, in addition to model.chat_template_kwargs. Example: {enable_thinking: false}. A
    column `chat_template_kwargs` takes precedence."""


class AgentSourceConfig(RowsSourceConfig):
    """Rows of a dataset as tasks for a program that samples through OpenAI's chat API: docs/guides/agents.md."""

    type: Literal["agent"]
    program: Program
    """A Python file (run by the Python interpreter of this run), any other executable, or an async function:
    'path/to/file.py:function' or 'package.module:function'."""
    arguments: list[str] = []
    """Arguments of the program's command line."""
    max_requests: base.Positive = 64
    """Maximum number of completions per agent. Further requests are rejected with 400."""
    max_running: base.Positive = 32
    """Maximum number of agents that run at once on one rank. Waiting agents do not use up rollout.tool_timeout."""


EnvironmentConfig = Annotated[
    TaskSourceConfig
    | DatasetSourceConfig
    | EpisodeSourceConfig
    | AgentSourceConfig
    | TurnsSourceConfig
    | AtroposSourceConfig,
    Field(discriminator="type"),
]


def is_rewarded(source: EnvironmentConfig) -> bool:
    """Return False for a dataset without a reward that counts. Rewards of weight 0 are only logged."""
    return not isinstance(source, DatasetSourceConfig) or any(reward.weight for reward in source.rewards)


def prompt_functions(source: EnvironmentConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yield the key path and name of each function that describes tools or filters rows."""
    if isinstance(source, ItemSourceConfig | DatasetSourceConfig):
        for number, tool in enumerate(source.tools):
            if isinstance(tool, str):
                yield ("tools", number), tool
    if isinstance(source, RowsSourceConfig) and source.filter is not None:
        yield ("filter",), source.filter


def give_objects(entries: Sequence[EnvironmentConfig], objects: Mapping[str, object]) -> None:
    """Attach a program's objects to the settings that contain the objects' names. Other names are loaded as usual."""
    for entry in entries:
        if isinstance(entry, base.NamedObject):
            entry._object = objects.get(entry.name)
        if isinstance(entry, RowsSourceConfig):
            entry._held_out = objects.get(entry.eval_split or "")
        if isinstance(entry, DatasetSourceConfig):
            for reward in entry.rewards:
                reward._object = objects.get(reward.name)
