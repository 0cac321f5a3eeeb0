"""Games of the textarena package. The policy plays one seat, a scripted player the others.

Every seat reads something else, so a game is one conversation for each seat and not one for all. An episode is the
conversation of one seat; a group is one game dealt group_size times: same seat, same chance, same opponents.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from random import Random
from typing import Any

from pydantic import Field, PrivateAttr

from colocated_grpo.config.base import Section
from colocated_grpo.environments.base import EnvironmentSetupError, Split
from colocated_grpo.environments.conversation import Conversation, OutOfRoom
from colocated_grpo.environments.isolation import isolated
from colocated_grpo.environments.user_code import import_optional, load_object, unknown_name

KEY = "environments 'textarena'"
RANDOM = "random"
SILENCE = "I have nothing to add."
YOUR_TURN = "It is your turn."
MOVE = re.compile(r"\[[^\[\]]+\]")
"""How games write a move."""
MOST_TRIED = 30
"""Moves that the random player tries before it gives up."""
MOST_MOVES = 1000
"""Moves of the other seats in a row; more count as a game without end."""
VARIANTS = ("-raw", "-train")
"""Endings of names that differ in wrappers only."""
HELD_OUT = 1
"""Seeds of held-out games are odd, so that no run trains on what another holds out."""

Player = Callable[[str, Random], str]
"""(what its seat has read so far, chance) -> reply."""


class Game:
    """One game. Its chance is its own: other games in the process neither disturb it nor are disturbed."""

    def __init__(self, name: str, options: dict[str, Any], players: int, seed: int) -> None:
        from textarena import Wrapper, make

        self._chance = Random(seed)
        with isolated(self._chance):
            self._env = make(name, **options)
            self._env.reset(num_players=players, seed=seed)
        # Wrappers repeat to a seat all that it has read, which its conversation holds already.
        self._bare = self._env
        while isinstance(self._bare, Wrapper):
            self._bare = self._bare.env
        self._heard: dict[int, list[Any]] = {seat: [] for seat in range(players)}
        self.over = False

    @property
    def seat(self) -> int:
        """Whose turn it is."""
        return self._bare.state.current_player_id

    def listen(self) -> list[Any]:
        """Messages that are new to the seat whose turn it is: (sender, text, kind)."""
        seat, messages = self._bare.get_observation()
        self._heard[seat] += messages
        return messages

    def play(self, reply: str) -> None:
        with isolated(self._chance):
            self.over, _ = self._env.step(reply)

    def accepts(self, reply: str) -> bool:
        """Whether the move is legal, tried on a copy with another chance."""
        seat, trial = self.seat, deepcopy(self._bare)
        try:
            with isolated(Random(0)):
                trial.step(reply)
        except Exception:
            return False
        complaints = [kind for _, _, kind in trial.state.observations[seat] if kind.name == "GAME_ADMIN"]
        return not complaints and not trial.state.game_info[seat]["invalid_move"]

    def moves(self) -> tuple[list[str], list[str]]:
        """What the game has shown to the seat as moves: in the latest message that shows any, and in its rules."""
        shown = [(kind.name, MOVE.findall(text)) for sender, text, kind in self._heard[self.seat] if sender < 0]
        rules = [move for kind, moves in shown if kind == "PROMPT" for move in moves]
        latest = next((moves for kind, moves in reversed(shown) if moves and kind != "PROMPT"), [])
        return list(dict.fromkeys(latest)), list(dict.fromkeys(rules))

    def transcript(self) -> str:
        """All that the seat has read."""
        return words(self._heard[self.seat])

    def result(self, seat: int) -> tuple[float, bool]:
        """(the seat's reward, whether its last move was illegal). For games that are over."""
        rewards, info = self._env.close()
        return float(rewards[seat]), bool(info[seat]["invalid_move"])


class TextArena(Section):
    """Reward: what the game gives the policy's seat, mostly 1, 0 or -1."""

    game: str
    """Its id in textarena. Example: TicTacToe-v0"""
    players: int = Field(2, ge=1)
    """Seats. SecretMafia takes 6 to 15."""
    seat: int | None = Field(None, ge=0)
    """The policy's. Not given: another one in each game."""
    opponent: str = RANDOM
    """Plays the other seats: 'random' (a legal move that the game has shown), or your own 'module:function'."""
    options: dict[str, Any] = {}
    """Keyword arguments of the game. Example: {discussion_rounds: 1}"""
    instruction: str = ""
    """Ends the prompt."""
    max_turns: int = Field(50, ge=1)
    """Turns of the policy."""
    max_turn_tokens: int = Field(256, ge=1)
    """Longest turn of the policy."""
    unfinished_reward: float = -1.0
    """Reward of a game that ends for want of turns or room. As bad as a lost one: else talking on would pay."""

    _player: Player | None = PrivateAttr()

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        known = import_optional("textarena", "textarena", KEY).envs.registration.ENV_REGISTRY
        if self.game not in known:
            raise unknown_name(KEY, "game", self.game, (name for name in known if not name.endswith(VARIANTS)))
        if self.seat is not None and self.seat >= self.players:
            raise EnvironmentSetupError(f"{KEY}: args.seat={self.seat} must be below args.players={self.players}")
        self._player = None if self.opponent == RANDOM else load_object(self.opponent, f"{KEY}: args.opponent")
        self._deal({"seed": 0, "seat": self.seat or 0})  # now, and not when the first game is asked for

    def prompts(self, seed: int, split: Split) -> Iterator[dict[str, Any]]:
        rng = Random(f"{seed}/{split}")
        while True:
            number = 2 * rng.randrange(2**30) + (HELD_OUT if split == "held_out" else 0)
            item = {"seed": number, "seat": rng.randrange(self.players) if self.seat is None else self.seat}
            _, _, said = self._deal(item)
            if said is not None:  # else the game was over, or the seat out of it, before it was asked
                yield {**item, "prompt": "\n".join(filter(None, [said, self.instruction]))}

    async def run(self, item: dict[str, Any], model: Conversation) -> dict[str, float]:
        game, chance, said = self._deal(item)
        if said is None or not item["prompt"].startswith(said):
            raise RuntimeError(f"{self.game} does not repeat itself from its seed: siblings would play different games")
        # Out of room is no reward of its own: the metrics would miss what the others count.
        with suppress(OutOfRoom):
            while said is not None and model.turns < self.max_turns:
                if model.turns:
                    model.observe(said)
                turn = await model.generate(self.max_turn_tokens)
                game.play(turn.text.rpartition("</think>")[2].strip())
                said = self._until_asked(game, chance, item["seat"])
        return self._score(game, item["seat"])

    def _deal(self, item: dict[str, Any]) -> tuple[Game, Random, str | None]:
        """A game up to the seat's first turn, the opponents' chance, and what the seat reads then."""
        game = Game(self.game, self.options, self.players, item["seed"])
        chance = Random(f"{item['seed']}/opponents")
        return game, chance, self._until_asked(game, chance, item["seat"])

    def _until_asked(self, game: Game, chance: Random, seat: int) -> str | None:
        """Let the others move until it is the seat's turn. What is new to it, or None where the game is over."""
        for _ in range(MOST_MOVES):
            if game.over:
                return None
            messages = game.listen()
            if game.seat == seat:
                return words(message for message in messages if message[0] != seat) or YOUR_TURN
            own = self._player
            game.play(random_move(game, chance) if own is None else own(game.transcript(), chance))
        raise RuntimeError(f"{self.game}: {MOST_MOVES} moves without a turn of seat {seat}")

    def _score(self, game: Game, seat: int) -> dict[str, float]:
        reward, illegal = game.result(seat) if game.over else (self.unfinished_reward, False)
        return {
            "reward": reward,
            "won": float(game.over and reward > 0),
            "illegal": float(illegal),
            "finished": float(game.over),
        }


def random_move(game: Game, chance: Random) -> str:
    """A legal move among those that the game has shown, the latest first. Silence where there is none."""
    latest, rules = game.moves()
    tried = [*chance.sample(latest, len(latest)), *chance.sample(rules, len(rules))]
    return next((move for move in tried[:MOST_TRIED] if game.accepts(move)), SILENCE)


def words(messages: Any) -> str:
    """What the game says, and what other seats said with their number."""
    return "\n".join(text if sender < 0 else f"[Player {sender}] {text}" for sender, text, _ in messages).strip()
