"""Settings of advantages and of the loss. Each loss has a model of its own, selected by `type`."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from colocated_grpo.settings.base import InputFile, Number, Section


class AdvantageConfig(Section):
    """Advantage of a completion: its reward minus a baseline of its group, scaled."""

    scale: Literal["group", "batch", "none"] = "group"
    """Divisor of reward - baseline. group: the standard deviation of the group's rewards (GRPO). batch: the standard
    deviation of all rewards of the step. none: 1 (Dr. GRPO). With delayed game returns use batch or none: group would
    amplify a single return in a group of otherwise equal rewards."""
    leave_one_out: bool = False
    """Baseline: the mean reward of the group's other completions (RLOO). false: the mean of the whole group."""
    eps: Number = Field(1e-4, gt=0)
    """Added to the standard deviation, so that nearly equal rewards do not give huge advantages."""


class CorrectionConfig(Section):
    """Importance weights that correct for the difference between engine and trainer.

    ratio = trainer probability / engine probability, before the batch's first update. Rounding makes the ratio differ
    from 1, and so does staleness if a rollout was sampled with older weights. The weight multiplies the policy loss,
    not the KL penalty.
    """

    level: Literal["token", "sequence"] = "token"
    """token: one ratio per token. sequence: one ratio per completion, the product over its tokens."""
    mode: Literal["truncate", "mask", "off"] = "truncate"
    """truncate (TIS): weight = min(ratio, cap). mask (MIS): weight = ratio inside [floor, cap], else 0. off: weight =
    1, but the mismatch is still logged (mismatch/*)."""
    cap: Number = Field(2.0, gt=1)
    """Upper bound of the ratio."""
    floor: Number = Field(0.0, ge=0, lt=1)
    """Lower bound of the ratio, with mode: mask only."""

    @model_validator(mode="after")
    def _only_masks_have_a_floor(self) -> Self:
        if self.floor and self.mode != "mask":
            raise ValueError(f"floor={self.floor:g}: only mode: mask has a lower bound")
        return self


class KLConfig(Section):
    """KL penalty: coef times an estimate of KL(policy || target), added to the loss of each token."""

    coef: Number = Field(0.0, ge=0)
    """Weight of the penalty. 0: no penalty and no reference model, and groups of equal rewards can be skipped
    (batch.drop_constant_groups)."""
    target: Literal["reference", "rollout"] = "reference"
    """reference: a frozen model, evaluated on every batch. rollout: the policy that sampled; needs no second model."""
    model: InputFile | None = None
    """Folder or Hugging Face name of the reference, such as a teacher with the policy's vocabulary
    (docs/guides/distillation.md). null: the model that the run starts from."""
    estimator: Literal["k3", "k2"] = "k3"
    """With d = log(target / policy): k3 is exp(d) - d - 1, k2 is d * d / 2. The gradient of k2, on samples of the
    policy, is the gradient of KL(policy || target). The gradient of k3 is that of KL(target || policy)."""

    @property
    def has_reference(self) -> bool:
        return self.coef > 0 and self.target == "reference"

    @model_validator(mode="after")
    def _model_is_the_reference(self) -> Self:
        if self.model is not None and not self.has_reference:
            raise ValueError(f"model={self.model!r}: has no effect; set coef above 0, and target: reference")
        return self


class PolicyLoss(Section):
    """Settings of every policy-gradient loss."""

    correction: CorrectionConfig = CorrectionConfig()
    """Correction of engine-trainer mismatch and of staleness."""
    kl: KLConfig = KLConfig()
    """KL penalty."""
    old_logprobs: Literal["trainer", "sampling"] = "trainer"
    """Denominator of the policy ratio. trainer: log-probabilities that the trainer recomputes before the batch's first
    update; with a single update per batch, this costs nothing. sampling: the engine's log-probabilities; the ratio then
    includes the engine-trainer mismatch, and `correction` is not applied."""


class ClippedLoss(PolicyLoss):
    """PPO's clipped surrogate: the minimum of ratio * advantage and clamp(ratio) * advantage."""

    clip_low: Number = Field(0.2, gt=0)
    """The ratio is clamped to >= 1 - clip_low. A token with a lower ratio and a negative advantage has no gradient."""
    clip_high: Number = Field(0.2, gt=0)
    """The ratio is clamped to <= 1 + clip_high. A token with a higher one and a positive advantage has no gradient."""
    dual_clip: Number | None = Field(None, gt=1)
    """Upper bound of the ratio for tokens with a negative advantage (dual-clip PPO). Must exceed 1 + clip_high. null:
    no bound, as in PPO."""

    @model_validator(mode="after")
    def _dual_clip_exceeds_the_clip_range(self) -> Self:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(f"dual_clip={self.dual_clip:g}: must be greater than 1 + clip_high={1 + self.clip_high:g}")
        return self


class GRPOConfig(ClippedLoss):
    """Mean over each completion's tokens, then over completions (DeepSeekMath, arXiv 2402.03300).

    A token of a short completion weighs more than a token of a long completion.
    """

    type: Literal["grpo"] = "grpo"


class DrGRPOConfig(ClippedLoss):
    """Sum over tokens / (completions * rollout.max_completion_tokens) (Dr. GRPO, arXiv 2503.20783).

    The constant denominator removes GRPO's length bias. Use it with advantage.scale: none.
    """

    type: Literal["dr_grpo"] = "dr_grpo"


class DAPOConfig(ClippedLoss):
    """Mean over all tokens of the batch, with an asymmetric clip range (DAPO, arXiv 2503.14476).

    Each minibatch divides by batch tokens / minibatches, so every token of the batch has the same weight.
    """

    type: Literal["dapo"] = "dapo"
    clip_high: Number = Field(0.28, gt=0)
    """The ratio is clamped to <= 1 + clip_high. The default exceeds clip_low, so that unlikely tokens can become
    likelier and entropy does not collapse."""


class BNPOConfig(ClippedLoss):
    """Mean over all tokens of the minibatch. Same as dapo if batch.minibatches is 1."""

    type: Literal["bnpo"] = "bnpo"


class CISPOConfig(PolicyLoss):
    """Log-probabilities weighted by the truncated, detached ratio; token mean over the batch (arXiv 2506.13585).

    No token loses its gradient to clipping.
    """

    type: Literal["cispo"] = "cispo"
    clip_high: Number = Field(5.0, gt=0)
    """Upper bound of the ratio."""


class GSPOConfig(ClippedLoss):
    """Mean over completions. A completion's ratio is the geometric mean of its tokens' ratios (arXiv 2507.18071).

    Completion ratios stay much closer to 1 than token ratios. The clip range is therefore small.
    """

    type: Literal["gspo"] = "gspo"
    clip_low: Number = Field(3e-4, gt=0)
    """The completion's ratio is clamped to >= 1 - clip_low."""
    clip_high: Number = Field(4e-4, gt=0)
    """The completion's ratio is clamped to <= 1 + clip_high."""


LossConfig = Annotated[
    GRPOConfig | DrGRPOConfig | DAPOConfig | BNPOConfig | CISPOConfig | GSPOConfig, Field(discriminator="type")
]
