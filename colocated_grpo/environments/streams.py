"""Streams of training items, one per environment. A source of training prompts mixes the streams by weight."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import islice
from random import Random
from typing import Protocol

from colocated_grpo.environments.base import (
    BatchResult,
    EnvironmentSetupError,
    Item,
    Items,
    ItemStream,
    Seekable,
    Split,
    merge_results,
)
from colocated_grpo.environments.prompts import PromptEncoder
from colocated_grpo.environments.user_code.loading import one_line
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.types import Group, JsonObject, Prompt

DIGEST_ROWS = 64
"""Rows that are hashed per dataset. A resume detects changed data by these rows, without reading all rows."""


class Prompting(Protocol):
    """A source of prompts: a task, an episode or tasks of agents."""

    def prompts(self, seed: int, split: Split) -> Iterator[Item]: ...


class FixedItems:
    """Base of streams whose items do not depend on completions: every group trains at once."""

    def reject(self, item: Item) -> None:
        """Do nothing: the next item does not depend on the rejected item."""

    def record(self, groups: Sequence[Group]) -> BatchResult:
        return BatchResult(trained_now=list(range(len(groups))))


class GeneratedItems(Items):
    """Items that a task, an episode or an agent's tasks yield."""

    def __init__(self, name: str, prompting: Prompting) -> None:
        self._name = name
        self._prompting = prompting

    def open_stream(self, seed: int) -> TaskStream:
        return TaskStream(self._name, self._prompting, seed)

    def held_out(self, seed: int) -> Iterator[Item]:
        return task_items(self._name, self._prompting, seed, "held_out")


class TaskStream(FixedItems):
    """Training items of a task or an episode. When the items end, the sequence starts again.

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
    """Yield from items(), which is user code. call: name of this user code in the error line."""
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
        if state["content"] != self.content:
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
        # repr() of a value that JSON lacks, such as an image, may differ between processes. Only the type is hashed.
        hashed.update(json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__).encode())
    return hashed.hexdigest()


def row_at(size: int, seed: int | None, taken: int) -> int:
    """Return the index of the next row after `taken` rows were drawn, in passes over `size` rows.

    seed: None keeps the order of the data.
    """
    epoch, position = divmod(taken, size)
    return position if seed is None else epoch_order(size, seed, epoch)[position]


@lru_cache(maxsize=32)  # a mixture alternates between environments, so it uses several orders
def epoch_order(size: int, seed: int, epoch: int) -> list[int]:
    """Return the row indices of one epoch, shuffled."""
    order = list(range(size))
    Random(f"{seed}:{epoch}").shuffle(order)
    return order


MIN_OPPONENT_LIMIT = 16
"""The limit on opponent turns per step is the batch size, but at least this number."""


class Mixture:
    """Deterministic mixing by weight.

    The next name is that of the environment whose count is furthest below its fraction of the total count.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        total = sum(weights.values())
        self.fractions = {name: weight / total for name, weight in weights.items()}
        self.counts = dict.fromkeys(weights, 0)

    def next_name(self) -> str:
        position = sum(self.counts.values()) + 1
        return max(self.fractions, key=lambda name: self.fractions[name] * position - self.counts[name])


class PromptSource:
    """A BatchSource that draws prompts from all environments."""

    def __init__(self, streams: Mapping[str, ItemStream], weights: Mapping[str, float], encoder: PromptEncoder) -> None:
        self.streams = streams
        self.mixture = Mixture(weights)
        self.encoder = encoder
        self.num_prompts = 0
        """Prompts returned so far, including prompts for an opponent."""
        self.num_dropped = 0
        """Items skipped so far because their prompt was empty or too long."""
        self._num_dropped_reported = 0

    def next(self, n: int) -> list[Prompt]:
        prompts: list[Prompt] = []
        by_opponent = 0
        # The limit is for the case that every open game waits for the opponent: each further turn starts another game.
        while len(prompts) - by_opponent < n and by_opponent < max(n, MIN_OPPONENT_LIMIT):
            prompts.append(self._next_prompt())
            by_opponent += prompts[-1].by_opponent
        return prompts

    def _next_prompt(self) -> Prompt:
        name = self.mixture.next_name()
        stream = self.streams[name]
        for _ in range(stream.max_attempts):
            item = stream.take()
            prompt = self.encoder.encode(item, index=self.num_prompts, source=name)
            if prompt is not None:
                self.num_prompts += 1
                self.mixture.counts[name] += not prompt.by_opponent
                return prompt
            stream.reject(item)
            self.num_dropped += 1
        raise self.encoder.no_usable_prompt(name, stream.max_attempts)

    def record(self, groups: Sequence[Group]) -> BatchResult:
        parts: list[BatchResult] = []
        for name, stream in self.streams.items():
            positions = [position for position, group in enumerate(groups) if group.prompt.source == name]
            part = stream.record([groups[position] for position in positions])
            parts.append(replace(part, trained_now=[positions[index] for index in part.trained_now]))
        result = merge_results(parts)
        result.metrics["prompts_dropped"] = float(self.num_dropped - self._num_dropped_reported)
        self._num_dropped_reported = self.num_dropped
        return result

    def state_dict(self) -> JsonObject:
        return {
            "streams": {name: stream.state_dict() for name, stream in self.streams.items()},
            "counts": dict(self.mixture.counts),
            "fractions": self.mixture.fractions,
            "num_prompts": self.num_prompts,
            "dropped": self.num_dropped,
        }

    def load_state_dict(self, state: JsonObject) -> None:
        if state["counts"].keys() != self.mixture.counts.keys():
            raise EnvironmentSetupError(
                f"environments: the checkpoint has {', '.join(state['counts'])} and the config has "
                f"{', '.join(self.mixture.counts)}; an exact resume needs the same environments"
            )
        for name, stream in self.streams.items():
            stream.load_state_dict(state["streams"][name])
        # If the mixture weights have changed, the counts stay at 0. With the old counts, the mixture would first draw
        # only from environments whose fraction has grown, until the counts match the new fractions.
        if state["fractions"] == self.mixture.fractions:
            self.mixture.counts = dict(state["counts"])
        self.num_prompts = state["num_prompts"]
        self.num_dropped = self._num_dropped_reported = state["dropped"]
