"""Interfaces of `type: turns`: multi-player games trained turn by turn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from colocated_grpo.environments.chat import Message
from colocated_grpo.types import JsonObject


class Turn(Protocol):
    """One decision of one seat. Must be picklable: completions are scored in the process that samples them."""

    @property
    def id(self) -> str:
        """Text that is unique within the environment, and the same after a restore."""

    @property
    def messages(self) -> str | list[Message]:
        """The prompt: text or chat messages, limited to what this seat may see."""

    @property
    def phase(self) -> str:
        """Phase of the game, for metrics."""

    @property
    def trainable(self) -> bool:
        """True if the policy plays this seat, False if the entry's opponent does. Other seats never appear as turns."""

    def pattern(self) -> str:
        """Return a regular expression of the legal replies. Called only with `structured: true`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The immediate score of one completion. Any object with these attributes is accepted."""

    reward: float | None
    """None if the completion has no reward, and hence no learning signal."""
    parts: Mapping[str, float]
    """Named components, for metrics. 'parse_rate' and 'legal_rate' (1 or 0) are averaged as metrics of these names."""


@dataclass(frozen=True, slots=True)
class Return:
    """Reward that the end of a game adds to a committed turn. Several are added up. Any object with these attributes is
    accepted. Field names are keys of checkpoints."""

    turn_id: str
    value: float


TurnT = TypeVar("TurnT", bound=Turn)


@runtime_checkable
class TurnEnvironment(Protocol[TurnT]):
    """Concurrent games. Built as `factory(seed=..., **args)`; all games are determined by the seed and the commits."""

    @property
    def delayed(self) -> bool:
        """True if drain_returns() may return anything. Turns then train after their game has ended, not at once."""

    def next_batch(self) -> Sequence[TurnT]:
        """Return the open turns. A turn stays open until it is passed to commit() or play_on()."""

    def add_game(self) -> Sequence[TurnT]:
        """Raise the number of concurrent games by one and return the new game's open turns."""

    def score(self, turn: TurnT, completions: Sequence[str]) -> Sequence[Outcome | float | None]:
        """Score completions from the turn alone. Must be pure: threads and processes without the game call it.

        A number or None is an outcome without parts.
        """

    def commit(self, turn: TurnT, completion: str) -> object:
        """Play one completion. Called once per sampled turn, in the order in which the turns were handed out."""

    def play_on(self, turn: TurnT) -> None:
        """Let a script play a turn whose prompt is too long. The turn is left out of all counts and returns."""

    def drain_returns(self) -> Sequence[Return]:
        """Return the returns of games that ended since the last call."""

    def drain_games(self) -> Sequence[JsonObject]:
        """Return the records of games that ended since the last call.

        Keys: 'game' (a number), 'winner', and optionally 'transcript' (text), 'events' (a list of flat rows), 'seats'
        (a list of rows) and anything else that JSON can represent. The run sets 'step' and 'source' itself.
        """

    def drain_stats(self) -> dict[str, float]:
        """Return counts and rates since the last call, and gauges such as the number of running games.

        Leave out parse_rate, legal_rate and reward/<phase>: the trainer computes these metrics over all completions.
        """

    def snapshot(self) -> JsonObject:
        """Return the state as data for JSON, in which keys of dicts are text: restore() gets "1" for the key 1."""

    def restore(self, snapshot: JsonObject) -> None: ...
