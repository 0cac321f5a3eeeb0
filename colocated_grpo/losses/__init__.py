"""Policy-gradient objectives over packed tokens. Pure: no torch.distributed, no vllm, no transformers."""

from colocated_grpo.losses.inputs import Counts, LossFn, LossInputs, LossOutput, SplitLoss
from colocated_grpo.losses.objectives import make_denominator, make_loss, make_split_loss

__all__ = [
    "Counts",
    "LossFn",
    "LossInputs",
    "LossOutput",
    "SplitLoss",
    "make_denominator",
    "make_loss",
    "make_split_loss",
]
