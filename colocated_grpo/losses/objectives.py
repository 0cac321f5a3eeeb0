"""Policy-gradient objectives over packed tokens, each one composed once from its settings.

T = packed tokens of one micro-batch, S = completions in it. A loss returns a sum; the caller divides it by a count over
all ranks, so the gradient does not depend on how a minibatch is cut into micro-batches. All arithmetic is float32.

Per token:  policy * correction + kl.coef * k3, then one of two sums:
  completion mean (grpo, gspo): sum over completions of the mean over their trained tokens
  token sum (all others):       sum over trained tokens
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from colocated_grpo.config.losses import LossConfig
from colocated_grpo.losses import parts
from colocated_grpo.losses.inputs import Counts, LossFn, LossInputs, LossOutput, SplitLoss
from colocated_grpo.metrics import Stat


def make_loss(config: LossConfig) -> LossFn:
    """Compose the objective that `config` describes.

    The returned function never waits for the device. Positions with loss_mask False contribute exactly zero to value
    and gradient. A NaN or infinity at a trained position, in any tensor that this objective reads, makes loss_sum and
    its gradient NaN. Metrics are means over trained tokens; loss/* of grpo and gspo are means over completions.
    """
    recipe, terms = _RECIPES[config.type], _make_terms(config)

    def loss(inputs: LossInputs) -> LossOutput:
        inputs = parts.trained_part(inputs)
        share_T = recipe.share(inputs)
        found = terms(inputs, share_T)
        metrics = {
            "loss/policy": parts.mean(found.policy_T, share_T),
            "ratio": parts.mean(found.ratio_T, inputs.loss_mask_T),
            "correction/weight": parts.mean(found.weight_T, inputs.loss_mask_T),
            **{name: parts.mean(where_T, inputs.loss_mask_T) for name, where_T in found.clipped.items()},
            **found.penalty_metrics,
            **parts.mismatch(inputs),
        }
        return LossOutput(loss_sum=_total(found, share_T, inputs), metrics=metrics)

    return loss


def make_split_loss(config: LossConfig) -> SplitLoss | None:
    """The same loss_sum in parts, for a caller that never holds all log-probabilities at once.

    None where a token's loss depends on other tokens' log-probabilities: gspo, and corrections by completion.
    """
    recipe, terms = _RECIPES[config.type], _make_terms(config)
    by_completion = config.correction.level == "sequence" and config.correction.mode != "off"
    if recipe.ratio is parts.sequence_ratio or (by_completion and config.old_logprobs != "sampling"):
        return None

    def split(constants: LossInputs) -> Callable[[slice, Tensor], Tensor]:
        share_T = recipe.share(replace(constants, loss_mask_T=constants.loss_mask_T.float()))

        def part(tokens: slice, logprobs_C: Tensor) -> Tensor:
            inputs = parts.trained_part(_cut(constants, tokens, logprobs_C))
            return _total(terms(inputs, share_T[tokens]), share_T[tokens], inputs)

        return part

    return split


@dataclass(frozen=True, kw_only=True)
class _Terms:
    """Of each token, before its share of the sum."""

    ratio_T: Tensor
    weight_T: Tensor
    policy_T: Tensor
    penalty_T: Tensor
    clipped: dict[str, Tensor]
    penalty_metrics: dict[str, Stat]


def _make_terms(config: LossConfig) -> Callable[[LossInputs, Tensor], _Terms]:
    recipe = _RECIPES[config.type]
    surrogate, correction, penalty = recipe.surrogate(config), parts.make_correction(config), parts.make_penalty(config)
    behaviour = parts.sampling_logprobs if config.old_logprobs == "sampling" else parts.trainer_logprobs

    def terms(inputs: LossInputs, share_T: Tensor) -> _Terms:
        ratio_T = recipe.ratio(inputs.logprobs_T - behaviour(inputs), inputs)
        surrogate_T, clipped = surrogate(ratio_T, inputs)
        weight_T = correction(inputs)
        penalty_T, penalty_metrics = penalty(inputs, share_T)
        return _Terms(
            ratio_T=ratio_T,
            weight_T=weight_T,
            policy_T=surrogate_T * weight_T,
            penalty_T=penalty_T,
            clipped=clipped,
            penalty_metrics=penalty_metrics,
        )

    return terms


def _total(found: _Terms, share_T: Tensor, inputs: LossInputs) -> Tensor:
    return parts.with_visible_failure(((found.policy_T + found.penalty_T) * share_T).sum(), inputs)


def _cut(inputs: LossInputs, tokens: slice, logprobs_C: Tensor) -> LossInputs:
    old_T, ref_T = inputs.old_logprobs_T, inputs.ref_logprobs_T
    return replace(
        inputs,
        logprobs_T=logprobs_C,
        old_logprobs_T=None if old_T is None else old_T[tokens],
        sampling_logprobs_T=inputs.sampling_logprobs_T[tokens],
        ref_logprobs_T=None if ref_T is None else ref_T[tokens],
        advantages_T=inputs.advantages_T[tokens],
        loss_mask_T=inputs.loss_mask_T[tokens],
        sequence_T=inputs.sequence_T[tokens],
    )


def make_denominator(config: LossConfig, max_completion_tokens: int) -> Callable[[Counts], float]:
    """What the loss sum of one minibatch, over all ranks, is divided by; at least 1."""
    denominator = _RECIPES[config.type].denominator
    return lambda counts: float(max(1.0, denominator(counts, max_completion_tokens)))


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
    ratio: parts.Ratio
    surrogate: Callable[..., parts.Surrogate]
    share: Callable[[LossInputs], Tensor]
    """Weight of each token in the sum; zero at masked positions."""
    denominator: Callable[[Counts, int], float]


_RECIPES = {
    "grpo": _Recipe(
        ratio=parts.token_ratio, surrogate=parts.make_clipped, share=parts.completion_mean, denominator=_sequences
    ),
    "dr_grpo": _Recipe(
        ratio=parts.token_ratio, surrogate=parts.make_clipped, share=parts.token_sum, denominator=_token_slots
    ),
    "bnpo": _Recipe(
        ratio=parts.token_ratio, surrogate=parts.make_clipped, share=parts.token_sum, denominator=_minibatch_tokens
    ),
    "dapo": _Recipe(
        ratio=parts.token_ratio, surrogate=parts.make_clipped, share=parts.token_sum, denominator=_mean_minibatch_tokens
    ),
    "cispo": _Recipe(
        ratio=parts.token_ratio, surrogate=parts.make_cispo, share=parts.token_sum, denominator=_mean_minibatch_tokens
    ),
    "gspo": _Recipe(
        ratio=parts.sequence_ratio, surrogate=parts.make_clipped, share=parts.completion_mean, denominator=_sequences
    ),
}
