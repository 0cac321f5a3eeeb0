"""Fake batchers with ToSSim's interface, in all its forms. They print, use global random numbers, and can raise."""

from __future__ import annotations

import logging
import random
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any


class Game:
    def __init__(self) -> None:
        self.day = 1
        self.speeches: list[str] = []


class Player:
    def __init__(self, name: str) -> None:
        self.name = name
        self.turns = 0


class WithMeta:
    """Batches of (prompts, meta), rewards as (number, note) pairs. Each player acts twice a day."""

    def __init__(self, num_games: int = 1, active_seats_per_game: int = 3, breaks_on_day: int = 0) -> None:
        print("a new table")
        self.seats, self.breaks_on_day = active_seats_per_game, breaks_on_day
        self.games = [self._new_game() for _ in range(num_games)]
        self.metrics = {"total_actions": 0, "malformed_actions": 0, "illegal_actions": 0, "legal_actions": 0}

    def _new_game(self) -> tuple[Game, list[Player]]:
        return Game(), [Player(f"p{random.randrange(1000)}") for _ in range(self.seats)]

    def next_batch(self) -> tuple[list[str], list[tuple[Game, Player]]]:
        print("next")
        meta = [(game, player) for game, players in self.games for player in players]
        for game, _ in self.games:
            if game.day == self.breaks_on_day:
                raise AttributeError("'Player' object has no attribute 'will'")
        return [f"{player.name}, day {game.day}: {'; '.join(game.speeches[-2:])}" for game, player in meta], meta

    def apply_actions(self, meta: list[tuple[Game, Player]], completions: list[str]) -> list[Any]:
        rewards = [self._act(game, player, text) for (game, player), text in zip(meta, completions, strict=True)]
        for game, players in self.games:
            if all(player.turns == 2 * game.day for player in players):
                game.day += 1
        return [(reward, "note") for reward in rewards]

    def _act(self, game: Game, player: Player, text: str) -> float:
        player.turns += 1
        self.metrics["total_actions"] += 1
        if not text.startswith("<think>"):
            self.metrics["malformed_actions"] += 1
            return -1.0
        if "<kill>" in text:
            self.metrics["illegal_actions"] += 1
            return 0.0
        self.metrics["legal_actions"] += 1
        game.speeches.append(f"{player.name} {text[-12:]} {random.randrange(100)}")
        return 1.0

    def get_batch_stats(self) -> dict[str, Any]:
        total = max(1, self.metrics["total_actions"])
        accuracy = self.metrics["legal_actions"] / total
        return {"total_games": len(self.games), "metrics": dict(self.metrics), "parsing_accuracy": accuracy}


class Pairs(WithMeta):
    """Batches as a list of (prompt, meta) pairs, with plain rewards."""

    def next_batch(self) -> list[tuple[str, tuple[Game, Player]]]:
        prompts, meta = super().next_batch()
        return list(zip(prompts, meta, strict=True))

    def apply_actions(self, meta: list[tuple[Game, Player]], completions: list[str]) -> list[float]:
        return [reward for reward, _ in super().apply_actions(meta, completions)]


class Bare(WithMeta):
    """Batches of bare prompts: the batcher itself keeps the meta of its open batch."""

    def next_batch(self) -> list[str]:
        prompts, self._meta = super().next_batch()
        return prompts

    def apply_actions(self, completions: list[str]) -> list[float]:
        return [reward for reward, _ in super().apply_actions(self._meta, completions)]


class Locked(WithMeta):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Empty(WithMeta):
    """Has no prompts."""

    def next_batch(self) -> tuple[list[str], list[Any]]:
        return [], []


class Lucky(WithMeta):
    """Records a random number in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def next_batch(self) -> tuple[list[str], list[tuple[Game, Player]]]:
        self.drawn.append(random.random())
        return super().next_batch()

    def apply_actions(self, meta: list[tuple[Game, Player]], completions: list[str]) -> list[Any]:
        self.drawn.append(random.random())
        return super().apply_actions(meta, completions)

    def get_batch_stats(self) -> dict[str, Any]:
        self.drawn.append(random.random())
        return super().get_batch_stats()


class Logged(WithMeta):
    """Like ToSSim's sequential environment: local functions in its state, and loggers by name with a file per game.

    Its games end after `last_day`.
    """

    def __init__(self, folder: str, last_day: int = 99, **args: Any) -> None:
        self.folder, self.last_day, self.files = Path(folder), last_day, 0
        self.turns = defaultdict(lambda: defaultdict(int))
        super().__init__(**args)

    def _new_game(self) -> tuple[Game, list[Player]]:
        print("a new game", file=sys.stderr)
        self.logger = logging.getLogger("social_batchers.actions")
        self.logger.setLevel(logging.INFO)
        path = self.folder / f"{threading.get_ident()}-{id(self)}-{self.files}" / "actions.log"
        path.parent.mkdir(parents=True)
        self.files += 1
        self.logger.addHandler(logging.StreamHandler())
        self.logger.addHandler(logging.FileHandler(path))
        self.logger.info("game")
        return super()._new_game()

    def next_batch(self) -> tuple[list[str], list[tuple[Game, Player]]]:
        self.games = [self._new_game() if game.day > self.last_day else (game, p) for game, p in self.games]
        return super().next_batch()

    def _act(self, game: Game, player: Player, text: str) -> float:
        self.turns[game.day][player.name] += 1
        self.logger.info("act %s", text)
        return super()._act(game, player, text)


class Chatty(WithMeta):
    """Its stats have entries that are not numbers, and no total_games."""

    def get_batch_stats(self) -> dict[str, Any]:
        return {"metrics": {**self.metrics, "mood": "good", "by_role": {}}}
