"""Inputs and outputs of a loss.

Shapes: N scored tokens of one micro-batch (the tokens that the policy sampled), S completions of the micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from colocated_grpo.metrics import Stat


def _unchanged(sums_S: Tensor) -> Tensor:
    return sums_S


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Constants that a loss compares the current log-probabilities with.

    Element n of every tensor belongs to the n-th scored token. Log-probabilities are those of this token itself.
    """

    sequence_N: Tensor
    """int64 index of each token's completion, 0..S-1. A completion is never split over micro-batches: its mean and its
    sequence ratio need all of its tokens. A micro-batch may be split over ranks (`sum_over_group`)."""
    num_sequences: int
    """S."""
    loss_mask_N: Tensor
    """bool. Where False, every other tensor may hold any value, NaN included."""
    advantages_N: Tensor
    sampling_logprobs_N: Tensor
    """From the engine, at the sampling temperature. NaN where the sampler gave none; replace NaN before the loss."""
    old_logprobs_N: Tensor | None = None
    """From the trainer, before this batch's first update. None: on-policy, and the detached current ones are used."""
    ref_logprobs_N: Tensor | None = None
    """From the frozen reference; required where kl.coef > 0 and kl.target is 'reference'. Packing fills in the values
    that environments give, and NaN for all other tokens. None if no environment gives values."""
    plain_N: Tensor | None = None
    """bool. True for plainly sampled tokens (see `Rollout.plain`). Their sampling and old log-probabilities differ only
    by rounding and by the optimizer steps since the tokens were sampled. None: not measured."""
    sum_over_group: Callable[[Tensor], Tensor] = _unchanged
    """All-reduces per-completion sums [S], forward and backward, over the ranks that hold the completions' tokens.
    Default: this rank holds all of them."""

    def tensors(self) -> dict[str, Any]:
        """Return the tensors by name, without those that are None."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name.endswith("_N")}
        return {name: value for name, value in values.items() if value is not None}

    def at(self, tokens: slice | Tensor) -> "LossInputs":
        """Return the inputs of a subset of the N tokens. Completions keep their index."""
        return replace(self, **{name: value[tokens] for name, value in self.tensors().items()})


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """Result of a loss on one micro-batch."""

    loss_sum: Tensor
    """Scalar with grad; the caller divides it by `make_denominator(...)(counts)`."""
    metrics: dict[str, Stat]
    """Detached, on the device."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Token and completion counts of one optimizer step, summed over all ranks.

    Groups dropped for constant rewards are INCLUDED: their policy gradient is zero, so dropping them from the forward
    pass changes the cost of a step and not its gradient. Completions without any trained token are included too.
    """

    tokens: int
    """Trained (loss_mask True) tokens of the minibatch."""
    sequences: int
    """Completions of the minibatch."""
    batch_tokens: int
    """Trained tokens of the whole batch, over all its minibatches, one epoch."""
    minibatches: int
    """Optimizer steps per epoch over the whole batch."""


LossFn = Callable[[Tensor, LossInputs], LossOutput]
"""(logprobs_N with grad, inputs) -> loss sum and metrics."""
ChunkedLoss = Callable[[LossInputs], Callable[[slice, Tensor], Tensor]]
"""(inputs) -> a function (token range, logprobs of that range) -> the range's part of loss_sum."""
