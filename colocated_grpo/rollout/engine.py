"""The inference engine as the trainer uses it: plain data in and out, no vLLM types."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor, nn

from colocated_grpo.settings.generation import RepetitionDetectionConfig
from colocated_grpo.types import Completion

Part = Literal["weights", "kv_cache"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling settings of a request. Temperature 0 is greedy."""

    temperature: float
    max_tokens: int
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    repetition_detection: RepetitionDetectionConfig | None = None
    """Ends a completion whose last tokens are `min_count` equal patterns of at most `max_pattern_size` tokens."""


def only_temperature(settings: Any) -> bool:
    """True if none of these settings, `Sampling` or vLLM's, changes the model's distribution beside the temperature."""
    return (settings.top_p, settings.top_k, settings.min_p, settings.repetition_penalty) == (1.0, 0, 0.0, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One completion to sample. The completion is returned under `key`."""

    key: Hashable
    """Unique among running requests."""
    token_ids: list[int]
    seed: int
    """Derived from (run seed, step, prompt, sibling, turn), so the completion does not depend on the serving rank."""
    sampling: Sampling
    pattern: str | None = None
    """Regular expression for the whole completion. Log-probabilities are then normalised over the allowed tokens."""
    stream: bool = False
    """Deliver tokens as they are sampled, through `RolloutEngine.deltas`. False: nothing before completion."""
    routes: bool = False
    """Return the chosen experts with the completion. Only engines built with policy.routing_replay can return them."""


class TokenDelta(NamedTuple):
    """The next tokens of a running completion."""

    token_ids: list[int]
    sampling_logprobs: list[float]


Finished = list[tuple[Hashable, Completion]]


class RolloutEngine(Protocol):
    """An engine. Under tensor parallelism, all ranks of the engine make the same calls in the same order."""

    max_num_seqs: int
    """Completions that decode together."""
    admission_cost: int
    """Cost of admitting requests, in steps lost by each running request."""

    def submit(self, requests: Iterable[Request]) -> None:
        """Raises ValueError for a request that the engine cannot serve."""

    def step(self) -> Finished:
        """Decode a few tokens of every running request, at least one. Returns the finished requests."""

    def deltas(self) -> list[tuple[Hashable, TokenDelta]]:
        """Tokens that the last step added to running requests with `stream`.

        Calling it is optional: a completion contains all of its tokens.
        """
        return []

    def abort(self, keys: Collection[Hashable] | None = None) -> None:
        """Abort the running requests with these keys, or all running requests if None. Unknown keys are ignored."""

    def top_logprobs(self, token_ids: Sequence[int], k: int) -> list[dict[int, float]]:
        """Return log-probabilities at temperature 1 for each of token_ids[1:]: the token's own, then the `k` highest.

        No request may be running. Raises ValueError for unknown tokens and for a `k` above the engine's limit.
        """

    def weights_changed(self, policy_version: int) -> None:
        """Drop cached prefixes of the old weights and stamp later completions with `policy_version`."""

    def wake(self, part: Part) -> None:
        """Map the device memory of `part`. Weights are undefined until written, unless the engine keeps them."""
        return

    def sleep(self) -> None:
        """Release the device memory of the KV cache, and of the weights unless they must outlive the phase."""
        return

    def close(self) -> None: ...


class LocalEngine(RolloutEngine, Protocol):
    """An engine in this process, whose weights this process writes."""

    transforms_weights: bool
    """True if only `load_weights` can write the engine's weights, because they change layout or type after loading.

    Examples are most quantizations, experts on the CPU, and latent attention.
    """
    is_quantized: bool
    """True if weights or KV cache have 8 bits or fewer."""

    @property
    def model(self) -> nn.Module:
        """The module that holds the engine's weights on this rank."""

    @property
    def tensor_parallel_rank(self) -> int: ...

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Replace the weights of whole layers from full tensors by checkpoint name. Slow; correct for every model."""

    def sampled(self) -> Finished:
        """Return what running requests without stop strings have sampled so far. They go on.

        finish_reason is 'abort'. Requests that have no token yet are left out.
        """

    def asleep_bytes(self) -> int:
        """Device memory of this process that `wake` would map; 0 for an engine that never sleeps."""

    def stay_awake(self) -> None:
        """Map all memory, and ignore `wake` and `sleep` from now on."""
