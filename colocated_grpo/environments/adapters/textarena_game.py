"""One game of the textarena package, and the players that need no model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from copy import copy, deepcopy
from random import Random
from typing import Any

from colocated_grpo.environments.user_code.isolation import isolated
from colocated_grpo.environments.user_code.loading import import_optional, load_object, unknown_name

KEY = "environments 'textarena'"
RANDOM = "random"
SILENCE = "I have nothing to add."
YOUR_TURN = "It is your turn."
MOVE = re.compile(r"\[[^\[\]]+\]")
"""How games write a move."""
THOUGHTS = re.compile(r"^.*</think>|<think>.*$", re.DOTALL)
"""Up to the last end of thoughts, and thoughts that were cut off."""
RULES, BOARD, COMPLAINT = "PROMPT", "GAME_BOARD", "GAME_ADMIN"
"""Kinds of messages."""
MOST_TRIED = 30
"""Moves that the random player tries before it gives up."""
VARIANTS = ("-raw", "-train")
"""Endings of names that differ in wrappers only."""

Message = tuple[int, str, Any]
"""(sender, below 0 the game itself; text; kind)"""
Player = Callable[[str, Random], str]
"""(what its seat has read so far, chance) -> reply."""


def check_known(name: str) -> None:
    """Raise one line where the package or the game is not there."""
    known = import_optional("textarena", "textarena", KEY).envs.registration.ENV_REGISTRY
    if name not in known:
        raise unknown_name(KEY, "game", name, (each for each in known if not each.endswith(VARIANTS)))


class Game:
    """One game. Its chance is its own: other games in the process neither disturb it nor are disturbed."""

    def __init__(self, name: str, options: dict[str, Any], players: int, seed: int) -> None:
        from textarena import Wrapper, make

        self._chance = Random(seed)
        with isolated(self._chance):
            self._env = make(name, **options)
            self._env.reset(num_players=players, seed=seed)
        # Wrappers repeat to a seat all that it has read, in words of their own.
        self._bare = self._env
        while isinstance(self._bare, Wrapper):
            self._bare = self._bare.env
        self._heard: dict[int, list[Message]] = {seat: [] for seat in range(players)}
        dealt = [message for told in self._bare.state.observations.values() for message in told]
        self._rules = {text for _, text, kind in dealt if kind.name == RULES}
        self.over = False

    @property
    def seat(self) -> int:
        """Whose turn it is."""
        return self._bare.state.current_player_id

    def listen(self) -> list[Message]:
        """Messages that are new to the seat whose turn it is."""
        seat, messages = self._bare.get_observation()
        self._heard[seat] += messages
        return messages

    def heard(self) -> list[Message]:
        """All messages to the seat whose turn it is, as far as it has listened."""
        return self._heard[self.seat]

    def play(self, reply: str) -> bool:
        """Carry a reply out. Whether the game found it legal."""
        seat = self.seat
        told, faults = len(self._bare.state.observations[seat]), self._faults(seat)
        with isolated(self._chance):
            self.over, _ = self._env.step(reply)
        complaints = [kind for _, _, kind in self._bare.state.observations[seat][told:] if kind.name == COMPLAINT]
        return not complaints and self._faults(seat) == faults

    def _faults(self, seat: int) -> bool:
        return bool(self._bare.state.game_info[seat]["invalid_move"])

    def copy(self) -> Game:
        """Independent of this one, with the same chance."""
        # Messages and the numbers inside of the chance are never changed, and there are more of them with every move.
        state = self._bare.state
        lists = [state.logs, *state.observations.values(), *self._heard.values()]
        return deepcopy(self, {id(each): copy(each) for each in [*lists, self._chance]})

    def accepts(self, reply: str) -> bool:
        """Whether the move is legal, tried on a copy."""
        try:
            return self.copy().play(reply)
        except Exception:
            return False

    def moves(self) -> tuple[list[str], list[str]]:
        """What the game has shown to the seat as moves: in the latest message that shows any, and in its rules."""
        shown = [(kind.name, MOVE.findall(text)) for sender, text, kind in self.heard() if sender < 0]
        rules = [move for kind, moves in shown if kind == RULES for move in moves]
        latest = next((moves for kind, moves in reversed(shown) if moves and kind != RULES), [])
        return list(dict.fromkeys(latest)), list(dict.fromkeys(rules))

    def transcript(self) -> str:
        """All that the seat has read."""
        return words(self.heard())

    def result(self, seat: int) -> tuple[float, bool]:
        """(the seat's reward, whether its last move was illegal). For games that are over."""
        rewards, _ = self._env.close()
        return float(rewards[seat]), self._faults(seat)

    def role(self, seat: int) -> str:
        """As the game calls it: 'Mafia', or 'Player 0' where seats have no roles."""
        return str(self._bare.state.game_info[seat]["role"])

    def log(self) -> list[tuple[int, str]]:
        """(sender, text) of everything that was said to anybody after the rules."""
        return [(sender, text) for sender, text in self._bare.state.logs if text not in self._rules]


Script = Callable[[Game, Random], str]
"""What plays a seat without a model."""


def move_of(reply: str) -> str:
    """What is said aloud: a reply without its thoughts."""
    return THOUGHTS.sub("", reply).strip()


def random_move(game: Game, chance: Random) -> str:
    """A legal move among those that the game has shown, the latest first. Silence where there is none."""
    latest, rules = game.moves()
    tried = [*chance.sample(latest, len(latest)), *chance.sample(rules, len(rules))]
    return next((move for move in tried[:MOST_TRIED] if game.accepts(move)), SILENCE)


def script_of(label: str, key: str) -> Script:
    """'random', or the user's own Player. key: where the label stands in the config."""
    if label == RANDOM:
        return random_move
    own: Player = load_object(label, key)
    return lambda game, chance: own(game.transcript(), chance)


def words(messages: Iterable[Message]) -> str:
    """What the game says, and what other seats said with their number."""
    return "\n".join(spoken(sender, text) for sender, text, _ in messages).strip()


def spoken(sender: int, text: str) -> str:
    return text if sender < 0 else f"[Player {sender}] {text}"
