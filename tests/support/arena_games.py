"""Misbehaving games of textarena, registered under ids of the package."""

from __future__ import annotations

from itertools import count
from typing import Any

import textarena
from textarena.envs.TicTacToe.env import TicTacToeEnv

BRITTLE, BROKEN, FICKLE, HASTY, RESTLESS = "Brittle-v0", "Broken-v0", "Fickle-v0", "Hasty-v0", "Restless-v0"
UNORDERED = "Unordered-v0"
_numbers = count()


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


class Fickle(TicTacToeEnv):
    """Starts every game with another message, whatever its seed: it is not reproducible."""

    def reset(self, *args: Any, **kwargs: Any) -> None:
        super().reset(*args, **kwargs)
        self.state.add_observation(
            message=f"It is day {next(_numbers)}.", observation_type=textarena.ObservationType.GAME_MESSAGE
        )


class Restless(TicTacToeEnv):
    """Never ends, and [4] stays legal."""

    def step(self, action: str) -> Any:
        self.state.game_state["board"][1][1] = ""
        return super().step(action)

    def _check_winner(self) -> bool:
        return False


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
    FICKLE: Fickle,
    RESTLESS: Restless,
    HASTY: Hasty,
    UNORDERED: Unordered,
}
for _name, _game in _GAMES.items():
    textarena.envs.registration.register(_name, _game)
