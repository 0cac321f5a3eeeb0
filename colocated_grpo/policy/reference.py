"""References of the KL penalty: a second model, or the policy's model merged with its initial adapter."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from colocated_grpo.policy.lora.weights import AdapterWeights
from colocated_grpo.policy.masters import Weights


class Reference(Protocol):
    """Weights that score batches for the KL penalty."""

    def scoring(self) -> AbstractContextManager[Weights]:
        """Return a context that yields the weights to score with. Collective; the policy must not train inside it."""


class ReferenceModel:
    """A second model, which stays in memory."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    @contextmanager
    def scoring(self) -> Generator[Weights]:
        yield self._weights


class InitialAdapter:
    """The policy's model with the adapter's values at the start of the run, merged while it scores.

    For a new adapter, which is zero at first, this is the base model.
    """

    def __init__(self, weights: AdapterWeights) -> None:
        """Call before a checkpoint is restored."""
        self._weights = weights
        self._factors = weights.nonzero_factors()

    @contextmanager
    def scoring(self) -> Generator[Weights]:
        with self._weights.with_factors(self._factors):
            yield self._weights
