"""The interface of ToSSim's batchers as a turn environment: next_batch, apply_actions, get_batch_stats.

Two shapes of a batch have been in use, `(prompts, meta)` with `apply_actions(meta, completions)`, also as a list of
(prompt, meta) pairs, and bare prompts with `apply_actions(completions)`. Rewards come as numbers or as (number, note).
Such an environment executes whatever it rewards, so a completion is judged on a pickled copy of the whole table.
"""

from __future__ import annotations

import pickle
import random
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.user_code.isolation import isolated
from colocated_grpo.environments.user_code.loading import construct, load_object, one_line

WAIT = "<think></think><wait/>"
"""What a seat does that is not asked."""
RETRIES = 10
"""Empty batches in a row after which a table is left alone for this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToSSimTurn:
    id: str
    table: int
    place: int
    """In the table's batch."""
    messages: str
    frozen: bytes = field(repr=False)
    """The table as it stands before the batch is answered."""
    phase: str = "turn"
    trainable: bool = True

    def pattern(self) -> str:
        raise EnvironmentSetupError("environments 'tossim': structured: true needs a grammar, and ToSSim gives none")


@dataclass(frozen=True, slots=True)
class ToSSimOutcome:
    reward: float | None
    """-1 malformed, 0 illegal, +1 fine; None where the environment failed."""
    parts: dict[str, float]


@dataclass(slots=True)
class Table:
    """One batcher and the batch that it is waiting for."""

    batcher: Any
    prompts: list[str] = field(default_factory=list)
    meta: list[Any] | None = None
    replies: dict[int, str] = field(default_factory=dict)
    batches: int = 0
    calls: int = 0
    """Of the batcher's code: each has a chance of its own."""
    told: dict[str, float] = field(default_factory=dict)
    """The batcher's counts, which it never resets, at the last `drain_stats`."""

    def ask(self) -> None:
        """Take the next batch. It may be empty."""
        batch = self.batcher.next_batch()
        if isinstance(batch, tuple):
            self.prompts, self.meta = list(batch[0]), list(batch[1])
        elif batch and not isinstance(batch[0], str):
            self.prompts, self.meta = [each[0] for each in batch], [each[1] for each in batch]
        else:
            self.prompts, self.meta = list(batch), None
        self.batches += 1

    def open_places(self) -> list[int]:
        return [place for place in range(len(self.prompts)) if place not in self.replies]

    def answer(self, replies: dict[int, str]) -> dict[int, float]:
        """Rewards by place. Only a batch of bare prompts has to be answered as a whole."""
        if self.meta is None:
            places = list(range(len(self.prompts)))
            rewards = self.batcher.apply_actions([replies.get(place, WAIT) for place in places])
        else:
            places = sorted(replies)
            rewards = self.batcher.apply_actions([self.meta[p] for p in places], [replies[p] for p in places])
        return {place: float(_number(each)) for place, each in zip(places, rewards, strict=True)}

    def drain_stats(self) -> dict[str, float]:
        stats = dict(self.batcher.get_batch_stats())
        counts = _numbers(stats.get("metrics", {}))
        told, self.told = self.told, counts
        new = {name: value - told.get(name, 0.0) for name, value in counts.items()}
        return _numbers({"total_games": stats.get("total_games")}) | new


def _numbers(stats: dict[str, Any]) -> dict[str, float]:
    """Others are notes; a game is not given up for them."""
    return {name: float(value) for name, value in stats.items() if isinstance(value, int | float)}


def _number(reward: Any) -> Any:
    return reward[0] if isinstance(reward, tuple | list) else reward


class ToSSim:
    """`environment`: 'module:Class'; all other arguments are the class's own. One table at first, more as needed."""

    delayed = False

    def __init__(self, seed: int, environment: str, **args: Any) -> None:
        self._key = f"environments 'tossim': args.environment={environment!r}"
        self._class = load_object(environment, self._key)
        self._args = args
        self._seed = seed
        self._seated = 0
        self._resets = 0
        self._tables = [self._new_table()]

    def next_batch(self) -> list[ToSSimTurn]:
        return [turn for number in range(len(self._tables)) for turn in self._turns(number)]

    def add_game(self) -> list[ToSSimTurn]:
        self._tables.append(self._new_table())
        return self._turns(len(self._tables) - 1)

    def score(self, turn: ToSSimTurn, completions: Sequence[str]) -> list[ToSSimOutcome]:
        return [self._judged(turn, completion) for completion in completions]

    def _judged(self, turn: ToSSimTurn, completion: str) -> ToSSimOutcome:
        try:
            with isolated(random.Random(f"{turn.id}/{completion}")):
                table = pickle.loads(turn.frozen)
                reward = table.answer({turn.place: completion})[turn.place]
        except BaseException:  # see score_text
            return ToSSimOutcome(None, {"failed": 1.0})
        return ToSSimOutcome(reward, {"parse_rate": float(reward > -1), "legal_rate": float(reward >= 1)})

    def commit(self, turn: ToSSimTurn, completion: str) -> None:
        """Carried out with the last reply of the batch: a phase ends for all of its seats together."""
        table = self._tables[turn.table]
        if turn.place not in table.open_places() or turn.id != _turn_id(turn.table, table, turn.place):
            raise ValueError(f"turn {turn.id}: not open; a turn takes exactly one commit")
        table.replies[turn.place] = completion
        if len(table.replies) == len(table.prompts):
            replies, table.replies = table.replies, {}
            with self._reset_on_failure(turn.table):
                table.answer(replies)
                table.prompts = []

    def play_on(self, turn: ToSSimTurn) -> None:
        self.commit(turn, WAIT)

    def drain_returns(self) -> list[Any]:
        return []

    def drain_games(self) -> list[dict[str, Any]]:
        return []

    def drain_stats(self) -> dict[str, float]:
        """Games that the tables hold; since the last call what their batchers counted, and tables set up anew.

        What a table that is set up anew had counted is lost.
        """
        totals = {"resets": float(self._resets)}
        self._resets = 0
        for number, table in enumerate(self._tables):
            with self._reset_on_failure(number):
                for name, value in table.drain_stats().items():
                    totals[name] = totals.get(name, 0.0) + value
        return totals

    def snapshot(self) -> dict[str, Any]:
        tables = b64encode(pickle.dumps(self._tables)).decode()
        return {"tables": tables, "seated": self._seated, "resets": self._resets}

    def restore(self, snapshot: dict[str, Any]) -> None:
        self._tables = pickle.loads(b64decode(snapshot["tables"]))
        self._seated, self._resets = snapshot["seated"], snapshot["resets"]

    def _new_table(self) -> Table:
        self._seated += 1
        with isolated(random.Random(f"{self._seed}/{self._seated}")):
            table = Table(construct(self._class, self._args, self._key))
        try:
            pickle.dumps(table)
        except Exception as error:
            raise EnvironmentSetupError(
                f"{self._key}: cannot be pickled, and completions are judged on copies of it: {one_line(error)}"
            ) from error
        return table

    def _turns(self, number: int) -> list[ToSSimTurn]:
        for _ in range(RETRIES):
            table = self._tables[number]
            if table.prompts:
                break
            with self._reset_on_failure(number):
                table.ask()
        return self._open(number)

    def _open(self, number: int) -> list[ToSSimTurn]:
        table = self._tables[number]
        frozen = pickle.dumps(table) if table.prompts else b""
        return [
            ToSSimTurn(
                id=_turn_id(number, table, place),
                table=number,
                place=place,
                messages=table.prompts[place],
                frozen=frozen,
            )
            for place in table.open_places()
        ]

    @contextmanager
    def _reset_on_failure(self, number: int) -> Iterator[None]:
        """A table whose code raises is set up anew; its open turns are lost."""
        table = self._tables[number]
        try:
            table.calls += 1
            with isolated(random.Random(f"{self._seed}/{number}/{table.calls}")):
                yield
        except (Exception, SystemExit):
            anew = self._new_table()
            anew.batches, anew.calls = table.batches, table.calls  # neither ids nor luck are used again
            self._tables[number] = anew
            self._resets += 1


def _turn_id(number: int, table: Table, place: int) -> str:
    return f"{number}.{table.batches}.{place}"
