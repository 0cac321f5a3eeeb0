"""What the loop asks of an inference engine. Plain data in and out; no vllm here."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from colocated_grpo.types import Completion

Part = Literal["weights", "kv_cache"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How completions are drawn. Temperature 0 is greedy."""

    temperature: float
    max_tokens: int
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One completion to sample. `key` comes back with it."""

    key: Hashable
    """Different from those of all other requests under way."""
    token_ids: list[int]
    seed: int
    """Derived from (run seed, step, prompt, sibling, turn): the same completion whichever rank serves it."""
    sampling: Sampling
    pattern: str | None = None
    """Regular expression of the whole completion. Its log-probabilities are then over what the pattern allows."""
    stream: bool = False
    """Whether somebody listens to its pieces; what nobody listens to costs nothing until it has ended."""


class Piece(NamedTuple):
    """The next tokens of a completion that is under way."""

    token_ids: list[int]
    sampling_logprobs: list[float]


class RolloutEngine(Protocol):
    """An engine in this process. With tensor parallelism its ranks make the same calls in the same order."""

    max_num_seqs: int

    def submit(self, requests: Iterable[Request]) -> None: ...

    def step(self) -> list[tuple[Hashable, Completion]]:
        """Decode one token for every running request; returns those that finished."""
        ...

    def pieces(self) -> list[tuple[Hashable, Piece]]:
        """What the last step added to running requests that stream. An engine may give none: completions are whole."""
        ...

    def abort(self, keys: Collection[Hashable] | None = None) -> None:
        """Give up the running requests with these keys, by default all. Keys that are not running are passed over."""
        ...

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of token_ids[1:], each given the tokens before it, at temperature 1."""
        ...

    def top_logprobs(self, token_ids: Sequence[int], k: int) -> list[dict[int, float]]:
        """For each of token_ids[1:] the `k` likeliest tokens and itself, itself first. Only while nothing else runs.

        At temperature 1. Raises ValueError for tokens or a `k` that the engine does not know.
        """
        ...

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Replace every weight from full tensors under checkpoint names; slow and always right."""
        ...

    def weights_changed(self, policy_version: int) -> None:
        """Forget what was computed with the old weights; completions carry `policy_version` from now on."""
        ...

    def wake(self, part: Part) -> None:
        """Map the memory of `part` again. Woken weights hold garbage unless they were kept."""
        ...

    def sleep(self) -> None: ...

    def close(self) -> None: ...
