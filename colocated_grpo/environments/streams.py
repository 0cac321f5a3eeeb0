"""Training items of one environment as an endless sequence whose position can be saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import islice
from random import Random
from typing import Any, Protocol

from colocated_grpo.config.errors import ConfigError
from colocated_grpo.environments.base import EnvironmentSetupError, Episode, Seekable, Settled, Task
from colocated_grpo.environments.user_code.loading import one_line
from colocated_grpo.types import Group

DIGESTED = 64
"""Rows of a dataset by which a resume knows it again."""


class Stream(Protocol):
    """Endless items. `patience`: items after which a caller that found none usable may give up."""

    patience: int

    def take(self) -> dict[str, Any]: ...

    def reject(self, item: dict[str, Any]) -> None:
        """The item just taken cannot be asked."""
        ...

    def record(self, groups: Sequence[Group]) -> Settled:
        """The scored groups of all items taken since the last call."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Unmoved:
    """What streams have in common whose items do not depend on what was answered."""

    def reject(self, item: dict[str, Any]) -> None:
        """The next item is as good."""

    def record(self, groups: Sequence[Group]) -> Settled:
        return Settled(now=list(range(len(groups))))


class TaskStream(Unmoved):
    """Train prompts of a task or an episode, started again when they end.

    Resuming makes the items already taken once more, unless the task can be entered where it was left.
    """

    patience = 1000

    def __init__(self, name: str, task: Task | Episode, seed: int) -> None:
        self.name = name
        self.task = task
        self.seed = seed
        self.load_state_dict({"taken": 0})

    def take(self) -> dict[str, Any]:
        item = next(self.items, None)
        if item is None:
            raise EnvironmentSetupError(
                f"environments {self.name!r}: prompts_from() ended after {self.taken} items; give only prompts() where "
                "there is an end"
            )
        self.taken += 1
        return item

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]
        if isinstance(self.task, Seekable):
            enter = partial(self.task.prompts_from, self.seed, "train", self.taken)
            self.items = asked(self.name, "prompts_from(seed, 'train', start)", enter)
        else:
            self.items = islice(self._endless(), self.taken, None)

    def _endless(self) -> Iterator[dict[str, Any]]:
        while True:
            empty = True
            for item in prompts_of(self.name, self.task, self.seed, "train"):
                empty = False
                yield item
            if empty:
                raise EnvironmentSetupError(f"environments {self.name!r}: prompts(seed, 'train') gave nothing")


def prompts_of(name: str, task: Task | Episode, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """What the task of the environment `name` asks in a split. Raises one line for whatever it raises."""
    return asked(name, f"prompts(seed, {split!r})", partial(task.prompts, seed, split))


def asked(name: str, what: str, ask: Callable[[], Iterable[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """The items of ask(), which is the user's; `what` it is in words."""
    try:
        yield from ask()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentSetupError(f"environments {name!r}: {what}: {one_line(error)}") from error


class RowStream(Unmoved):
    """Rows of a dataset, epoch after epoch, each epoch in its own order when shuffled."""

    def __init__(
        self, name: str, rows: Sequence[dict[str, Any]], to_item: Callable[[int], dict[str, Any]], seed: int | None
    ) -> None:
        """seed: None keeps the file's order."""
        self.name = name
        self.size = len(rows)
        self.content = digest(rows)
        self.to_item = to_item
        self.seed = seed
        self.taken = 0
        self.patience = self.size

    def take(self) -> dict[str, Any]:
        epoch, position = divmod(self.taken, self.size)
        index = position if self.seed is None else shuffled(self.size, self.seed, epoch)[position]
        item = self.to_item(index)
        self.taken += 1
        return item

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken, "rows": self.size, "content": self.content}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["rows"] != self.size:
            raise EnvironmentSetupError(
                f"environments {self.name!r}: the checkpoint was made with {state['rows']} training rows, "
                f"now there are {self.size}; an exact resume needs the same data"
            )
        if state.get("content", self.content) != self.content:
            raise EnvironmentSetupError(
                f"environments {self.name!r}: the checkpoint was made with other rows than the {self.size} that there "
                "are now; an exact resume needs the same data"
            )
        self.taken = state["taken"]


def digest(rows: Sequence[dict[str, Any]]) -> str:
    """Of some rows at even distances, as reading all of a large dataset would take long."""
    hashed = blake2b(digest_size=8)
    for place in range(DIGESTED):
        row = rows[place * (len(rows) - 1) // (DIGESTED - 1)]
        # What JSON does not know (an image) may show itself differently each time: of that, the kind.
        hashed.update(json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__).encode())
    return hashed.hexdigest()


@lru_cache(maxsize=4)
def shuffled(size: int, seed: int, epoch: int) -> list[int]:
    order = list(range(size))
    Random(f"{seed}:{epoch}").shuffle(order)
    return order
