"""The parts that objectives are composed of: ratios, surrogates, corrections, penalties, shares of the sum.

Every function takes inputs that `trained_part` has cleaned, except `trained_part` itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from colocated_grpo.config.losses import CISPOConfig, ClippedLoss, PolicyLoss
from colocated_grpo.losses.inputs import LossInputs
from colocated_grpo.metrics import Stat

Ratio = Callable[[Tensor, LossInputs], Tensor]
"""(log_ratio_T, inputs) -> ratio_T, with grad."""
Surrogate = Callable[[Tensor, LossInputs], tuple[Tensor, dict[str, Tensor]]]
"""(ratio_T, inputs) -> policy loss per token, and where it was clipped (bool_T by metric name)."""
Penalty = Callable[[LossInputs, Tensor], tuple[Tensor, dict[str, Stat]]]
"""(inputs, share_T) -> penalty per token, and its metrics."""
FURTHEST = 20.0
"""Largest log-ratio that is told from larger ones. Above 88 exp is infinite in float32, and the gradient NaN even of a
token that the clip leaves without one: a single stray token would end the run. A ratio of exp(20), 5e8, is no longer an
estimate of anything; beyond it a token has no gradient. Small ratios need no bound: their exp ends at 0."""


# Ratios and surrogates


def trainer_logprobs(inputs: LossInputs) -> Tensor:
    return inputs.old_logprobs_T


def sampling_logprobs(inputs: LossInputs) -> Tensor:
    return inputs.sampling_logprobs_T


def token_ratio(log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
    return _exp(log_ratio_T)


def sequence_ratio(log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
    """GSPO: exp of the mean log-ratio over the completion's trained tokens, with gradient to each of them."""
    mean_S = _sum_by_sequence(log_ratio_T, inputs) / _trained_tokens_S(inputs)
    return _exp(mean_S)[inputs.sequence_T]


def make_clipped(config: ClippedLoss) -> Surrogate:
    """PPO's pessimistic minimum; with dual_clip the ratio's pull is bounded where the advantage is negative as well.

    The clip fractions count tokens that lost their gradient to a bound, not every ratio out of range.
    """
    low, high = 1 - config.clip_low, 1 + config.clip_high
    bound = math.inf if config.dual_clip is None else config.dual_clip

    def clipped(ratio_T: Tensor, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        advantages_T = inputs.advantages_T
        # `bound` lies above `high`, so that it decides only where the minimum is on the unclipped side: advantage < 0.
        surrogate_T = torch.minimum(ratio_T.clamp(max=bound) * advantages_T, ratio_T.clamp(low, high) * advantages_T)
        return -surrogate_T, {
            "clip_fraction/low": (ratio_T < low) & (advantages_T < 0),
            "clip_fraction/high": (ratio_T > torch.where(advantages_T < 0, bound, high)) & (advantages_T != 0),
        }

    return clipped


def make_cispo(config: CISPOConfig) -> Surrogate:
    """REINFORCE weighted by the truncated ratio as a constant: no token loses its gradient."""

    def cispo(ratio_T: Tensor, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        weight_T = ratio_T.detach().clamp(max=config.clip_high)
        return -weight_T * inputs.advantages_T * inputs.logprobs_T, {"clip_fraction/high": ratio_T > config.clip_high}

    return cispo


# Difference between sampler and trainer; KL penalty


def make_correction(config: PolicyLoss) -> Callable[[LossInputs], Tensor]:
    """Constant weight of each token's policy loss, from trainer / sampler at the start of the batch (TIS, MIS).

    1 where the ratio itself is taken against the sampler: it corrects already, and twice would be wrong. The KL penalty
    is not weighted.
    """
    settings = config.correction
    if settings.mode == "off" or config.old_logprobs == "sampling":
        return lambda inputs: torch.ones_like(inputs.advantages_T)
    log_weight = {"token": _log_mismatch, "sequence": _log_mismatch_of_sequence}[settings.level]

    def truncated(inputs: LossInputs) -> Tensor:
        return _exp(log_weight(inputs)).clamp(max=settings.cap)

    def masked(inputs: LossInputs) -> Tensor:
        weight_T = _exp(log_weight(inputs))
        return weight_T.masked_fill((weight_T < settings.floor) | (weight_T > settings.cap), 0.0)

    return {"truncate": truncated, "mask": masked}[settings.mode]


def _log_mismatch(inputs: LossInputs) -> Tensor:
    """log(trainer / sampler) at the start of the batch; a constant."""
    return inputs.old_logprobs_T - inputs.sampling_logprobs_T


def _log_mismatch_of_sequence(inputs: LossInputs) -> Tensor:
    return _sum_by_sequence(_log_mismatch(inputs), inputs)[inputs.sequence_T]


def mismatch(inputs: LossInputs) -> dict[str, Stat]:
    """How far sampler and trainer disagree, over trained tokens and before any truncation.

    kl: k3 estimate of KL(sampler || trainer). abs, max: |log difference|. outside: share of ratios outside [0.5, 2].
    ess: (sum w)^2 / (n * sum w^2) of the ratios w; 1 - ess is the share of samples that correction would waste.
    """
    mask_T, log_ratio_T = inputs.loss_mask_T, _log_mismatch(inputs)
    distance_T, weight_T = log_ratio_T.abs(), log_ratio_T.exp() * mask_T
    return {
        "mismatch/kl": mean(_k3(log_ratio_T), mask_T),
        "mismatch/abs": mean(distance_T, mask_T),
        "mismatch/max": Stat.max(distance_T.amax()),
        "mismatch/outside": mean(distance_T > math.log(2), mask_T),
        "mismatch/ess": Stat.ess(weight_T.sum(), weight_T.square().sum(), mask_T.sum()),
    }


def make_penalty(config: PolicyLoss) -> Penalty:
    """kl.coef times the k3 estimate of KL(policy || target), differentiated through the estimate itself."""
    coef = config.kl.coef
    if coef == 0:
        return lambda inputs, share_T: (torch.zeros_like(inputs.advantages_T), {})
    target = {"reference": _reference_logprobs, "rollout": sampling_logprobs}[config.kl.target]

    def penalty(inputs: LossInputs, share_T: Tensor) -> tuple[Tensor, dict[str, Stat]]:
        kl_T = _k3(_bounded(target(inputs) - inputs.logprobs_T))
        return coef * kl_T, {"kl": mean(kl_T, inputs.loss_mask_T), "loss/kl": mean(coef * kl_T, share_T)}

    return penalty


def _reference_logprobs(inputs: LossInputs) -> Tensor:
    if inputs.ref_logprobs_T is None:
        raise ValueError("kl.coef > 0 with kl.target=reference: this loss needs ref_logprobs_T")
    return inputs.ref_logprobs_T


# Shares of the sum


def token_sum(inputs: LossInputs) -> Tensor:
    return inputs.loss_mask_T


def completion_mean(inputs: LossInputs) -> Tensor:
    return inputs.loss_mask_T / _trained_tokens_S(inputs)[inputs.sequence_T]


def _trained_tokens_S(inputs: LossInputs) -> Tensor:
    """At least 1: a completion whose tokens are all masked has the mean 0, not NaN."""
    return _sum_by_sequence(inputs.loss_mask_T, inputs).clamp(min=1.0)


def _sum_by_sequence(values_T: Tensor, inputs: LossInputs) -> Tensor:
    return values_T.new_zeros(inputs.num_sequences).index_add(0, inputs.sequence_T, values_T)


# Numerics


def trained_part(inputs: LossInputs) -> LossInputs:
    """Float32, constants detached, zero outside the mask: masked garbage must not reach an exp, whose NaN survives * 0.

    old_logprobs_T is always set in the result, and loss_mask_T is 1.0 or 0.0.
    """
    mask_T = inputs.loss_mask_T

    def keep(values_T: Tensor) -> Tensor:
        return torch.where(mask_T, values_T.float(), 0.0)

    logprobs_T, ref_T, old_T = keep(inputs.logprobs_T), inputs.ref_logprobs_T, inputs.old_logprobs_T
    return replace(
        inputs,
        logprobs_T=logprobs_T,
        old_logprobs_T=logprobs_T.detach() if old_T is None else keep(old_T.detach()),
        sampling_logprobs_T=keep(inputs.sampling_logprobs_T.detach()),
        ref_logprobs_T=None if ref_T is None else keep(ref_T.detach()),
        advantages_T=keep(inputs.advantages_T.detach()),
        loss_mask_T=mask_T.float(),
    )


def _exp(log_ratio: Tensor) -> Tensor:
    return _bounded(log_ratio).exp()


def _bounded(log_ratio: Tensor) -> Tensor:
    """At most FURTHEST, but NaN where infinite: a log-probability of -inf would else pass as a ratio of 0 or of cap."""
    return log_ratio.clamp(max=FURTHEST) + log_ratio.detach() * 0.0


def with_visible_failure(loss_sum: Tensor, inputs: LossInputs) -> Tensor:
    """loss_sum plus exact zeros, or NaN with NaN gradient where it is not finite.

    The backward of clamp and exp returns 0 at NaN and -inf: a gradient norm alone would not show such a loss.
    """
    return loss_sum + (inputs.logprobs_T * (loss_sum.detach() * 0.0)).sum()


def _k3(log_ratio_T: Tensor) -> Tensor:
    """exp(x) - x - 1, never negative; expm1 keeps the digits that exp(x) - 1 loses where x is small."""
    return torch.expm1(log_ratio_T) - log_ratio_T


def mean(values_T: Tensor, weights_T: Tensor) -> Stat:
    return Stat.mean((values_T.detach() * weights_T).sum(), weights_T.sum())
