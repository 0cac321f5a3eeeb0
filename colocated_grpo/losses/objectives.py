"""Policy-gradient objectives over packed tokens, each composed once from its settings.

Shapes: N scored tokens of one micro-batch, C tokens of one chunk of them. A loss returns a sum. The caller divides the
sum by a count over all ranks, so the gradient does not depend on how a minibatch is split into micro-batches. All
arithmetic is float32.

Per token:  policy * correction + kl.coef * k3, then one of two sums:
  completion mean (grpo, gspo): sum over completions of the mean over their trained tokens
  token sum (all others):       sum over trained tokens
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from colocated_grpo.losses import parts
from colocated_grpo.losses.inputs import ChunkedLoss, Counts, LossFn, LossInputs, LossOutput
from colocated_grpo.metrics import Stat
from colocated_grpo.settings.losses import LossConfig


def make_loss(config: LossConfig) -> LossFn:
    """Compose the objective that `config` describes.

    The returned function never synchronizes with the device. Positions with loss_mask False contribute exactly zero to
    value and gradient. A NaN or infinity at a trained position, in any tensor that this objective reads, makes loss_sum
    and its gradient NaN. Metrics are means over trained tokens; loss/* of grpo and gspo are means over completions.
    """
    recipe, make_terms = _RECIPES[config.type], _compose_terms(config)

    def loss(logprobs_N: Tensor, inputs: LossInputs) -> LossOutput:
        logprobs_N, inputs = parts.apply_mask(logprobs_N, inputs)
        weights_N = recipe.token_weights(inputs)
        terms = make_terms(logprobs_N, inputs, weights_N)
        metrics = {
            "loss/policy": parts.weighted_mean(terms.policy_N, weights_N),
            "ratio": parts.weighted_mean(terms.ratio_N, inputs.loss_mask_N),
            "correction/weight": parts.weighted_mean(terms.correction_N, inputs.loss_mask_N),
            **{name: parts.weighted_mean(where_N, inputs.loss_mask_N) for name, where_N in terms.clipped.items()},
            **terms.penalty_metrics,
            **parts.logprobs_by_advantage(logprobs_N, inputs),
            **parts.mismatch(inputs),
        }
        return LossOutput(loss_sum=_weighted_sum(terms, weights_N, logprobs_N), metrics=metrics)

    return loss


def make_chunked_loss(config: LossConfig) -> ChunkedLoss | None:
    """Compose the loss_sum of `make_loss` for callers that compute it chunk by chunk.

    Returns None if a token's loss depends on other tokens' log-probabilities: gspo, and corrections at sequence level.
    """
    recipe, make_terms = _RECIPES[config.type], _compose_terms(config)
    by_completion = config.correction.level == "sequence" and config.correction.mode != "off"
    if recipe.ratio is parts.sequence_ratio or (by_completion and config.old_logprobs != "sampling"):
        return None

    def over_chunks(inputs: LossInputs) -> Callable[[slice, Tensor], Tensor]:
        weights_N = recipe.token_weights(replace(inputs, loss_mask_N=inputs.loss_mask_N.float()))

        def chunk_loss(tokens: slice, logprobs_C: Tensor) -> Tensor:
            logprobs_C, chunk = parts.apply_mask(logprobs_C, inputs.at(tokens))
            weights_C = weights_N[tokens]
            return _weighted_sum(make_terms(logprobs_C, chunk, weights_C), weights_C, logprobs_C)

        return chunk_loss

    return over_chunks


@dataclass(frozen=True, kw_only=True)
class _Terms:
    """Terms of each token's loss, before they are weighted and summed."""

    ratio_N: Tensor
    correction_N: Tensor
    policy_N: Tensor
    penalty_N: Tensor
    clipped: dict[str, Tensor]
    penalty_metrics: dict[str, Stat]


def _compose_terms(config: LossConfig) -> Callable[[Tensor, LossInputs, Tensor], _Terms]:
    recipe = _RECIPES[config.type]
    surrogate = recipe.surrogate(config)
    correction, penalty = parts.make_correction(config), parts.make_kl_penalty(config)
    behaviour = parts.sampling_logprobs if config.old_logprobs == "sampling" else parts.trainer_logprobs

    def make_terms(logprobs_N: Tensor, inputs: LossInputs, weights_N: Tensor) -> _Terms:
        ratio_N = recipe.ratio(logprobs_N - behaviour(inputs), inputs)
        surrogate_N, clipped = surrogate(ratio_N, logprobs_N, inputs)
        correction_N = correction(inputs)
        penalty_N, penalty_metrics = penalty(logprobs_N, inputs, weights_N)
        return _Terms(
            ratio_N=ratio_N,
            correction_N=correction_N,
            policy_N=surrogate_N * correction_N,
            penalty_N=penalty_N,
            clipped=clipped,
            penalty_metrics=penalty_metrics,
        )

    return make_terms


def _weighted_sum(terms: _Terms, weights_N: Tensor, logprobs_N: Tensor) -> Tensor:
    return parts.propagate_nan(((terms.policy_N + terms.penalty_N) * weights_N).sum(), logprobs_N)


def make_denominator(config: LossConfig, max_completion_tokens: int) -> Callable[[Counts], float]:
    """Return the divisor of a minibatch's loss sum over all ranks; at least 1."""
    denominator = _RECIPES[config.type].denominator
    return lambda counts: float(max(1.0, denominator(counts, max_completion_tokens)))


# Denominators


def _sequences(counts: Counts, max_completion_tokens: int) -> float:
    return counts.sequences


def _max_tokens(counts: Counts, max_completion_tokens: int) -> float:
    """Dr. GRPO: a constant for each completion. Dividing by the longest sampled length would favour some lengths."""
    return counts.sequences * max_completion_tokens


def _mean_minibatch_tokens(counts: Counts, max_completion_tokens: int) -> float:
    """DAPO: the batch's tokens, spread evenly over its minibatches.

    Every token of a batch then weighs the same, whichever minibatch it falls into, and the size of an update does not
    shrink with the number of minibatches. TRL 1.16 does the same: it divides num_items_in_batch by the accumulation
    windows of a generation batch.
    """
    return counts.batch_tokens / counts.minibatches


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    denominator: Callable[[Counts, int], float]
    ratio: parts.Ratio = parts.token_ratio
    surrogate: Callable[..., parts.Surrogate] = parts.make_clipped
    """Called with the objective's own config."""
    token_weights: Callable[[LossInputs], Tensor] = parts.token_sum
    """Weight of each token in the sum; zero at masked positions."""


_RECIPES = {
    "grpo": _Recipe(denominator=_sequences, token_weights=parts.completion_mean),
    "dr_grpo": _Recipe(denominator=_max_tokens),
    "bnpo": _Recipe(denominator=lambda counts, _: counts.tokens),
    "dapo": _Recipe(denominator=_mean_minibatch_tokens),
    "cispo": _Recipe(denominator=_mean_minibatch_tokens, surrogate=parts.make_cispo),
    "gspo": _Recipe(denominator=_sequences, token_weights=parts.completion_mean, ratio=parts.sequence_ratio),
}
