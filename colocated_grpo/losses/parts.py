"""Building blocks of the objectives: ratios, surrogates, corrections, KL penalties, token weights.

Shapes: N scored tokens of one micro-batch, S completions in it. Every function except `apply_mask` expects
log-probabilities and inputs that `apply_mask` has cleaned.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from colocated_grpo.losses.inputs import LossInputs
from colocated_grpo.metrics import Stat
from colocated_grpo.settings.losses import CISPOConfig, ClippedLoss, PolicyLoss

Ratio = Callable[[Tensor, LossInputs], Tensor]
"""(log_ratio_N, inputs) -> ratio_N, with grad."""
Surrogate = Callable[[Tensor, Tensor, LossInputs], tuple[Tensor, dict[str, Tensor]]]
"""(ratio_N, logprobs_N, inputs) -> policy loss per token, and where it was clipped (bool, [N], by metric name)."""
Penalty = Callable[[Tensor, LossInputs, Tensor], tuple[Tensor, dict[str, Stat]]]
"""(logprobs_N, inputs, weights_N) -> penalty per token, and its metrics."""
MAX_LOG_RATIO = 20.0
"""Upper bound of log-ratios. Above 88, exp is infinite in float32 and the gradient is NaN, even for a token whose
gradient the clip removes: a single stray token would end the run. A ratio of exp(20) = 5e8 no longer estimates
anything; a token above the bound has no gradient. Small ratios need no bound: exp goes to 0."""
SHORTEST_JUDGED = 16
"""For mismatch/worst, a completion with fewer tokens counts as one of this many tokens."""


# Ratios and surrogates


def trainer_logprobs(inputs: LossInputs) -> Tensor:
    """Return `old_logprobs_N`, which `apply_mask` has set."""
    assert inputs.old_logprobs_N is not None
    return inputs.old_logprobs_N


def sampling_logprobs(inputs: LossInputs) -> Tensor:
    return inputs.sampling_logprobs_N


def token_ratio(log_ratio_N: Tensor, inputs: LossInputs) -> Tensor:
    return _exp(log_ratio_N)


def sequence_ratio(log_ratio_N: Tensor, inputs: LossInputs) -> Tensor:
    """GSPO: exp of the mean log-ratio over the completion's trained tokens, with gradient to each of them."""
    mean_S = _sum_by_sequence(log_ratio_N, inputs) / _trained_tokens_S(inputs)
    return _exp(mean_S)[inputs.sequence_N]


def make_clipped(config: ClippedLoss) -> Surrogate:
    """Return PPO's clipped surrogate. dual_clip also bounds the ratio where the advantage is negative.

    The clip fractions count tokens that lost their gradient to a bound, not every ratio out of range.
    """
    low, high = 1 - config.clip_low, 1 + config.clip_high
    bound = math.inf if config.dual_clip is None else config.dual_clip

    def clipped(ratio_N: Tensor, logprobs_N: Tensor, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        advantages_N = inputs.advantages_N
        # `bound` lies above `high`, so `bound` matters only where the minimum takes the unclipped side: advantage < 0.
        surrogate_N = torch.minimum(ratio_N.clamp(max=bound) * advantages_N, ratio_N.clamp(low, high) * advantages_N)
        return -surrogate_N, {
            "clip_fraction/low": (ratio_N < low) & (advantages_N < 0),
            "clip_fraction/high": (ratio_N > torch.where(advantages_N < 0, bound, high)) & (advantages_N != 0),
        }

    return clipped


def make_cispo(config: CISPOConfig) -> Surrogate:
    """Return REINFORCE weighted by the truncated ratio. The weight is detached, so no token loses its gradient."""

    def cispo(ratio_N: Tensor, logprobs_N: Tensor, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        weight_N = ratio_N.detach().clamp(max=config.clip_high)
        return -weight_N * inputs.advantages_N * logprobs_N, {"clip_fraction/high": ratio_N > config.clip_high}

    return cispo


# Mismatch between sampler and trainer; KL penalty


def make_correction(config: PolicyLoss) -> Callable[[LossInputs], Tensor]:
    """Return a function that computes constant weights of the policy loss (TIS, MIS).

    A weight is the ratio trainer / sampler at the start of the batch. All weights are 1 if the correction is off. They
    are also 1 if the loss takes its ratio against the sampler, because that ratio already corrects the mismatch. The KL
    penalty is not weighted.
    """
    settings = config.correction
    if settings.mode == "off" or config.old_logprobs == "sampling":
        return lambda inputs: torch.ones_like(inputs.advantages_N)
    log_weight = {"token": _log_mismatch, "sequence": _log_mismatch_of_sequence}[settings.level]

    def truncated(inputs: LossInputs) -> Tensor:
        return _exp(log_weight(inputs)).clamp(max=settings.cap)

    def masked(inputs: LossInputs) -> Tensor:
        weight_N = _exp(log_weight(inputs))
        return weight_N.masked_fill((weight_N < settings.floor) | (weight_N > settings.cap), 0.0)

    return {"truncate": truncated, "mask": masked}[settings.mode]


def _log_mismatch(inputs: LossInputs) -> Tensor:
    """log(trainer / sampler) at the start of the batch; a constant."""
    return trainer_logprobs(inputs) - inputs.sampling_logprobs_N


def _log_mismatch_of_sequence(inputs: LossInputs) -> Tensor:
    return _sum_by_sequence(_log_mismatch(inputs), inputs)[inputs.sequence_N]


def mismatch(inputs: LossInputs) -> dict[str, Stat]:
    """Statistics of the sampler-trainer mismatch over trained tokens, before any truncation.

    kl: k3 estimate of KL(sampler || trainer). mean: mean of log(trainer / sampler), signed. abs, max: mean and maximum
    of |log(trainer / sampler)|. outside: fraction of ratios outside [0.5, 2].
    plain, worst: see `_plain_mismatch`. ess: (sum w)^2 / (n * sum w^2) of the ratios w; 1 - ess is the fraction of
    samples that correction would waste.
    """
    mask_N, log_ratio_N = inputs.loss_mask_N, _log_mismatch(inputs)
    distance_N, weight_N = log_ratio_N.abs(), log_ratio_N.exp() * mask_N
    metrics = {
        "mismatch/kl": weighted_mean(_k3(log_ratio_N), mask_N),
        "mismatch/mean": weighted_mean(log_ratio_N, mask_N),
        "mismatch/abs": weighted_mean(distance_N, mask_N),
        "mismatch/max": Stat.max(distance_N.amax()),
        "mismatch/outside": weighted_mean(distance_N > math.log(2), mask_N),
        "mismatch/ess": Stat.ess(weight_N.sum(), weight_N.square().sum(), mask_N.sum()),
    }
    return metrics if inputs.plain_N is None else metrics | _plain_mismatch(distance_N, inputs.plain_N, inputs)


def _plain_mismatch(distance_N: Tensor, plain_N: Tensor, inputs: LossInputs) -> dict[str, Stat]:
    """Statistics of |log(trainer / sampler)| that must stay small over plainly sampled tokens.

    plain: mean over all plainly sampled tokens. worst: the largest mean over these tokens of one completion. A
    completion counts as at least SHORTEST_JUDGED tokens, because one token may differ by a nat in 16 bits.
    """
    distance_N, plain_N = torch.where(plain_N, distance_N, 0.0), inputs.loss_mask_N * plain_N
    mean_S = _sum_by_sequence(distance_N, inputs) / _sum_by_sequence(plain_N, inputs).clamp(min=SHORTEST_JUDGED)
    return {"mismatch/plain": weighted_mean(distance_N, plain_N), "mismatch/worst": Stat.max(mean_S.amax())}


def logprobs_by_advantage(logprobs_N: Tensor, inputs: LossInputs) -> dict[str, Stat]:
    """Mean log-probabilities of tokens to reinforce (advantage > 0) and of tokens to suppress (advantage < 0)."""
    return {
        f"logprob/{name}": weighted_mean(logprobs_N, inputs.loss_mask_N * chosen_N)
        for name, chosen_N in (("positive", inputs.advantages_N > 0), ("negative", inputs.advantages_N < 0))
    }


def make_kl_penalty(config: PolicyLoss) -> Penalty:
    """kl.coef times an estimate of KL(policy || target), differentiated through the estimate itself.

    Over tokens sampled from the policy, k3 has the gradient of KL(target || policy) and k2 that of KL(policy || target)
    (arXiv 2510.01555). The metric `kl` is k3 in both cases: its mean is the KL, and the mean of k2 is not.
    """
    if (coef := config.kl.coef) == 0:
        return lambda logprobs_N, inputs, weights_N: (torch.zeros_like(inputs.advantages_N), {})
    target = {"reference": _reference_logprobs, "rollout": sampling_logprobs}[config.kl.target]
    estimate = {"k3": _k3, "k2": lambda log_ratio_N: log_ratio_N.square() / 2}[config.kl.estimator]

    def penalty(logprobs_N: Tensor, inputs: LossInputs, weights_N: Tensor) -> tuple[Tensor, dict[str, Stat]]:
        log_ratio_N = _clamped(target(inputs) - logprobs_N)
        penalty_N = coef * estimate(log_ratio_N)
        return penalty_N, {
            "kl": weighted_mean(_k3(log_ratio_N), inputs.loss_mask_N),
            "loss/kl": weighted_mean(penalty_N, weights_N),
        }

    return penalty


def _reference_logprobs(inputs: LossInputs) -> Tensor:
    if inputs.ref_logprobs_N is None:
        raise ValueError("kl.coef > 0 with kl.target=reference: this loss needs ref_logprobs_N")
    return inputs.ref_logprobs_N


# Weight of each token in the sum


def token_sum(inputs: LossInputs) -> Tensor:
    return inputs.loss_mask_N


def completion_mean(inputs: LossInputs) -> Tensor:
    return inputs.loss_mask_N / _trained_tokens_S(inputs)[inputs.sequence_N]


def _trained_tokens_S(inputs: LossInputs) -> Tensor:
    """Trained tokens of each completion, at least 1, so that a fully masked completion has mean 0 instead of NaN."""
    return _sum_by_sequence(inputs.loss_mask_N, inputs).clamp(min=1.0)


def _sum_by_sequence(values_N: Tensor, inputs: LossInputs) -> Tensor:
    return inputs.sum_over_group(values_N.new_zeros(inputs.num_sequences).index_add(0, inputs.sequence_N, values_N))


# Numerics


def apply_mask(logprobs_N: Tensor, inputs: LossInputs) -> tuple[Tensor, LossInputs]:
    """Return log-probabilities and inputs in float32, with constants detached and masked values set to 0.

    Masked values must be set to 0, because NaN times a mask of 0 would still be NaN. The returned inputs always have
    old_logprobs_N, and their loss_mask_N is 1.0 or 0.0.
    """
    mask_N = inputs.loss_mask_N

    def keep(values_N: Tensor) -> Tensor:
        return torch.where(mask_N, values_N.float(), 0.0)

    logprobs_N, ref_N, old_N = keep(logprobs_N), inputs.ref_logprobs_N, inputs.old_logprobs_N
    return logprobs_N, replace(
        inputs,
        loss_mask_N=mask_N.float(),
        advantages_N=keep(inputs.advantages_N.detach()),
        sampling_logprobs_N=keep(inputs.sampling_logprobs_N.detach()),
        old_logprobs_N=logprobs_N.detach() if old_N is None else keep(old_N.detach()),
        ref_logprobs_N=None if ref_N is None else keep(ref_N.detach()),
    )


def _exp(log_ratio: Tensor) -> Tensor:
    return _clamped(log_ratio).exp()


def _clamped(log_ratio: Tensor) -> Tensor:
    """Clamp to MAX_LOG_RATIO; infinite values become NaN, because a clamped infinity would look like a valid ratio."""
    return log_ratio.clamp(max=MAX_LOG_RATIO) + log_ratio.detach() * 0.0


def propagate_nan(loss_sum: Tensor, logprobs_N: Tensor) -> Tensor:
    """Return loss_sum, or NaN with a NaN gradient if loss_sum is not finite.

    The backward of clamp and exp returns 0 at NaN and -inf: the gradient norm alone would not reveal such a loss.
    """
    return loss_sum + (logprobs_N * (loss_sum.detach() * 0.0)).sum()


def _k3(log_ratio_N: Tensor) -> Tensor:
    """exp(x) - x - 1, never negative; expm1 keeps the digits that exp(x) - 1 loses where x is small."""
    return torch.expm1(log_ratio_N) - log_ratio_N


def weighted_mean(values_N: Tensor, weights_N: Tensor) -> Stat:
    return Stat.mean((values_N.detach() * weights_N).sum(), weights_N.sum())
