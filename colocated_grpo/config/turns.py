"""Settings of games that are trained turn by turn."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from colocated_grpo.config.base import FileName, NonNegative, Positive, Section

INITIAL = "initial"
FROZEN = "frozen"
"""Among the `players` of a game: the opponent's seats."""


class OpponentConfig(Section):
    name: FileName = INITIAL
    """initial: the run's own model as it was before the first step. Otherwise the folder or Hugging Face name of one of
    the same shape, such as the final_model or an exported step of another run."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    refresh_every: NonNegative = 0
    """Steps after which the opponent becomes what the policy is then; 0: never."""


class TurnsSourceConfig(Section):
    type: Literal["turns"]
    name: str
    """'town', 'textarena:<game>', 'tossim', the entry point of an installed package, or your own 'module:object'."""
    args: dict[str, Any] = {}
    """Keyword arguments of the environment. Its seed follows from the run's."""
    commit: Literal["first", "random", "best"] = "first"
    """Which completion of a turn is carried out in the game. best: the highest reward, ties to the first; games then
    run better than the policy plays, and what returns from their end is biased by it."""
    max_wait: Positive = 64
    """Steps that a turn waits for the end of its game, where that adds to its reward; then it is trained without."""
    stop_at_parse_rate: float | None = Field(None, gt=0, le=1)
    """End the run once this share of a step's replies has been well-formed for stop_after steps in a row."""
    stop_after: Positive = 1000
    """Steps in a row for stop_at_parse_rate."""
    structured: bool = False
    """Let the engine sample legal replies only. Off, the policy learns the form by itself."""
    opponent: OpponentConfig | None = None
    """A second set of weights that plays the seats which the game gives it (town: players: [policy, frozen]). Its turns
    are answered once and not trained. It rests in host memory; every entry that has one has the same."""
    weight: float = Field(1.0, gt=0)
    """Share of prompts drawn from this source, relative to the others."""
