"""Policy-gradient objectives over packed tokens, each one composed once from its settings.

T = packed tokens of one micro-batch, S = completions in it. A loss returns a sum; the caller divides it by a count over
all ranks, so the gradient does not depend on how a minibatch is cut into micro-batches. All arithmetic is float32.

Per token:  policy * correction + kl.coef * k3, then one of two sums:
  completion mean (grpo, gspo): sum over completions of the mean over their trained tokens
  token sum (all others):       sum over trained tokens
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from colocated_grpo.config.losses import CISPOConfig, ClippedLoss, LossConfig, PolicyLoss
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
Ratio = Callable[[Tensor, LossInputs], Tensor]
"""(log_ratio_T, inputs) -> ratio_T, with grad."""
Surrogate = Callable[[Tensor, LossInputs], tuple[Tensor, dict[str, Tensor]]]
"""(ratio_T, inputs) -> policy loss per token, and where it was clipped (bool_T by metric name)."""
Penalty = Callable[[LossInputs, Tensor], tuple[Tensor, dict[str, Stat]]]
"""(inputs, share_T) -> penalty per token, and its metrics."""


def make_loss(config: LossConfig) -> LossFn:
    """Compose the objective that `config` describes.

    The returned function never waits for the device. Positions with loss_mask False contribute exactly zero to value
    and gradient. A NaN or infinity at a trained position, in any tensor that this objective reads, makes loss_sum and
    its gradient NaN. Metrics are means over trained tokens; loss/* of grpo and gspo are means over completions.
    """
    recipe = _RECIPES[config.type]
    surrogate, correction, penalty = recipe.surrogate(config), _make_correction(config), _make_penalty(config)
    behaviour = _sampling_logprobs if config.old_logprobs == "sampling" else _trainer_logprobs

    def loss(inputs: LossInputs) -> LossOutput:
        inputs = _trained_part(inputs)
        ratio_T = recipe.ratio(inputs.logprobs_T - behaviour(inputs), inputs)
        surrogate_T, clipped = surrogate(ratio_T, inputs)
        weight_T = correction(inputs)
        policy_T = surrogate_T * weight_T
        share_T = recipe.share(inputs)
        penalty_T, penalty_metrics = penalty(inputs, share_T)
        metrics = {
            "loss/policy": _mean(policy_T, share_T),
            "ratio": _mean(ratio_T, inputs.loss_mask_T),
            "correction/weight": _mean(weight_T, inputs.loss_mask_T),
            **{name: _mean(where_T, inputs.loss_mask_T) for name, where_T in clipped.items()},
            **penalty_metrics,
            **_mismatch(inputs),
        }
        loss_sum = _with_visible_failure(((policy_T + penalty_T) * share_T).sum(), inputs)
        return LossOutput(loss_sum=loss_sum, metrics=metrics)

    return loss


def make_denominator(config: LossConfig, max_completion_tokens: int) -> Callable[[Counts], float]:
    """What the loss sum of one minibatch, over all ranks, is divided by; at least 1."""
    denominator = _RECIPES[config.type].denominator
    return lambda counts: float(max(1.0, denominator(counts, max_completion_tokens)))


# Ratios and surrogates


def _trainer_logprobs(inputs: LossInputs) -> Tensor:
    return inputs.old_logprobs_T


def _sampling_logprobs(inputs: LossInputs) -> Tensor:
    return inputs.sampling_logprobs_T


def _token_ratio(log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
    return _exp(log_ratio_T)


def _sequence_ratio(log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
    """GSPO: exp of the mean log-ratio over the completion's trained tokens, with gradient to each of them."""
    mean_S = _sum_by_sequence(log_ratio_T, inputs) / _trained_tokens_S(inputs)
    return _exp(mean_S)[inputs.sequence_T]


def _make_clipped(config: ClippedLoss) -> Surrogate:
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


def _make_cispo(config: CISPOConfig) -> Surrogate:
    """REINFORCE weighted by the truncated ratio as a constant: no token loses its gradient."""

    def cispo(ratio_T: Tensor, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        weight_T = ratio_T.detach().clamp(max=config.clip_high)
        return -weight_T * inputs.advantages_T * inputs.logprobs_T, {"clip_fraction/high": ratio_T > config.clip_high}

    return cispo


# Difference between sampler and trainer; KL penalty


def _make_correction(config: PolicyLoss) -> Callable[[LossInputs], Tensor]:
    """Constant weight of each token's policy loss, from trainer / sampler at the start of the batch (TIS, MIS).

    1 where the ratio itself is taken against the sampler: it corrects already, and twice would be wrong. The KL penalty
    is not weighted, as in TRL.
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


def _mismatch(inputs: LossInputs) -> dict[str, Stat]:
    """How far sampler and trainer disagree, over trained tokens and before any truncation.

    kl: k3 estimate of KL(sampler || trainer). abs, max: |log difference|. outside: share of ratios outside [0.5, 2].
    ess: (sum w)^2 / (n * sum w^2) of the ratios w; 1 - ess is the share of samples that correction would waste.
    """
    mask_T, log_ratio_T = inputs.loss_mask_T, _log_mismatch(inputs)
    distance_T, weight_T = log_ratio_T.abs(), log_ratio_T.exp() * mask_T
    return {
        "mismatch/kl": _mean(_k3(log_ratio_T), mask_T),
        "mismatch/abs": _mean(distance_T, mask_T),
        "mismatch/max": Stat.max(distance_T.amax()),
        "mismatch/outside": _mean(distance_T > math.log(2), mask_T),
        "mismatch/ess": Stat.ess(weight_T.sum(), weight_T.square().sum(), mask_T.sum()),
    }


def _make_penalty(config: PolicyLoss) -> Penalty:
    """kl.coef times the k3 estimate of KL(policy || target), differentiated through the estimate itself, as in TRL."""
    coef = config.kl.coef
    if coef == 0:
        return lambda inputs, share_T: (torch.zeros_like(inputs.advantages_T), {})
    target = {"reference": _reference_logprobs, "rollout": _sampling_logprobs}[config.kl.target]

    def penalty(inputs: LossInputs, share_T: Tensor) -> tuple[Tensor, dict[str, Stat]]:
        kl_T = _k3(target(inputs) - inputs.logprobs_T)
        return coef * kl_T, {"kl": _mean(kl_T, inputs.loss_mask_T), "loss/kl": _mean(coef * kl_T, share_T)}

    return penalty


def _reference_logprobs(inputs: LossInputs) -> Tensor:
    if inputs.ref_logprobs_T is None:
        raise ValueError("kl.coef > 0 with kl.target=reference: this loss needs ref_logprobs_T")
    return inputs.ref_logprobs_T


# Shares of the sum


def _token_sum(inputs: LossInputs) -> Tensor:
    return inputs.loss_mask_T


def _completion_mean(inputs: LossInputs) -> Tensor:
    return inputs.loss_mask_T / _trained_tokens_S(inputs)[inputs.sequence_T]


def _trained_tokens_S(inputs: LossInputs) -> Tensor:
    """At least 1: a completion whose tokens are all masked has the mean 0, not NaN."""
    return _sum_by_sequence(inputs.loss_mask_T, inputs).clamp(min=1.0)


def _sum_by_sequence(values_T: Tensor, inputs: LossInputs) -> Tensor:
    return values_T.new_zeros(inputs.num_sequences).index_add(0, inputs.sequence_T, values_T)


# Denominators


def _sequences(counts: Counts, max_completion_tokens: int) -> float:
    return counts.sequences


def _token_slots(counts: Counts, max_completion_tokens: int) -> float:
    """Dr. GRPO: a constant per completion, so that no length is favoured; never the longest length seen."""
    return counts.sequences * max_completion_tokens


def _minibatch_tokens(counts: Counts, max_completion_tokens: int) -> float:
    return counts.tokens


def _mean_minibatch_tokens(counts: Counts, max_completion_tokens: int) -> float:
    """DAPO: the batch's tokens, spread evenly over its minibatches.

    Every token of a batch then weighs the same, whichever minibatch it falls into, and the size of an update does not
    shrink with the number of minibatches. TRL 1.16 does the same: it divides num_items_in_batch by the accumulation
    windows of a generation batch. BNPO divides by the minibatch's own tokens: equal to this with one minibatch.
    """
    return counts.batch_tokens / counts.minibatches


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    ratio: Ratio
    surrogate: Callable[..., Surrogate]
    share: Callable[[LossInputs], Tensor]
    """Weight of each token in the sum; zero at masked positions."""
    denominator: Callable[[Counts, int], float]


_RECIPES = {
    "grpo": _Recipe(ratio=_token_ratio, surrogate=_make_clipped, share=_completion_mean, denominator=_sequences),
    "dr_grpo": _Recipe(ratio=_token_ratio, surrogate=_make_clipped, share=_token_sum, denominator=_token_slots),
    "bnpo": _Recipe(ratio=_token_ratio, surrogate=_make_clipped, share=_token_sum, denominator=_minibatch_tokens),
    "dapo": _Recipe(ratio=_token_ratio, surrogate=_make_clipped, share=_token_sum, denominator=_mean_minibatch_tokens),
    "cispo": _Recipe(ratio=_token_ratio, surrogate=_make_cispo, share=_token_sum, denominator=_mean_minibatch_tokens),
    "gspo": _Recipe(ratio=_sequence_ratio, surrogate=_make_clipped, share=_completion_mean, denominator=_sequences),
}


# Numerics


def _trained_part(inputs: LossInputs) -> LossInputs:
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
    """exp, but NaN for an infinite argument: a log-probability of -inf would else pass as a ratio of 0 or of cap."""
    return log_ratio.exp() + log_ratio.detach() * 0.0


def _with_visible_failure(loss_sum: Tensor, inputs: LossInputs) -> Tensor:
    """loss_sum plus exact zeros, or NaN with NaN gradient where it is not finite.

    The backward of clamp and exp returns 0 at NaN and -inf: a gradient norm alone would not show such a loss.
    """
    return loss_sum + (inputs.logprobs_T * (loss_sum.detach() * 0.0)).sum()


def _k3(log_ratio_T: Tensor) -> Tensor:
    """exp(x) - x - 1, never negative; expm1 keeps the digits that exp(x) - 1 loses at the usual x of 1e-3."""
    return torch.expm1(log_ratio_T) - log_ratio_T


def _mean(values_T: Tensor, weights_T: Tensor) -> Stat:
    return Stat.mean((values_T.detach() * weights_T).sum(), weights_T.sum())
