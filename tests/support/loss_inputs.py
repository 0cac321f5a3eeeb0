"""Loss configurations and random inputs for tests of the objectives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from colocated_grpo.losses.inputs import LossInputs
from colocated_grpo.losses.objectives import make_loss
from colocated_grpo.settings.losses import (
    BNPOConfig,
    CISPOConfig,
    CorrectionConfig,
    DAPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    KLConfig,
    LossConfig,
)

ALL_LOSSES = [GRPOConfig, DrGRPOConfig, DAPOConfig, BNPOConfig, CISPOConfig, GSPOConfig]
BUSY_SETTINGS = [
    {"kl": KLConfig(coef=0.1), "correction": CorrectionConfig(level=level, mode=mode, cap=1.3, floor=floor)}
    for level in ("token", "sequence")
    for mode, floor in (("truncate", 0.0), ("mask", 0.7))
] + [{"kl": KLConfig(coef=0.1, target="rollout", estimator="k2"), "old_logprobs": "sampling"}]
"""Together these read every tensor: ratio, correction and both KL penalties."""


@dataclass(frozen=True, kw_only=True)
class Example(LossInputs):
    """Both arguments of a loss in one object, so that tests can replace any tensor by name."""

    logprobs_N: Tensor


def random_inputs(seed: int, lengths: list[int], spread: float = 0.3) -> Example:
    """Make off-policy tokens of completions of these lengths, about a quarter of them masked."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)

    def noise() -> Tensor:
        return spread * torch.randn(num_tokens, generator=generator)

    old_N = -2 * torch.rand(num_tokens, generator=generator)
    return Example(
        logprobs_N=(old_N + noise()).requires_grad_(),
        old_logprobs_N=old_N,
        sampling_logprobs_N=old_N + noise(),
        ref_logprobs_N=old_N + noise(),
        advantages_N=torch.randn(num_tokens, generator=generator),
        loss_mask_N=torch.rand(num_tokens, generator=generator) > 0.25,
        sequence_N=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        num_sequences=len(lengths),
    )


def loss_and_gradient(config: LossConfig, inputs: Example) -> tuple[Tensor, Tensor]:
    """Return the summed loss and its gradient with respect to the log-probabilities."""
    loss_sum = make_loss(config)(inputs.logprobs_N, inputs).loss_sum
    return loss_sum.detach(), torch.autograd.grad(loss_sum, inputs.logprobs_N)[0]
