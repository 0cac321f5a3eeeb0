"""Adapter that runs ToSSim's batchers (next_batch, apply_actions, get_batch_stats) as a turn environment.

`next_batch()` returns `(prompts, meta)`, a list of (prompt, meta) pairs, or a list of bare prompts. Actions are
applied by `apply_actions(meta, completions)`, or by `apply_actions(completions)` for bare prompts. Rewards are
numbers or (number, note) pairs. A batcher cannot reward an action without applying it. Each completion is therefore
scored on a copy of the batcher and its open batch (`ToSSimTable`), which writes to no log file. cloudpickle writes the
copies, because ToSSim's own environment contains local functions.

Reading the pickles of a checkpoint can run code, so they are signed with a key that is private to the user: a run
folder made by another user cannot run code here.
"""

import hmac
import os
import pickle
import random
import secrets
from base64 import b64decode, b64encode
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.turns.base import Outcome, Return
from colocated_grpo.environments.user_code.isolation import OwnLogs, isolated
from colocated_grpo.environments.user_code.loading import construct, errors_named, load_object
from colocated_grpo.types import JsonObject

TRUST_VARIABLE = "COLOCATED_GRPO_TRUST_STATE"
"""Environment variable that permits state without a valid signature. No run folder can set this variable."""
_KEY_BYTES = 32


def key_file() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "colocated_grpo/signing_key"


def sign(data: bytes) -> str | None:
    """Return the signature of `data`; None if the key can be neither read nor created, as in a read-only home."""
    try:
        return hmac.digest(_key(), data, "sha256").hex()
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return None


def is_trusted(data: bytes, signature: str | None) -> bool:
    """Return True if a run of this user signed `data`, or if TRUST_VARIABLE is set to 1."""
    if os.environ.get(TRUST_VARIABLE) == "1":
        return True
    own = sign(data)
    return own is not None and hmac.compare_digest(own.encode(), str(signature).encode())


def _key() -> bytes:
    """Return the user's key. The first call creates the key."""
    file = key_file()
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(secrets.token_bytes(_KEY_BYTES))
            with suppress(FileExistsError):  # another run has created the key in the meantime
                os.link(new, file)  # unlike a rename, a link never replaces a key
        finally:
            new.unlink()
    key = file.read_bytes()
    if len(key) != _KEY_BYTES:
        raise OSError(f"{file} is not a key")
    return key


WAIT = "<think></think><wait/>"
"""Action of a seat without a completion."""
MAX_EMPTY_BATCHES = 10
"""Consecutive empty batches after which a call returns no turns for a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToSSimTurn:
    """One open turn, as plain data."""

    id: str
    """'table.batch.index'."""
    table: int
    index: int
    messages: str
    frozen: bytes = field(repr=False)
    """Pickle of the table before the batch is applied."""
    phase: str = "turn"
    trainable: bool = True

    def pattern(self) -> str:
        rule = "ToSSim has no grammar of legal replies; leave it out"
        raise EnvironmentSetupError(f"environments 'tossim': structured=true: {rule}")


@dataclass(slots=True)
class ToSSimTable:
    """One batcher and its open batch. Pickled into checkpoints, so fields must not be renamed."""

    batcher: Any
    prompts: list[str] = field(default_factory=list)
    meta: list[object] | None = None
    """One entry for each prompt; None for a batch of bare prompts."""
    replies: dict[int, str] = field(default_factory=dict)
    """Committed replies by position in the batch."""
    batches: int = 0
    calls: int = 0
    """Calls into the batcher so far. Each call runs with its own random stream."""
    told: dict[str, float] = field(default_factory=dict)
    """The batcher's counts at the last drain_stats(). The batcher itself never resets its counts."""

    def request_batch(self) -> None:
        """Replace the open batch by the batcher's next batch, which may be empty."""
        batch = self.batcher.next_batch()
        if isinstance(batch, tuple):
            self.prompts, self.meta = list(batch[0]), list(batch[1])
        elif batch and not isinstance(batch[0], str):
            self.prompts, self.meta = [each[0] for each in batch], [each[1] for each in batch]
        else:
            self.prompts, self.meta = list(batch), None
        if self.meta is not None and len(self.meta) != len(self.prompts):
            raise ValueError(f"next_batch() returned {len(self.prompts)} prompts with {len(self.meta)} meta entries")
        self.batches += 1

    def open_indices(self) -> list[int]:
        return [index for index in range(len(self.prompts)) if index not in self.replies]

    def apply(self, replies: Mapping[int, str]) -> dict[int, float]:
        """Apply replies and return their rewards, both by position. For bare prompts, WAIT replaces missing replies."""
        if self.meta is None:
            indices = list(range(len(self.prompts)))
            rewards = self.batcher.apply_actions([replies.get(index, WAIT) for index in indices])
        else:
            meta, indices = self.meta, sorted(replies)
            rewards = self.batcher.apply_actions([meta[i] for i in indices], [replies[i] for i in indices])
        numbers = [reward[0] if isinstance(reward, tuple | list) else reward for reward in rewards]
        if len(numbers) != len(indices):
            problem = f"apply_actions() returned {len(numbers)} rewards for {len(indices)} actions"
            raise ValueError(f"{problem}; return a list with one number for each action, in the order of the actions")
        return {index: float(number) for index, number in zip(indices, numbers, strict=True)}

    def drain_stats(self) -> dict[str, float]:
        """Return the number of games, and the increase of the batcher's counts since the last call."""
        stats = dict(self.batcher.get_batch_stats())
        counts = _numbers(stats.get("metrics", {}))
        before, self.told = self.told, counts
        new = {name: value - before.get(name, 0.0) for name, value in counts.items()}
        return _numbers({"total_games": stats.get("total_games")}) | new


def _numbers(stats: Mapping[str, object]) -> dict[str, float]:
    """Return the numeric entries. Converting another entry, such as a note, would raise and replace the table."""
    return {name: float(value) for name, value in stats.items() if isinstance(value, int | float)}


class ToSSim:
    """Turn environment of tables with one batcher each. It starts with one table; add_game() adds more."""

    delayed = False

    def __init__(self, seed: int, environment: str, **args: object) -> None:
        """environment: 'module:Class' of the batcher. args: keyword arguments of that class."""
        self._key = f"environments 'tossim': args.environment={environment!r}"
        self._class = load_object(environment, self._key)
        self._args = args
        self._seed = seed
        self._built = 0
        self._resets = 0
        self._tables: list[ToSSimTable] = []
        self._logs: list[OwnLogs] = []
        self._add_table()

    def next_batch(self) -> list[ToSSimTurn]:
        return [turn for number in range(len(self._tables)) for turn in self._turns(number)]

    def add_game(self) -> list[ToSSimTurn]:
        self._add_table()
        return self._turns(len(self._tables) - 1)

    def score(self, turn: ToSSimTurn, completions: Sequence[str]) -> list[Outcome]:
        """Return rewards: -1 malformed, 0 illegal, +1 legal; None if the batcher raised. Raises if it raised on all."""
        errors: list[BaseException] = []
        outcomes = [self._outcome(turn, completion, errors) for completion in completions]
        if len(errors) == len(outcomes):
            raise errors[0]
        return outcomes

    def _outcome(self, turn: ToSSimTurn, completion: str, errors: list[BaseException]) -> Outcome:
        try:
            with isolated(random.Random(f"{turn.id}/{completion}")), closing(OwnLogs()) as logs, logs.attached():
                table: ToSSimTable = pickle.loads(turn.frozen)
                reward = table.apply({turn.index: completion})[turn.index]
        except BaseException as error:  # As in scoring.score_each(): user code that exits must not end the run.
            errors.append(error)
            return Outcome(None, {"failed": 1.0})
        return Outcome(reward, {"parse_rate": float(reward > -1), "legal_rate": float(reward >= 1)})

    def commit(self, turn: ToSSimTurn, completion: str) -> None:
        """Store a completion. The last one of a batch applies them all, because a phase ends for all seats together."""
        table = self._tables[turn.table]
        if turn.index not in table.open_indices() or turn.id != _turn_id(turn.table, table, turn.index):
            raise ValueError(f"turn {turn.id}: not open; a turn takes exactly one commit")
        table.replies[turn.index] = completion
        if len(table.replies) == len(table.prompts):
            replies, table.replies = table.replies, {}
            with self._replaced_on_failure(turn.table):
                table.apply(replies)
                table.prompts = []

    def play_on(self, turn: ToSSimTurn) -> None:
        self.commit(turn, WAIT)

    def drain_returns(self) -> list[Return]:
        return []

    def drain_games(self) -> list[JsonObject]:
        return []

    def drain_stats(self) -> dict[str, float]:
        """Return the number of games, and the batchers' counts and the replaced tables since the last call."""
        totals = {"resets": float(self._resets)}
        self._resets = 0
        for number, table in enumerate(self._tables):
            with self._replaced_on_failure(number):
                for name, value in table.drain_stats().items():
                    totals[name] = totals.get(name, 0.0) + value
        return totals

    def snapshot(self) -> JsonObject:
        tables, logs = cloudpickle.dumps(self._tables), cloudpickle.dumps(self._logs)
        return {
            "tables": b64encode(tables).decode(),
            "logs": b64encode(logs).decode(),
            "signature": sign(tables + logs),
            "seated": self._built,
            "resets": self._resets,
        }

    def restore(self, snapshot: JsonObject) -> None:
        """Restore the tables. Raises ValueError unless `is_trusted` accepts the snapshot: pickles can run code."""
        tables, logs = b64decode(snapshot["tables"]), b64decode(snapshot["logs"])
        if not is_trusted(tables + logs, snapshot["signature"]):
            problem = f"their pickle is not signed with {key_file()}, and reading it can run code"
            advice = f"if you trust the run folder (your own, from another machine), set {TRUST_VARIABLE}=1"
            raise ValueError(f"{problem}; {advice}")
        for own in self._logs:
            own.close()
        self._tables = pickle.loads(tables)
        self._logs = pickle.loads(logs)
        self._built, self._resets = snapshot["seated"], snapshot["resets"]

    def _add_table(self) -> None:
        logs = OwnLogs()
        self._tables.append(self._new_table(logs))
        self._logs.append(logs)

    def _new_table(self, logs: OwnLogs) -> ToSSimTable:
        self._built += 1
        with isolated(random.Random(f"{self._seed}/{self._built}")), logs.attached():
            table = ToSSimTable(construct(self._class, self._args, self._key))
        with errors_named(f"{self._key}: cannot be pickled, but completions are scored on copies of it"):
            cloudpickle.dumps(table)
        return table

    def _turns(self, number: int) -> list[ToSSimTurn]:
        for left in reversed(range(MAX_EMPTY_BATCHES)):
            if self._tables[number].prompts:
                break
            with self._replaced_on_failure(number, attempts_left=left):
                self._tables[number].request_batch()
        table = self._tables[number]
        frozen = cloudpickle.dumps(table) if table.prompts else b""
        return [
            ToSSimTurn(
                id=_turn_id(number, table, index),
                table=number,
                index=index,
                messages=table.prompts[index],
                frozen=frozen,
            )
            for index in table.open_indices()
        ]

    @contextmanager
    def _replaced_on_failure(self, number: int, attempts_left: int = 1) -> Generator[None]:
        """Run a call into the batcher with its own random stream. If it raises, replace the table, or give up."""
        table = self._tables[number]
        try:
            table.calls += 1
            with isolated(random.Random(f"{self._seed}/{number}/{table.calls}")), self._logs[number].attached():
                yield
        except (Exception, SystemExit):
            if not attempts_left:
                raise
            self._logs[number].close()
            new = self._new_table(self._logs[number])
            new.batches, new.calls = table.batches, table.calls  # Turn ids and random streams must not repeat.
            self._tables[number] = new
            self._resets += 1


def _turn_id(number: int, table: ToSSimTable, index: int) -> str:
    return f"{number}.{table.batches}.{index}"
