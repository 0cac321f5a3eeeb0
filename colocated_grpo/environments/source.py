"""The stream of training prompts: several environments mixed by weight, with an exact cursor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from colocated_grpo.environments.base import EnvironmentSetupError, Settled, joined
from colocated_grpo.environments.prompts import PromptEncoder
from colocated_grpo.environments.streams import Stream
from colocated_grpo.types import Group, Prompt

LEAST_BY_OPPONENT = 16
"""Turns that an opponent may take in one step, however few prompts the policy is given."""


class Mixture:
    """Whose turn it is: the one furthest behind its share, so that counts never stray from the shares by a batch."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        total = sum(weights.values())
        self.shares = {name: weight / total for name, weight in weights.items()}
        self.counts = dict.fromkeys(weights, 0)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def due(self) -> str:
        position = self.total + 1
        return max(self.shares, key=lambda name: self.shares[name] * position - self.counts[name])


class PromptSource:
    """The BatchSource of all entries of the config that give prompts."""

    def __init__(self, streams: Mapping[str, Stream], weights: Mapping[str, float], encoder: PromptEncoder) -> None:
        self.streams = streams
        self.mixture = Mixture(weights)
        self.encoder = encoder
        self.given = 0
        """Prompts so far, those for an opponent included."""
        self.dropped = 0
        """Prompts left out so far because they were empty or too long."""
        self._told = 0
        """Of those, how many record() has counted."""

    def next(self, n: int) -> list[Prompt]:
        prompts: list[Prompt] = []
        by_opponent = 0
        # Where every game waits for the opponent, asking for more would open new games without end.
        while len(prompts) - by_opponent < n and by_opponent < max(n, LEAST_BY_OPPONENT):
            prompts.append(self._next_prompt())
            by_opponent += prompts[-1].by_opponent
        return prompts

    def _next_prompt(self) -> Prompt:
        name = self.mixture.due()
        stream = self.streams[name]
        for _ in range(stream.patience):
            item = stream.take()
            prompt = self.encoder.encode(item, index=self.given, source=name)
            if prompt is not None:
                self.given += 1
                self.mixture.counts[name] += not prompt.by_opponent
                return prompt
            stream.reject(item)
            self.dropped += 1
        raise self.encoder.too_long(name, stream.patience)

    def record(self, groups: Sequence[Group]) -> Settled:
        parts: list[Settled] = []
        for name, stream in self.streams.items():
            places = [place for place, group in enumerate(groups) if group.prompt.source == name]
            one = stream.record([groups[place] for place in places])
            parts.append(replace(one, now=[places[place] for place in one.now]))
        settled = joined(parts)
        settled.metrics["prompts_dropped"] = float(self.dropped - self._told)
        self._told = self.dropped
        return settled

    def state_dict(self) -> dict[str, Any]:
        return {
            "streams": {name: stream.state_dict() for name, stream in self.streams.items()},
            "counts": dict(self.mixture.counts),
            "shares": self.mixture.shares,
            "given": self.given,
            "dropped": self.dropped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["counts"].keys() != self.mixture.counts.keys():
            raise EnvironmentSetupError(
                f"environments: the checkpoint has {', '.join(state['counts'])} and the config has "
                f"{', '.join(self.mixture.counts)}; an exact resume needs the same ones"
            )
        for name, stream in self.streams.items():
            stream.load_state_dict(state["streams"][name])
        if state["shares"] == self.mixture.shares:  # else: from now on, not back until what was given fits as well
            self.mixture.counts = dict(state["counts"])
        self.given = state["given"]
        self.dropped = self._told = state["dropped"]
