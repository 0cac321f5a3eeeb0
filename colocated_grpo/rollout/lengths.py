"""Sorts prompts by expected completion length, longest first.

A batch ends with its last group: a long group that starts late leaves all other slots and ranks idle. The order affects
when a prompt is sampled, but not what is sampled: seeds are derived from the prompt's index.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from hashlib import blake2b

from colocated_grpo.environments import BatchSource
from colocated_grpo.environments.base import BatchResult
from colocated_grpo.types import Group, JsonObject, Prompt

REMEMBERED = 1 << 16
"""Maximum number of remembered lengths, above the row count of common datasets. Every checkpoint contains them."""
RECENT = 256
"""Window of a running mean, in groups: completions grow or shrink as the policy learns."""


@dataclass
class RunningMean:
    """Mean of the first `RECENT` values; then an exponential moving average."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, RECENT)
        self.value += (value - self.value) / self.count


class ExpectedLengths:
    """Expected completion length of a prompt, from the lengths seen so far. Its state is exact in JSON."""

    def __init__(self) -> None:
        self._by_prompt: dict[str, float] = {}
        """Mean length when last sampled, least recently sampled prompt first."""
        self._by_source: dict[str, RunningMean] = {}
        self._overall = RunningMean()

    def __call__(self, prompt: Prompt) -> float:
        """Return the length of this prompt when last sampled, else the mean of its source, else the overall mean."""
        seen = self._by_prompt.get(_key(prompt))
        return self._by_source.get(prompt.source, self._overall).value if seen is None else seen

    def record(self, groups: Iterable[Group]) -> None:
        for group in groups:
            lengths = [rollout.completion_tokens for rollout in group.rollouts]
            length = sum(lengths) / len(lengths)
            key = _key(group.prompt)
            self._by_prompt.pop(key, None)  # reinsert at the end: the dict is ordered by last use
            self._by_prompt[key] = length
            self._by_source.setdefault(group.prompt.source, RunningMean()).add(length)
            self._overall.add(length)
        while len(self._by_prompt) > REMEMBERED:
            del self._by_prompt[next(iter(self._by_prompt))]

    def state_dict(self) -> JsonObject:
        return {
            "prompts": dict(self._by_prompt),
            "sources": {name: list(astuple(mean)) for name, mean in self._by_source.items()},
            "overall": list(astuple(self._overall)),
        }

    def load_state_dict(self, state: JsonObject) -> None:
        self._by_prompt = dict(state["prompts"])
        self._by_source = {name: RunningMean(*mean) for name, mean in state["sources"].items()}
        self._overall = RunningMean(*state["overall"])


class LongestFirst:
    """A `BatchSource` that sorts each batch by expected length, longest first. `record` updates the lengths."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source
        self._lengths = ExpectedLengths()

    def next(self, n: int) -> list[Prompt]:
        # Sorting is stable: prompts without a known length keep the source's order, as a resumed run needs.
        return sorted(self._source.next(n), key=self._lengths, reverse=True)

    def record(self, groups: Sequence[Group]) -> BatchResult:
        self._lengths.record(groups)
        return self._source.record(groups)

    def state_dict(self) -> JsonObject:
        return {"prompts": self._source.state_dict(), "lengths": self._lengths.state_dict()}

    def load_state_dict(self, state: JsonObject) -> None:
        self._source.load_state_dict(state["prompts"])
        self._lengths.load_state_dict(state["lengths"])


def _key(prompt: Prompt) -> str:
    tokens = prompt.token_ids
    return blake2b(struct.pack(f"<{len(tokens)}q", *tokens), digest_size=8).hexdigest()
