"""Settings of the objective: one model per loss, told apart by `type`; advantages beside it."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from colocated_grpo.config.base import Section


class AdvantageConfig(Section):
    scale: Literal["group", "batch", "none"] = "group"
    """Divide reward - baseline by the standard deviation of the group, of the batch, or not at all (Dr. GRPO)."""
    leave_one_out: bool = False
    """Baseline is the mean of the other siblings (RLOO) instead of the group mean."""
    eps: float = Field(1e-4, gt=0)
    """Added to the standard deviation."""


class CorrectionConfig(Section):
    """Importance correction for the difference between sampler (vLLM) and trainer probabilities."""

    level: Literal["token", "sequence"] = "token"
    """token: one weight per token. sequence: the product over the completion's tokens."""
    mode: Literal["truncate", "mask", "off"] = "truncate"
    """truncate: weight = min(ratio, cap) (TIS). mask: weight = ratio inside [floor, cap], else 0 (MIS). off: 1."""
    cap: float = Field(2.0, gt=1)
    """Upper bound of the ratio trainer / sampler."""
    floor: float = Field(0.0, ge=0, lt=1)
    """Lower bound of the ratio, for mode 'mask'."""


class KLConfig(Section):
    coef: float = Field(0.0, ge=0)
    """Weight of the k3 KL penalty; 0 loads no reference model."""
    target: Literal["reference", "rollout"] = "reference"
    """reference: the frozen initial model. rollout: the policy that sampled the completions."""


class PolicyLoss(Section):
    """What every policy-gradient loss here has."""

    correction: CorrectionConfig = CorrectionConfig()
    """Correction of sampler/trainer mismatch and staleness."""
    kl: KLConfig = KLConfig()
    """KL penalty."""
    old_logprobs: Literal["trainer", "sampling"] = "trainer"
    """Denominator of the ratio. trainer: recomputed before the batch's first update (free when there is only one).
    sampling: vLLM's own; the ratio then corrects the mismatch itself and `correction` is not applied."""


class ClippedLoss(PolicyLoss):
    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio is clamped to >= 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0)
    """The ratio is clamped to <= 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """For negative advantages the ratio's influence is bounded by this factor (dual-clip PPO)."""

    @model_validator(mode="after")
    def _dual_clip_lies_above_the_clip_range(self) -> Self:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(f"dual_clip={self.dual_clip} must be above 1 + clip_high = {1 + self.clip_high}")
        return self


class GRPOConfig(ClippedLoss):
    """Mean over each completion's tokens, then over completions (DeepSeekMath, arXiv 2402.03300)."""

    type: Literal["grpo"] = "grpo"


class DrGRPOConfig(ClippedLoss):
    """Sum over tokens / (completions * max_completion_tokens) (arXiv 2503.20783); pair with advantage.scale 'none'."""

    type: Literal["dr_grpo"] = "dr_grpo"


class DAPOConfig(ClippedLoss):
    """Mean over all tokens of the batch, asymmetric clip (arXiv 2503.14476)."""

    type: Literal["dapo"] = "dapo"
    clip_high: float = Field(0.28, gt=0)
    """The ratio is clamped to <= 1 + clip_high."""


class BNPOConfig(ClippedLoss):
    """Mean over all tokens of the minibatch."""

    type: Literal["bnpo"] = "bnpo"


class CISPOConfig(PolicyLoss):
    """Clipped importance weight as a constant factor of the log-probability, token mean (arXiv 2506.13585)."""

    type: Literal["cispo"] = "cispo"
    clip_high: float = Field(5.0, gt=0)
    """Upper bound of the importance weight."""


class GSPOConfig(ClippedLoss):
    """One length-normalised ratio per completion, mean over completions (arXiv 2507.18071)."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(3e-4, gt=0, lt=1)
    """The sequence ratio is clamped to >= 1 - clip_low."""
    clip_high: float = Field(4e-4, gt=0)
    """The sequence ratio is clamped to <= 1 + clip_high."""


LossConfig = Annotated[
    GRPOConfig | DrGRPOConfig | DAPOConfig | BNPOConfig | CISPOConfig | GSPOConfig, Field(discriminator="type")
]
