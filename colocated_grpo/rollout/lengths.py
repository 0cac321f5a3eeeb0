"""Longest expected completions first: what starts last decides when a batch ends, so it had better be short.

A group that starts late and runs long leaves every other slot and every other rank idle. Order changes when a prompt is
served and nothing else: seeds come from the prompt's index.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

from colocated_grpo.environments import BatchSource
from colocated_grpo.environments.base import Settled
from colocated_grpo.types import Group, Prompt

REMEMBERED = 1 << 16
"""Prompts whose length is kept: more than the rows of common datasets. Every checkpoint holds them."""
RECENT = 256
"""Groups over which a running mean looks back: completions grow or shrink as the policy learns."""


class RunningMean:
    """Mean of the first `RECENT` values, from then on an exponential one."""

    def __init__(self, value: float = 0.0, count: int = 0) -> None:
        self.value = value
        self.count = count

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, RECENT)
        self.value += (value - self.value) / self.count


class ExpectedLengths:
    """Tokens that a prompt's completions will probably have, from those seen so far. Its state is exact in JSON."""

    def __init__(self) -> None:
        self._by_prompt: dict[str, float] = {}
        """Mean length when last sampled, the prompt not seen for longest in front."""
        self._by_source: dict[str, RunningMean] = {}
        self._overall = RunningMean()

    def __call__(self, prompt: Prompt) -> float:
        """Of the same tokens if they were sampled before, else of the prompt's source, else of everything."""
        seen = self._by_prompt.get(_key(prompt))
        return self._by_source.get(prompt.source, self._overall).value if seen is None else seen

    def record(self, groups: Iterable[Group]) -> None:
        for group in groups:
            lengths = [len(rollout.token_ids) - rollout.prompt_length for rollout in group.rollouts]
            length = sum(lengths) / len(lengths)
            key = _key(group.prompt)
            self._by_prompt.pop(key, None)  # a key that stays in place would be forgotten by its first use
            self._by_prompt[key] = length
            self._by_source.setdefault(group.prompt.source, RunningMean()).add(length)
            self._overall.add(length)
        while len(self._by_prompt) > REMEMBERED:
            del self._by_prompt[next(iter(self._by_prompt))]

    def state_dict(self) -> dict[str, Any]:
        return {
            "prompts": dict(self._by_prompt),
            "sources": {name: [mean.value, mean.count] for name, mean in self._by_source.items()},
            "overall": [self._overall.value, self._overall.count],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._by_prompt = dict(state["prompts"])
        self._by_source = {name: RunningMean(*mean) for name, mean in state["sources"].items()}
        self._overall = RunningMean(*state["overall"])


class LongestFirst:
    """A `BatchSource` whose batches begin with the prompts expected to run longest. Tell it what was sampled."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source
        self._lengths = ExpectedLengths()

    def next(self, n: int) -> list[Prompt]:
        # Sorting is stable: prompts of which nothing is known stay in the source's order, and so does a resumed run.
        return sorted(self._source.next(n), key=self._lengths, reverse=True)

    def record(self, groups: Sequence[Group]) -> Settled:
        self._lengths.record(groups)
        return self._source.record(groups)

    def state_dict(self) -> dict[str, Any]:
        return {"prompts": self._source.state_dict(), "lengths": self._lengths.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._source.load_state_dict(state["prompts"])
        self._lengths.load_state_dict(state["lengths"])


def _key(prompt: Prompt) -> str:
    tokens = prompt.token_ids
    return blake2b(struct.pack(f"<{len(tokens)}q", *tokens), digest_size=8).hexdigest()
