"""Streams of training items, one per environment. A source of training prompts mixes the streams by weight."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import islice

from colocated_grpo.environments import base
from colocated_grpo.environments.prompts import PromptEncoder
from colocated_grpo.environments.user_code.loading import errors_named
from colocated_grpo.settings.generation import SkipSolvedConfig
from colocated_grpo.types import Group, JsonObject, Prompt


class SequenceStream(base.ItemStream):
    """Items that do not depend on completions. The state is a position."""

    def __init__(self, items_from: Callable[[int], Iterator[base.Item]]) -> None:
        """items_from: returns the endless items from a position on."""
        self._items_from = items_from
        self._taken = 0
        self._items = items_from(0)

    def take(self) -> base.Item:
        item = next(self._items)
        self._taken += 1
        return item

    def state_dict(self) -> JsonObject:
        return {"taken": self._taken}

    def load_state_dict(self, state: JsonObject) -> None:
        self._taken = state["taken"]
        self._items = self._items_from(self._taken)


class GeneratedItems(base.Items):
    """Items that a task or an episode yields."""

    def __init__(self, name: str, task: base.Task | base.Episode) -> None:
        self._name = name
        self._task = task

    def open_stream(self, seed: int) -> base.ItemStream:
        return SequenceStream(partial(self._train, seed))

    def held_out(self, seed: int) -> Iterator[base.Item]:
        return self._items(seed, "held_out")

    def _train(self, seed: int, start: int) -> Iterator[base.Item]:
        """Yield the training items from a position on, pass after pass. Only a Seekable task skips earlier items."""
        if not isinstance(self._task, base.Seekable):
            yield from islice(self._endless(seed), start, None)
            return
        call = "prompts_from(seed, 'train', start)"
        taken = start
        for item in _user_items(self._name, call, partial(self._task.prompts_from, seed, "train", start)):
            taken += 1
            yield item
        problem = f"prompts_from() ended after {taken} items"
        advice = "it must be endless: define only prompts() for a finite task"
        raise base.EnvironmentSetupError(f"environments {self._name!r}: {problem}; {advice}")

    def _endless(self, seed: int) -> Iterator[base.Item]:
        while True:
            empty = True
            for item in self._items(seed, "train"):
                empty = False
                yield item
            if empty:
                raise base.EnvironmentSetupError(f"environments {self._name!r}: prompts(seed, 'train') yielded no item")

    def _items(self, seed: int, split: base.Split) -> Iterator[base.Item]:
        return _user_items(self._name, f"prompts(seed, {split!r})", partial(self._task.prompts, seed, split))


def _user_items(name: str, call: str, items: Callable[[], Iterable[base.Item]]) -> Iterator[base.Item]:
    """Yield from items(), which is user code. call: name of this user code in the error line."""
    with errors_named(f"environments {name!r}: {call}"):
        yield from items()


REMEMBERED = 1 << 17
"""Maximum count of items with a stored number, above the rows of common datasets. Every checkpoint has them all."""
SOLVED_KEY = "solved"
"""Key of the stream's own state, in addition to the keys of the stream that it draws from."""


class UnsolvedItems(base.ItemStream):
    """Items of another stream without those solved in their last `after` visits; all of them if a pass has no other."""

    def __init__(self, stream: base.ItemStream, name: str, config: SkipSolvedConfig) -> None:
        self._stream = stream
        self.max_attempts = stream.max_attempts
        self._name = name
        self._config = config
        self._numbers: dict[str, int] = {}
        """Consecutive solved visits of each item, by key_of(item). The least recently visited item comes first."""
        self._skipped = 0
        """Items skipped since the last `record`."""

    def take(self) -> base.Item:
        for _ in range(self.max_attempts):
            item = self._stream.take()
            if self._numbers.get(key_of(item), 0) < self._config.after:
                return item
            self._skipped += 1
        self._numbers.clear()
        return self._stream.take()

    def reject(self, item: base.Item) -> None:
        self._stream.reject(item)

    def record(self, groups: Sequence[Group]) -> base.BatchResult:
        for group in groups:
            key = key_of(group.prompt.item)
            number = self._numbers.pop(key, 0)
            [reward, *others] = {rollout.score.reward for rollout in group.rollouts}
            if not others and reward is not None and reward >= self._config.reward:
                self._numbers[key] = number + 1  # inserted at the end: the dict is ordered by last visit
        while len(self._numbers) > REMEMBERED:
            del self._numbers[next(iter(self._numbers))]
        result = self._stream.record(groups)
        metrics, self._skipped = {f"prompts_skipped/{self._name}": float(self._skipped)}, 0
        return replace(result, metrics=result.metrics | metrics)

    def state_dict(self) -> JsonObject:
        return {**self._stream.state_dict(), SOLVED_KEY: {"numbers": dict(self._numbers)}}

    def load_state_dict(self, state: JsonObject) -> None:
        self._stream.load_state_dict(state)
        self._numbers = dict(state.get(SOLVED_KEY, {"numbers": {}})["numbers"])  # missing without this setting


def key_of(item: base.Item) -> str:
    """Return a short hash of an item. Items with equal prompts but different columns have different hashes."""
    return blake2b(json_bytes(item), digest_size=8).hexdigest()


def json_bytes(row: base.Item) -> bytes:
    """Return a row as JSON, to be hashed. Of a value that JSON lacks, such as an image, it has the type only, because
    its repr() may differ between processes."""
    return json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__).encode()


MIN_OPPONENT_LIMIT = 16
"""The limit on opponent turns per step is the batch size, but at least this number."""


class Mixture:
    """Deterministic mixing: the next name is the one whose count is furthest below its fraction of the total count."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        total = sum(weights.values())
        self.fractions = {name: weight / total for name, weight in weights.items()}
        self.counts = dict.fromkeys(weights, 0)

    def next_name(self) -> str:
        position = sum(self.counts.values()) + 1
        return max(self.fractions, key=lambda name: self.fractions[name] * position - self.counts[name])


class PromptSource:
    """Source of training prompts, which draws from all environments. Lives on rank 0 only."""

    def __init__(
        self, streams: Mapping[str, base.ItemStream], weights: Mapping[str, float], encoder: PromptEncoder
    ) -> None:
        self.streams = streams
        self.mixture = Mixture(weights)
        self.encoder = encoder
        self.num_prompts = 0
        """Prompts returned so far, including prompts for an opponent."""
        self.num_dropped = 0
        """Items skipped since the last `record` because their prompt was empty or too long."""

    def next(self, n: int) -> list[Prompt]:
        """Return `n` policy prompts, or fewer if all games wait for the opponent, plus any opponent prompts."""
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
            if (prompt := self.encoder.encode(item, index=self.num_prompts, source=name)) is not None:
                self.num_prompts += 1
                self.mixture.counts[name] += not prompt.by_opponent
                return prompt
            stream.reject(item)
            self.num_dropped += 1
        raise self.encoder.no_usable_prompt(name, stream.max_attempts)

    def record(self, groups: Sequence[Group]) -> base.BatchResult:
        """Record the scored groups of all prompts from the last next(), and decide which groups train."""
        parts: list[base.BatchResult] = []
        for name, stream in self.streams.items():
            positions = [position for position, group in enumerate(groups) if group.prompt.source == name]
            part = stream.record([groups[position] for position in positions])
            parts.append(replace(part, trained_now=[positions[index] for index in part.trained_now]))
        result = base.merge_results(parts)
        result.metrics["prompts_dropped"], self.num_dropped = float(self.num_dropped), 0
        return result

    def state_dict(self) -> JsonObject:
        """Return the position between steps as plain data. A source that loads it continues with the same prompts."""
        return {
            "streams": {name: stream.state_dict() for name, stream in self.streams.items()},
            "counts": dict(self.mixture.counts),
            "fractions": self.mixture.fractions,
            "num_prompts": self.num_prompts,
        }

    def load_state_dict(self, state: JsonObject) -> None:
        if state["counts"].keys() != self.mixture.counts.keys():
            raise base.EnvironmentSetupError(
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
