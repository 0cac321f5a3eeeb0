"""Policy-gradient objectives over packed tokens. Pure: no torch.distributed, no vllm, no transformers."""

from colocated_grpo.losses.inputs import ChunkedLoss, Counts, LossFn, LossInputs, LossOutput
from colocated_grpo.losses.objectives import make_chunked_loss, make_denominator, make_loss

__all__ = [
    "ChunkedLoss",
    "Counts",
    "LossFn",
    "LossInputs",
    "LossOutput",
    "make_chunked_loss",
    "make_denominator",
    "make_loss",
]
