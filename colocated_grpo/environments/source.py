"""The source of training prompts: several environments mixed by weight, with a position that can be saved exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from colocated_grpo.environments.base import BatchResult, EnvironmentSetupError, merge_results
from colocated_grpo.environments.prompts import PromptEncoder
from colocated_grpo.environments.streams import ItemStream
from colocated_grpo.types import Group, JsonObject, Prompt

MIN_OPPONENT_LIMIT = 16
"""Lower bound on the maximum opponent turns per step, for small batches."""


class Mixture:
    """Deterministic mixing by weight: the next name is the one furthest below its fraction of the total count."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        total = sum(weights.values())
        self.fractions = {name: weight / total for name, weight in weights.items()}
        self.counts = dict.fromkeys(weights, 0)

    def next_name(self) -> str:
        position = sum(self.counts.values()) + 1
        return max(self.fractions, key=lambda name: self.fractions[name] * position - self.counts[name])


class PromptSource:
    """The BatchSource over all environments that yield prompts."""

    def __init__(self, streams: Mapping[str, ItemStream], weights: Mapping[str, float], encoder: PromptEncoder) -> None:
        self.streams = streams
        self.mixture = Mixture(weights)
        self.encoder = encoder
        self.num_prompts = 0
        """Prompts returned so far, those for an opponent included."""
        self.num_dropped = 0
        """Items skipped so far because their prompt was empty or too long."""
        self._num_dropped_reported = 0

    def next(self, n: int) -> list[Prompt]:
        prompts: list[Prompt] = []
        by_opponent = 0
        # If every open game awaits the opponent, each further turn would start another game: hence the limit.
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
            "shares": self.mixture.fractions,
            "given": self.num_prompts,
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
        # After a change of weights, counts start at 0: the old ones would make the mixture compensate for past prompts.
        if state["shares"] == self.mixture.fractions:
            self.mixture.counts = dict(state["counts"])
        self.num_prompts = state["given"]
        self.num_dropped = self._num_dropped_reported = state["dropped"]
