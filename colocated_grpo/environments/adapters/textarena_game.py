"""One game of the textarena package, and the players that need no model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from copy import copy, deepcopy
from random import Random
from typing import Any

from colocated_grpo.environments.user_code.isolation import isolated
from colocated_grpo.environments.user_code.loading import import_optional, load_object, unknown_name
from colocated_grpo.types import JsonObject

KEY = "environments 'textarena'"
RANDOM = "random"
NO_MOVE = "I have nothing to add."
"""Reply of the random player if it finds no legal move."""
YOUR_TURN = "It is your turn."
MOVE = re.compile(r"\[[^\[\]]+\]")
"""A move as games write it: [4], [bet]."""
THOUGHTS = re.compile(r"^.*</think>|<think>.*$", re.DOTALL)
"""Text up to the last </think>, and a think block that was cut off."""
RULES, BOARD, COMPLAINT = "PROMPT", "GAME_BOARD", "GAME_ADMIN"
"""Kinds of messages."""
ILLEGAL_REWARD = -1.0
"""Reward of a game that ended at an illegal move and gives no number."""
MAX_TRIED_MOVES = 30
"""Maximum moves that the random player tries in one turn."""
VARIANT_SUFFIXES = ("-raw", "-train")
"""Suffixes of ids that differ only in their wrappers. Error lines leave these ids out."""

GameMessage = tuple[int, str, Any]
"""(sender, text, kind). A negative sender is the game itself."""
UserPlayer = Callable[[str, Random], str]
"""(all text that the seat has read, random stream) -> reply"""


def check_known(name: str) -> None:
    """Raise EnvironmentSetupError if the package is not installed or has no such game."""
    known = import_optional("textarena", "textarena", KEY).envs.registration.ENV_REGISTRY
    if name not in known:
        raise unknown_name(KEY, "game", name, (each for each in known if not each.endswith(VARIANT_SUFFIXES)))


class TextArenaGame:
    """One game with its own random stream, independent of other games in the process."""

    def __init__(self, name: str, options: JsonObject, players: int, seed: int) -> None:
        from textarena import Wrapper, make

        self._rng = Random(seed)
        with isolated(self._rng):
            self._env = make(name, **options)
            self._env.reset(num_players=players, seed=seed)
        # Messages are read without the wrappers, which repeat all earlier messages each turn, in their own format.
        self._unwrapped = self._env
        while isinstance(self._unwrapped, Wrapper):
            self._unwrapped = self._unwrapped.env
        self._read: dict[int, list[GameMessage]] = {seat: [] for seat in range(players)}
        dealt = [message for messages in self._unwrapped.state.observations.values() for message in messages]
        self._rules = {text for _, text, kind in dealt if kind_name(kind) == RULES}
        self.over = False

    @property
    def seat(self) -> int:
        """The seat whose turn it is."""
        return self._unwrapped.state.current_player_id

    def read_new(self) -> list[GameMessage]:
        """Return the unread messages of the seat whose turn it is, and mark them as read."""
        seat, raw = self._unwrapped.get_observation()
        messages = [_in_order(message) for message in raw]
        self._read[seat] += messages
        return messages

    def messages(self) -> list[GameMessage]:
        """Return all messages that the seat whose turn it is has read."""
        return self._read[self.seat]

    def play(self, reply: str) -> bool:
        """Apply a reply of the seat whose turn it is; return whether the game accepted it as legal."""
        seat = self.seat
        seen, was_invalid = len(self._unwrapped.state.observations[seat]), self._is_invalid(seat)
        with isolated(self._rng):
            self.over, _ = self._env.step(reply)
        kinds = [kind_name(kind) for _, _, kind in self._unwrapped.state.observations[seat][seen:]]
        return COMPLAINT not in kinds and self._is_invalid(seat) == was_invalid

    def _is_invalid(self, seat: int) -> bool:
        """Return the game's flag for an illegal last move of the seat."""
        return bool(self._unwrapped.state.game_info[seat]["invalid_move"])

    def copy(self) -> TextArenaGame:
        """Return an independent copy with the same random state."""
        # These lists grow with every move, but their entries never change, so a shallow copy of each is enough.
        state = self._unwrapped.state
        lists = [state.logs, *state.observations.values(), *self._read.values()]
        return deepcopy(self, {id(each): copy(each) for each in [*lists, self._rng]})

    def works(self, rng: Random) -> bool:
        """Return whether the game takes a reply of the seat whose turn it is, tried on a copy."""
        try:
            self.copy().play(random_move(self, rng))
        except Exception:
            return False
        return True

    def accepts(self, reply: str) -> bool:
        """Return whether the reply is a legal move, tried on a copy."""
        try:
            return self.copy().play(reply)
        except Exception:
            return False

    def shown_moves(self) -> tuple[list[str], list[str]]:
        """Return the moves shown to the seat: those in the latest message with any, and those in the rules."""
        shown = [(kind_name(kind), MOVE.findall(text)) for sender, text, kind in self.messages() if sender < 0]
        rules = [move for kind, moves in shown if kind == RULES for move in moves]
        latest = next((moves for kind, moves in reversed(shown) if moves and kind != RULES), [])
        return list(dict.fromkeys(latest)), list(dict.fromkeys(rules))

    def transcript(self) -> str:
        """Return everything that the seat whose turn it is has read, as text."""
        return render(self.messages())

    def result(self, seat: int) -> tuple[float, bool]:
        """Return the reward of a seat in a game that is over, and whether its last move was illegal."""
        rewards, _ = self._env.close()
        if isinstance(rewards[seat], str):
            # textarena 0.7.4's Countdown, Cryptarithm, Slitherlink and ThreeCardMonte end at an illegal move with their
            # complaint in place of the reward.
            return ILLEGAL_REWARD, True
        return float(rewards[seat]), self._is_invalid(seat)

    def role(self, seat: int) -> str:
        """Return the game's name of the role: 'Mafia', or 'Player 0' where seats have no roles."""
        return str(self._unwrapped.state.game_info[seat]["role"])

    def log(self) -> list[tuple[int, str]]:
        """Return (sender, text) of all messages to any seat except the rules."""
        logs = self._unwrapped.state.logs
        return [(sender, text) for sender, text in logs if isinstance(text, str) and text not in self._rules]


ScriptedPlayer = Callable[[TextArenaGame, Random], str]
"""(game, random stream) -> reply of the seat whose turn it is"""


def kind_name(kind: Any) -> str:
    """Return the name of a message's kind. Some games give text in place of textarena's enumeration."""
    return str(getattr(kind, "name", kind))


def _in_order(message: tuple[Any, Any, Any]) -> GameMessage:
    """Return (sender, text, kind). textarena 0.7.4's Countdown and Cryptarithm give a seat's reply in another order."""
    sender, text, kind = message
    return (text, kind, sender) if isinstance(text, int) else (sender, text, kind)


def move_of(reply: str) -> str:
    """Return a reply without its thoughts."""
    return THOUGHTS.sub("", reply).strip()


def random_move(game: TextArenaGame, rng: Random) -> str:
    """Return a random legal move that the game has shown, preferably in the latest message, or NO_MOVE."""
    latest, rules = game.shown_moves()
    candidates = [*rng.sample(latest, len(latest)), *rng.sample(rules, len(rules))]
    return next((move for move in candidates[:MAX_TRIED_MOVES] if game.accepts(move)), NO_MOVE)


def scripted_player(label: str, key: str) -> ScriptedPlayer:
    """Return the player 'random', or the user's own 'module:function'. key: position in the config, for errors."""
    if label == RANDOM:
        return random_move
    player: UserPlayer = load_object(label, key)
    return lambda game, rng: player(game.transcript(), rng)


def render(messages: Iterable[GameMessage]) -> str:
    """Return the messages as text, one after the other."""
    return "\n".join(render_message(sender, text) for sender, text, _ in messages).strip()


def render_message(sender: int, text: str) -> str:
    """Return a message as text. A seat's message starts with the number of the seat."""
    return text if sender < 0 else f"[Player {sender}] {text}"
