"""Misbehaving games of textarena, registered under ids of the package."""

from __future__ import annotations

from typing import Any

import textarena
from textarena.envs.TicTacToe.env import TicTacToeEnv

BRITTLE, BROKEN, HASTY = "Brittle-v0", "Broken-v0", "Hasty-v0"
UNORDERED = "Unordered-v0"


class Brittle(TicTacToeEnv):
    """Raises on the move 'crash'."""

    def step(self, action: str) -> Any:
        if "crash" in action:
            raise IndexError("the table\nfell over")
        return super().step(action)


class Broken(TicTacToeEnv):
    """Raises on every move."""

    def step(self, action: str) -> Any:
        raise IndexError("never worked")


class Hasty(TicTacToeEnv):
    """Ends with the first move."""

    def _check_winner(self) -> bool:
        return True


class Unordered(TicTacToeEnv):
    """Passes arguments in the wrong order, as some games of the package do: with each reply, and with the result."""

    def step(self, action: str) -> Any:
        seat = self.state.current_player_id
        self.state.add_observation(seat, action, textarena.ObservationType.PLAYER_ACTION)
        return super().step(action)

    def close(self) -> Any:
        rewards, info = super().close()
        return dict.fromkeys(rewards, "Bad action."), info


_GAMES = {
    BRITTLE: Brittle,
    BROKEN: Broken,
    HASTY: Hasty,
    UNORDERED: Unordered,
}
for _name, _game in _GAMES.items():
    textarena.envs.registration.register(_name, _game)
