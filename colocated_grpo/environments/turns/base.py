"""What a game of many seats is made of when it is trained turn by turn: the contract of `type: turns`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


class Turn(Protocol):
    """A seat that is asked to act. Picklable: it is judged in whichever process generates its completions."""

    @property
    def id(self) -> str:
        """Unique within the environment, and the same after a restore."""
        ...

    @property
    def messages(self) -> str | list[dict[str, Any]]:
        """What the model reads: text or chat messages, of what this seat may know."""
        ...

    @property
    def phase(self) -> str:
        """Part of the game, for metrics."""
        ...

    @property
    def trainable(self) -> bool:
        """Whether the trained policy plays the seat. False: the entry's opponent does. The environment plays all others
        itself, and asks nobody."""
        ...

    def pattern(self) -> str:
        """Regular expression of the legal replies. Asked for with `structured: true` only."""
        ...


class Outcome(Protocol):
    """What one completion is worth at once."""

    @property
    def reward(self) -> float: ...

    @property
    def parts(self) -> Mapping[str, float]:
        """Named components, for metrics. 'parse_rate' and 'legal_rate' (1 or 0) feed the curves of that name."""
        ...


class Return(Protocol):
    """What the end of a game adds to the reward of a turn that was carried out in it."""

    @property
    def turn_id(self) -> str: ...

    @property
    def value(self) -> float: ...


@runtime_checkable
class TurnEnvironment(Protocol):
    """Games side by side. Built as `factory(seed=..., **args)`; seed and commits decide everything."""

    @property
    def delayed(self) -> bool:
        """Whether drain_returns ever gives anything: turns then wait for the end of their game before they train."""
        ...

    def next_batch(self) -> Sequence[Turn]:
        """Turns open now. Until one is committed or played on, the same ones are given again."""
        ...

    def add_game(self) -> Sequence[Turn]:
        """Start one more game, kept up from now on; its open turns."""
        ...

    def score(self, turn: Turn, completions: Sequence[str]) -> Sequence[Outcome]:
        """Pure, and from the turn alone: called in several threads, in processes that never saw the game."""
        ...

    def commit(self, turn: Turn, completion: str) -> object:
        """Carry one completion out. Once for each turn that was asked, in the order of asking."""
        ...

    def play_on(self, turn: Turn) -> None:
        """Let a script take a turn that the model cannot be asked: it is left out of every count and return."""
        ...

    def drain_returns(self) -> Sequence[Return]:
        """Since the last call."""
        ...

    def drain_games(self) -> Sequence[dict[str, Any]]:
        """Records of games that ended since the last call: 'game', 'winner', 'transcript', 'events' (a list of flat
        rows), 'seats' (a list of rows), and whatever else json can write."""
        ...

    def drain_stats(self) -> dict[str, float]:
        """By name: counts and rates since the last call, and what is a state, such as games under way, as it is now.

        Not parse_rate, legal_rate and reward/<phase>: all completions that are trained give those, carried out or not.
        """
        ...

    def snapshot(self) -> dict[str, Any]:
        """Plain data that json can write."""
        ...

    def restore(self, snapshot: dict[str, Any]) -> None: ...
