"""What a loss reads and returns, as plain data. T = packed tokens of one micro-batch, S = completions in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from colocated_grpo.metrics import Stat


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """One micro-batch; position t holds the log-probability OF token t (already shifted)."""

    logprobs_T: Tensor
    """Current policy, with grad."""
    old_logprobs_T: Tensor | None
    """Trainer, before this batch's first update. None: on-policy, the current values stand in as constants."""
    sampling_logprobs_T: Tensor
    """From the engine, at the sampling temperature."""
    ref_logprobs_T: Tensor | None
    """Frozen reference; needed where kl.coef > 0 and kl.target is 'reference'."""
    advantages_T: Tensor
    loss_mask_T: Tensor
    """bool. Where False every other tensor may hold anything, NaN included."""
    sequence_T: Tensor
    """int64 index of the completion each token belongs to, 0..S-1, padding included. A completion is never split over
    micro-batches: its mean and its sequence ratio need all of its tokens."""
    num_sequences: int


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    loss_sum: Tensor
    """Scalar with grad; the caller divides it by `make_denominator(...)(counts)`."""
    metrics: dict[str, Stat]
    """Detached, on the device."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What one optimizer step averages over, summed over all ranks.

    Groups dropped for constant rewards are INCLUDED: their policy gradient is zero, so leaving them out of the forward
    pass then changes the cost of a step and not its gradient. So are completions without any trained token.
    """

    tokens: int
    """Trained (loss_mask True) tokens of the minibatch."""
    sequences: int
    """Completions of the minibatch."""
    batch_tokens: int
    """Trained tokens of the whole batch, all its minibatches together, one epoch."""
    minibatches: int
    """Optimizer steps per epoch over that batch."""


LossFn = Callable[[LossInputs], LossOutput]
SplitLoss = Callable[[LossInputs], Callable[[slice, Tensor], Tensor]]
"""(inputs whose logprobs_T is not read) -> ((tokens, their log-probabilities) -> their part of loss_sum)."""
