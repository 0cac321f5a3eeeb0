"""Games of textarena as episodes: the policy plays one seat, a scripted player the others.

Each seat reads different messages, so an episode is the conversation of one seat. The siblings of a group play the same
game: same seat, same seed, same opponents.
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
    ScriptedPlayer,
    TextArenaGame,
    check_known,
    move_of,
    render,
    scripted_player,
)
from colocated_grpo.environments.base import AnswerError, EnvironmentSetupError, Item, Split
from colocated_grpo.environments.conversation import ContextExhausted, Conversation
from colocated_grpo.environments.user_code.loading import one_line
from colocated_grpo.types import JsonObject

MAX_OPPONENT_MOVES = 1000
"""Maximum consecutive moves of the other seats. A game with more is treated as endless and raises."""
MAX_DEALS = 100
"""Maximum games started for one prompt. Some games end, or eliminate the seat, before its first turn."""


class TextArena(SeededEpisode):
    """Reward: the game's reward for the policy's seat, usually 1, 0 or -1."""

    game: str
    """Id of the game in textarena. Example: TicTacToe-v0"""
    players: int = Field(2, ge=1)
    """Number of seats. SecretMafia takes 6 to 15."""
    seat: int | None = Field(None, ge=0)
    """Seat of the policy. Without it, a random seat in each game."""
    opponent: str = RANDOM
    """Player of the other seats: 'random' (a legal move that the game has shown), or your own 'module:function'."""
    options: JsonObject = {}
    """Keyword arguments of the game. Example: {discussion_rounds: 1}"""
    instruction: str = ""
    """End of the prompt."""
    max_turns: int = Field(50, ge=1)
    """Turns of the policy in an episode."""
    max_turn_tokens: int = Field(256, ge=1)
    """Tokens of one turn of the policy."""
    unfinished_reward: float = -1.0
    """Reward of a game cut short by turns or tokens, or by a reply on which it raises. Equal to a loss by default, so
    that stalling does not pay."""

    _opponent: ScriptedPlayer = PrivateAttr()

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        check_known(self.game)
        if self.seat is not None and self.seat >= self.players:
            raise EnvironmentSetupError(f"{KEY}: args.seat={self.seat} must be below args.players={self.players}")
        self._opponent = scripted_player(self.opponent, f"{KEY}: args.opponent")
        self._deal({"seed": 0, "seat": self.seat or 0})  # Invalid options fail at the start, not at the first prompt.

    def _item(self, rng: Random, split: Split) -> Item:
        for _ in range(MAX_DEALS):
            seed = draw_seed(rng, split)
            seat = rng.randrange(self.players) if self.seat is None else self.seat
            item = {"seed": seed, "seat": seat}
            _, _, first = self._deal(item)
            if first is not None:
                return {**item, "prompt": "\n".join(filter(None, [first, self.instruction]))}
        raise EnvironmentSetupError(
            f"{KEY}: {self.game}: {MAX_DEALS} games in a row ended before the first turn of "
            + ("the policy" if self.seat is None else f"args.seat={self.seat}")
        )

    async def run(self, item: Item, model: Conversation) -> dict[str, float]:
        game, rng, text = self._deal(item)
        if text is None or not item["prompt"].startswith(text):
            raise RuntimeError(f"{self.game} is not reproducible from its seed: siblings would play different games")
        with suppress(ContextExhausted):
            while text is not None and model.turns < self.max_turns:
                if model.turns:
                    model.observe(text)
                turn = await model.generate(self.max_turn_tokens)
                self._play(game, move_of(turn.text))
                text = self._advance(game, rng, item["seat"])
        return self._score(game, item["seat"])

    def _play(self, game: TextArenaGame, reply: str) -> None:
        """Play a reply of the policy. Raises AnswerError, with a reward, if the game works and this reply breaks it."""
        before = game.copy()
        try:
            game.play(reply)
        except Exception as error:
            if not before.works(Random(0)):
                raise
            raise AnswerError(one_line(error), reward=self.unfinished_reward) from error

    def _deal(self, item: Item) -> tuple[TextArenaGame, Random, str | None]:
        """Start a game and play it up to the seat's first turn.

        Returns the game, the random stream of the opponents, and the text for the seat, or None if the game is over.
        """
        game = TextArenaGame(self.game, self.options, self.players, item["seed"])
        rng = Random(f"{item['seed']}/opponents")
        return game, rng, self._advance(game, rng, item["seat"])

    def _advance(self, game: TextArenaGame, rng: Random, seat: int) -> str | None:
        """Play the other seats until the seat's turn; return its new messages, or None if the game is over."""
        for _ in range(MAX_OPPONENT_MOVES):
            if game.over:
                return None
            messages = game.read_new()
            if game.seat == seat:
                return render(message for message in messages if message[0] != seat) or YOUR_TURN
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
