"""Games of the textarena package. The policy plays one seat, a scripted player the others.

Every seat reads something else, so a game is one conversation for each seat and not one for all. An episode is the
conversation of one seat; a group is one game dealt group_size times: same seat, same chance, same opponents.
"""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

from pydantic import Field, PrivateAttr

from colocated_grpo.environments.adapters.seeded import SeededEpisode, draw_seed
from colocated_grpo.environments.adapters.textarena_game import (
    KEY,
    RANDOM,
    YOUR_TURN,
    Game,
    Script,
    check_known,
    move_of,
    script_of,
    words,
)
from colocated_grpo.environments.base import EnvironmentSetupError, Split
from colocated_grpo.environments.conversation import ContextExhausted, Conversation

MOST_MOVES = 1000
"""Moves of the other seats in a row; more count as a game without end."""
MOST_DEALS = 100
"""Games dealt for one prompt: some end, or lose the seat, before it is asked."""


class TextArena(SeededEpisode):
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

    _script: Script = PrivateAttr()

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        check_known(self.game)
        if self.seat is not None and self.seat >= self.players:
            raise EnvironmentSetupError(f"{KEY}: args.seat={self.seat} must be below args.players={self.players}")
        self._script = script_of(self.opponent, f"{KEY}: args.opponent")
        self._deal({"seed": 0, "seat": self.seat or 0})  # now, and not when the first game is asked for

    def _item(self, chance: Random, split: Split) -> dict[str, Any]:
        for _ in range(MOST_DEALS):
            item = {"seed": draw_seed(chance, split), "seat": self._seat(chance)}
            _, _, said = self._deal(item)
            if said is not None:
                return {**item, "prompt": "\n".join(filter(None, [said, self.instruction]))}
        seat = item["seat"]
        raise EnvironmentSetupError(
            f"{KEY}: {self.game}: {MOST_DEALS} games in a row ended before seat {seat} was asked"
        )

    def _seat(self, chance: Random) -> int:
        return chance.randrange(self.players) if self.seat is None else self.seat

    async def run(self, item: dict[str, Any], model: Conversation) -> dict[str, float]:
        game, chance, said = self._deal(item)
        if said is None or not item["prompt"].startswith(said):
            raise RuntimeError(f"{self.game} does not repeat itself from its seed: siblings would play different games")
        with suppress(ContextExhausted):
            while said is not None and model.turns < self.max_turns:
                if model.turns:
                    model.observe(said)
                turn = await model.generate(self.max_turn_tokens)
                game.play(move_of(turn.text))
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
            game.play(self._script(game, chance))
        raise RuntimeError(f"{self.game}: {MOST_MOVES} moves without a turn of seat {seat}")

    def _score(self, game: Game, seat: int) -> dict[str, float]:
        reward, illegal = game.result(seat) if game.over else (self.unfinished_reward, False)
        return {
            "reward": reward,
            "won": float(game.over and reward > 0),
            "illegal": float(illegal),
            "finished": float(game.over),
        }
