"""Settings of games that are trained turn by turn: docs/guides/games.md."""

from typing import Literal

from pydantic import Field

from colocated_grpo.settings.base import INITIAL, CodeName, InputFile, NonNegative, Number, Positive, Section
from colocated_grpo.types import JsonObject

FROZEN = "frozen"
"""Entry in the `players` of a game. The opponent plays the seat of this entry."""


class OpponentConfig(Section):
    """A frozen model that plays against the policy, in the same engine. A run has at most one opponent."""

    name: InputFile = INITIAL
    """initial: the run's own model before the first step. Otherwise the folder or Hugging Face name of a model of the
    same shape, for example the final_model/ of another run."""
    revision: str | None = None
    """Branch, tag or commit on the Hub. Default: the main branch."""
    refresh_every: NonNegative = 0
    """Steps between copies of the current policy into the opponent. With such copies, checkpoints include the
    opponent's weights. 0: the opponent never changes."""


class TurnsSourceConfig(Section):
    """A game trained turn by turn. Each turn is a prompt. The completions of a turn are one group, scored on one
    position."""

    type: Literal["turns"]
    name: CodeName
    """'town', 'tossim' or your own 'package.module:object' or 'path/to/file.py:object'."""
    args: JsonObject = {}
    """Keyword arguments of the environment, except `seed`, which is derived from the run's seed."""
    commit: Literal["first", "random", "best"] = "first"
    """Completion that is played in each turn. first and random follow the policy. best: the completion with the highest
    reward, and on a tie the first such completion. With best, games are played better than the policy plays, which
    biases returns from the end of a game."""
    max_wait: Positive = 64
    """Maximum steps that a turn waits for its game to end, if its reward includes the game's result. After that, the
    turn is trained with its immediate reward (metric turns_overdue). Longer waits make rollouts staler."""
    stop_at_parse_rate: Number | None = Field(None, gt=0, le=1)
    """End the run when the share of well-formed completions has been at least this for stop_after steps in a row. null:
    train for all training_steps."""
    stop_after: Positive = 1000
    """Number of consecutive steps for stop_at_parse_rate."""
    structured: bool = False
    """Constrain sampling to legal completions with a grammar. false: the policy learns the format from rewards. Needs
    loss.old_logprobs: trainer; such requests decode more slowly."""
    opponent: OpponentConfig | None = None
    """Frozen model for the seats that the game assigns to it (town: players: [policy, frozen]). The opponent's turns
    are sampled once and not trained. The opponent's weights are kept in host memory and swapped into the engine. All
    entries that set an opponent must set the same opponent."""
    weight: Number = Field(1.0, gt=0)
    """Relative share of the prompts. Example: an entry of weight 3 beside an entry of weight 1 supplies three quarters
    of the prompts."""
