"""Games of the textarena package, players that need no model, and episodes in which the policy plays one seat.

An episode is the conversation of one seat. All completions of a prompt play the same seat, seed and opponents.
"""

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import copy, deepcopy
from random import Random

from pydantic import Field, PrivateAttr

from colocated_grpo.environments.adapters import SeededEpisode, draw_seed
from colocated_grpo.environments.base import AnswerError, EnvironmentSetupError, Item, Split
from colocated_grpo.environments.chat import ContextExhausted, Conversation
from colocated_grpo.environments.user_code import isolation, loading
from colocated_grpo.types import JsonObject

KEY = "environments 'textarena'"
RANDOM = "random"
NO_MOVE = "I have nothing to add."
"""Reply of the random player if it finds no legal move."""
MOVE = re.compile(r"\[[^\[\]]+\]")
"""A move as games write it: [4], [bet]."""
THOUGHTS = re.compile(r"^.*</think>|<think>.*$", re.DOTALL)
"""Text up to the last </think>, and a think block that was cut off."""
RULES, COMPLAINT = "PROMPT", "GAME_ADMIN"
MAX_TRIED_MOVES = 30
"""Maximum moves that the random player tries in one turn."""
VARIANT_SUFFIXES = ("-raw", "-train")
"""Suffixes of game ids that differ from another id only in their wrappers. Error lines leave out such ids."""

GameMessage = tuple[int, str, object]
"""(sender, text, kind). A negative sender is the game itself."""
UserPlayer = Callable[[str, Random], str]
"""(all text that the seat has read, random stream) -> reply"""


class TextArenaGame:
    """One game with its own random stream, independent of other games in the process."""

    def __init__(self, name: str, options: JsonObject, players: int, seed: int) -> None:
        from textarena import Wrapper, make

        self._rng = Random(seed)
        with isolation.isolated(self._rng):
            self._env = make(name, **options)
            self._env.reset(num_players=players, seed=seed)
        # Messages come from the unwrapped game: wrappers repeat all earlier messages each turn, in their own format.
        self._unwrapped = self._env
        while isinstance(self._unwrapped, Wrapper):
            self._unwrapped = self._unwrapped.env
        self._read: dict[int, list[GameMessage]] = {seat: [] for seat in range(players)}
        self.over = False

    @property
    def seat(self) -> int:
        """The seat whose turn it is."""
        return self._unwrapped.state.current_player_id

    def read_new(self) -> list[GameMessage]:
        """Return the unread messages of the seat whose turn it is, and mark them as read."""
        seat, raw = self._unwrapped.get_observation()
        # textarena 0.7.4's Countdown and Cryptarithm give a seat's reply as (kind, sender, text).
        messages = [(text, kind, one) if isinstance(text, int) else (one, text, kind) for one, text, kind in raw]
        self._read[seat] += messages
        return messages

    def messages(self) -> list[GameMessage]:
        """Return all messages that the seat whose turn it is has read."""
        return self._read[self.seat]

    def play(self, reply: str) -> bool:
        """Apply a reply of the seat whose turn it is; return whether the game accepted it as legal."""
        seat = self.seat
        seen, was_invalid = len(self._unwrapped.state.observations[seat]), self._is_invalid(seat)
        with isolation.isolated(self._rng):
            self.over, _ = self._env.step(reply)
        kinds = [kind_name(kind) for _, _, kind in self._unwrapped.state.observations[seat][seen:]]
        return COMPLAINT not in kinds and self._is_invalid(seat) == was_invalid

    def _is_invalid(self, seat: int) -> bool:
        """Return the game's flag for an illegal last move of the seat."""
        return bool(self._unwrapped.state.game_info[seat]["invalid_move"])

    def copy(self) -> "TextArenaGame":
        """Return an independent copy with the same random state."""
        # The lists grow with every move, but entries of a list never change: a shallow copy of each list is enough.
        state = self._unwrapped.state
        lists = [state.logs, *state.observations.values(), *self._read.values()]
        return deepcopy(self, {id(each): copy(each) for each in [*lists, self._rng]})

    def try_move(self, reply: str) -> bool | None:
        """Play a reply on a copy. Return whether it is a legal move; None if the game raises."""
        try:
            return self.copy().play(reply)
        except Exception:
            return None

    def shown_moves(self) -> tuple[list[str], list[str]]:
        """Return the moves in the game's latest message to this seat that shows any, and the moves in the rules."""
        shown = [(kind_name(kind), MOVE.findall(text)) for sender, text, kind in self.messages() if sender < 0]
        rules = [move for kind, moves in shown if kind == RULES for move in moves]
        latest = next((moves for kind, moves in reversed(shown) if moves and kind != RULES), [])
        return list(dict.fromkeys(latest)), list(dict.fromkeys(rules))

    def result(self, seat: int) -> tuple[float, bool]:
        """Return the reward of a seat in a game that is over, and whether the seat's last move was illegal."""
        rewards, _ = self._env.close()
        if isinstance(rewards[seat], str):
            # textarena 0.7.4's Countdown, Cryptarithm, Slitherlink and ThreeCardMonte end at an illegal move with an
            # error text in place of the reward.
            return -1.0, True
        return float(rewards[seat]), self._is_invalid(seat)


ScriptedPlayer = Callable[[TextArenaGame, Random], str]
"""(game, random stream) -> reply of the seat whose turn it is"""


def kind_name(kind: object) -> str:
    """Return the name of a message's kind. Some games give text in place of textarena's enumeration."""
    return str(getattr(kind, "name", kind))


def random_move(game: TextArenaGame, rng: Random) -> str:
    """Return a random legal move that the game has shown, if possible in its latest message; else NO_MOVE."""
    latest, rules = game.shown_moves()
    candidates = [*rng.sample(latest, len(latest)), *rng.sample(rules, len(rules))]
    return next((move for move in candidates[:MAX_TRIED_MOVES] if game.try_move(move)), NO_MOVE)


def render(messages: Iterable[GameMessage]) -> str:
    """Return the messages as lines. A seat's message starts with the number of the seat."""
    return "\n".join(text if sender < 0 else f"[Player {sender}] {text}" for sender, text, _ in messages).strip()


MAX_OPPONENT_MOVES = 1000
"""Maximum consecutive moves of the other seats. A game with more moves counts as endless, and the episode raises."""
MAX_DEALS = 100
"""Maximum games started for one prompt. Some games end, or eliminate the seat, before its first turn."""


class TextArena(SeededEpisode):
    """Reward: the game's reward for the policy's seat, usually 1, 0 or -1."""

    game: str
    """Id of the game in textarena. Example: TicTacToe-v0"""
    players: int = Field(2, ge=1)
    """Number of seats. SecretMafia takes 6 to 15."""
    seat: int | None = Field(None, ge=0)
    """Seat of the policy. null: a random seat in each game."""
    opponent: str = RANDOM
    """Player of the other seats: 'random' (a legal move that the game has shown), or your own 'module:function'."""
    options: JsonObject = {}
    """Keyword arguments of the game. Example: {discussion_rounds: 1}"""
    instruction: str = ""
    """Text at the end of the prompt."""
    max_turns: int = Field(50, ge=1)
    """Maximum turns of the policy in an episode."""
    max_turn_tokens: int = Field(256, ge=1)
    """Maximum tokens of one turn of the policy."""
    unfinished_reward: float = -1.0
    """Reward of a game that ends early: at the limit on turns or tokens, or because a reply makes the game raise. The
    default equals a loss, so that stalling does not pay."""

    _opponent: ScriptedPlayer = PrivateAttr()

    def __init__(self, **args: object) -> None:
        super().__init__(**args)
        known = loading.import_optional("textarena", "textarena", KEY).envs.registration.ENV_REGISTRY
        if self.game not in known:
            valid = (each for each in known if not each.endswith(VARIANT_SUFFIXES))
            raise loading.unknown_name(KEY, "game", self.game, valid)
        if self.seat is not None and self.seat >= self.players:
            raise EnvironmentSetupError(f"{KEY}: args.seat={self.seat} must be below args.players={self.players}")
        self._opponent = random_move
        if self.opponent != RANDOM:
            player: UserPlayer = loading.load_object(self.opponent, f"{KEY}: args.opponent")
            self._opponent = lambda game, rng: player(render(game.messages()), rng)
        self._deal({"seed": 0, "seat": self.seat or 0})  # Invalid options fail at the start, not at the first prompt.

    def _item(self, rng: Random, split: Split) -> Item:
        for _ in range(MAX_DEALS):
            seed = draw_seed(rng, split)
            seat = rng.randrange(self.players) if self.seat is None else self.seat
            item = {"seed": seed, "seat": seat}
            _, _, first = self._deal(item)
            if first is not None:
                return {**item, "prompt": "\n".join(filter(None, [first, self.instruction]))}
        whose = "the policy" if self.seat is None else f"args.seat={self.seat}"
        problem = f"{MAX_DEALS} games in a row ended before the first turn of {whose}"
        raise EnvironmentSetupError(f"{KEY}: {self.game}: {problem}")

    async def run(self, item: Item, model: Conversation) -> dict[str, float]:
        game, rng, text = self._deal(item)
        if text is None or not item["prompt"].startswith(text):
            raise RuntimeError(f"{self.game} is not reproducible from its seed: siblings would play different games")
        with suppress(ContextExhausted):
            while text is not None and model.turns < self.max_turns:
                if model.turns:
                    model.observe(text)
                turn = await model.generate(self.max_turn_tokens)
                self._play(game, THOUGHTS.sub("", turn.text).strip())
                text = self._advance(game, rng, item["seat"])
        return self._score(game, item["seat"])

    def _play(self, game: TextArenaGame, reply: str) -> None:
        """Play a reply. Raises AnswerError if this reply makes the game raise and a random move does not."""
        before = game.copy()
        try:
            game.play(reply)
        except Exception as error:
            if before.try_move(random_move(before, Random(0))) is None:
                raise
            raise AnswerError(loading.one_line(error), reward=self.unfinished_reward) from error

    def _deal(self, item: Item) -> tuple[TextArenaGame, Random, str | None]:
        """Start a game up to the seat's first turn. Return it, the opponents' random stream, and the text if any."""
        game = TextArenaGame(self.game, self.options, self.players, item["seed"])
        rng = Random(f"{item['seed']}/opponents")
        return game, rng, self._advance(game, rng, item["seat"])

    def _advance(self, game: TextArenaGame, rng: Random, seat: int) -> str | None:
        """Play the other seats until `seat` has the turn. Returns its new messages, or None if the game is over."""
        for _ in range(MAX_OPPONENT_MOVES):
            if game.over:
                return None
            messages = game.read_new()
            if game.seat == seat:
                return render(message for message in messages if message[0] != seat) or "It is your turn."
            game.play(self._opponent(game, rng))
        raise RuntimeError(f"{self.game}: {MAX_OPPONENT_MOVES} moves without a turn of seat {seat}")

    def _score(self, game: TextArenaGame, seat: int) -> dict[str, float]:
        reward, illegal = game.result(seat) if game.over else (self.unfinished_reward, False)
        return {
            "reward": reward,
            "won": float(game.over and reward > 0),
            "illegal": float(illegal),
            "finished": float(game.over),
        }
