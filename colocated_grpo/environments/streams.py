"""Training items of one environment as an endless sequence whose position can be saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from random import Random
from typing import Any, Protocol

from colocated_grpo.environments.base import EnvironmentSetupError, Episode, Task


class Stream(Protocol):
    """Endless items. `patience`: items after which a caller that found none usable may give up."""

    patience: int

    def take(self) -> dict[str, Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class TaskStream:
    """Train prompts of a task or an episode, started again when they end. Resuming replays the items already taken."""

    patience = 1000

    def __init__(self, name: str, task: Task | Episode, seed: int) -> None:
        self.name = name
        self.task = task
        self.seed = seed
        self.load_state_dict({"taken": 0})

    def take(self) -> dict[str, Any]:
        item = next(self.items)
        self.taken += 1
        return item

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items = islice(self._endless(), state["taken"], None)
        self.taken = state["taken"]

    def _endless(self) -> Iterator[dict[str, Any]]:
        while True:
            empty = True
            for item in self.task.prompts(self.seed, "train"):
                empty = False
                yield item
            if empty:
                raise EnvironmentSetupError(f"environments {self.name!r}: prompts(seed, 'train') gave nothing")


class RowStream:
    """Rows of a dataset, epoch after epoch, each epoch in its own order when shuffled."""

    def __init__(
        self, name: str, rows: Sequence[dict[str, Any]], to_item: Callable[[int], dict[str, Any]], seed: int | None
    ) -> None:
        """seed: None keeps the file's order."""
        self.name = name
        self.size = len(rows)
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
        return {"taken": self.taken, "rows": self.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["rows"] != self.size:
            raise EnvironmentSetupError(
                f"environments {self.name!r}: the checkpoint was made with {state['rows']} training rows, "
                f"now there are {self.size}; an exact resume needs the same data"
            )
        self.taken = state["taken"]


@lru_cache(maxsize=4)
def shuffled(size: int, seed: int, epoch: int) -> list[int]:
    order = list(range(size))
    Random(f"{seed}:{epoch}").shuffle(order)
    return order
