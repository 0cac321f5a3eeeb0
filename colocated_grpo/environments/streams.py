"""Endless streams of training items, one per environment, with a position that can be saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import islice
from random import Random
from typing import Protocol

from colocated_grpo.environments.agents.episode import AgentTasks
from colocated_grpo.environments.base import BatchResult, EnvironmentSetupError, Episode, Item, Seekable, Split, Task
from colocated_grpo.environments.user_code.loading import one_line
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.types import Group, JsonObject

Prompting = Task | Episode | AgentTasks
"""Environments that yield their own prompts."""
DIGEST_ROWS = 64
"""Rows hashed per dataset, so that a resume detects changed data without reading all of it."""


class ItemStream(Protocol):
    """Endless training items of one environment."""

    @property
    def max_attempts(self) -> int:
        """Maximum consecutive unusable items before the caller gives up."""
        ...

    def take(self) -> Item:
        """Return the next item."""
        ...

    def reject(self, item: Item) -> None:
        """Report that the item just taken is not usable as a prompt."""
        ...

    def record(self, groups: Sequence[Group]) -> BatchResult:
        """Record the scored groups of all items taken since the last call."""
        ...

    def state_dict(self) -> JsonObject: ...

    def load_state_dict(self, state: JsonObject) -> None: ...


class FixedItems:
    """Base of streams whose items do not depend on completions: every group trains at once."""

    def reject(self, item: Item) -> None:
        """Do nothing: the next item is independent of this one."""

    def record(self, groups: Sequence[Group]) -> BatchResult:
        return BatchResult(trained_now=list(range(len(groups))))


class TaskStream(FixedItems):
    """Training items of a task or an episode, restarted when they end.

    A resume regenerates all earlier items, unless the task is Seekable.
    """

    max_attempts = 1000

    def __init__(self, name: str, task: Prompting, seed: int) -> None:
        self.name = name
        self.task = task
        self.seed = seed
        self.load_state_dict({"taken": 0})

    def take(self) -> Item:
        item = next(self.items, None)
        if item is None:
            raise EnvironmentSetupError(
                f"environments {self.name!r}: prompts_from() ended after {self.taken} items; it must be endless: "
                "define only prompts() for a finite task"
            )
        self.taken += 1
        return item

    def state_dict(self) -> JsonObject:
        return {"taken": self.taken}

    def load_state_dict(self, state: JsonObject) -> None:
        self.taken = state["taken"]
        if isinstance(self.task, Seekable):
            prompts_from = partial(self.task.prompts_from, self.seed, "train", self.taken)
            self.items = _user_items(self.name, "prompts_from(seed, 'train', start)", prompts_from)
        else:
            self.items = islice(self._endless(), self.taken, None)

    def _endless(self) -> Iterator[Item]:
        while True:
            empty = True
            for item in task_items(self.name, self.task, self.seed, "train"):
                empty = False
                yield item
            if empty:
                raise EnvironmentSetupError(f"environments {self.name!r}: prompts(seed, 'train') yielded no item")


def task_items(name: str, task: Prompting, seed: int, split: Split) -> Iterator[Item]:
    """Yield the items of one split. Exceptions of the task become EnvironmentSetupError."""
    return _user_items(name, f"prompts(seed, {split!r})", partial(task.prompts, seed, split))


def _user_items(name: str, call: str, items: Callable[[], Iterable[Item]]) -> Iterator[Item]:
    """Yield from items(), which is user code. `call` names it in the error line."""
    try:
        yield from items()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentSetupError(f"environments {name!r}: {call}: {one_line(error)}") from error


class Rows(Protocol):
    """Rows by index: a list, or a memory-mapped Hugging Face dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Item: ...


class RowStream(FixedItems):
    """Rows of a dataset, epoch after epoch. With a seed, each epoch is shuffled differently."""

    def __init__(self, name: str, rows: Rows, to_item: Callable[[int], Item], seed: int | None) -> None:
        """seed: None keeps the order of the data."""
        self.name = name
        self.size = len(rows)
        self.content = sample_digest(rows)
        self.to_item = to_item
        self.seed = seed
        self.taken = 0

    @property
    def max_attempts(self) -> int:
        return self.size

    def take(self) -> Item:
        item = self.to_item(row_at(self.size, self.seed, self.taken))
        self.taken += 1
        return item

    def state_dict(self) -> JsonObject:
        return {"taken": self.taken, "rows": self.size, "content": self.content}

    def load_state_dict(self, state: JsonObject) -> None:
        if state["rows"] != self.size:
            raise EnvironmentSetupError(
                f"environments {self.name!r}: the checkpoint was saved with {state['rows']} training rows and there "
                f"are {self.size} now; an exact resume needs the same data"
            )
        if state.get("content", self.content) != self.content:
            raise EnvironmentSetupError(
                f"environments {self.name!r}: the {self.size} training rows differ from those of the checkpoint; "
                "an exact resume needs the same data"
            )
        self.taken = state["taken"]


def sample_digest(rows: Rows) -> str:
    """Hash evenly spaced rows; hashing every row of a large dataset would take too long."""
    hashed = blake2b(digest_size=8)
    for step in range(DIGEST_ROWS):
        row = rows[step * (len(rows) - 1) // (DIGEST_ROWS - 1)]
        # repr() of a value that JSON lacks, such as an image, may differ between processes: hash its type only.
        hashed.update(json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__).encode())
    return hashed.hexdigest()


def row_at(size: int, seed: int | None, taken: int) -> int:
    """Return the index of the row that follows `taken` others, in passes over `size` rows. seed: None is in order."""
    epoch, position = divmod(taken, size)
    return position if seed is None else epoch_order(size, seed, epoch)[position]


@lru_cache(maxsize=32)  # a mixture draws from its environments in turn
def epoch_order(size: int, seed: int, epoch: int) -> list[int]:
    """Return the row indices of one epoch, shuffled."""
    order = list(range(size))
    Random(f"{seed}:{epoch}").shuffle(order)
    return order
