"""From groups and advantages to the micro-batches that each rank runs."""

from colocated_grpo.batching.micro_batch import (
    PADDING_TOKENS,
    MicroBatch,
    SharedKeys,
    TrainSequence,
    build_micro_batch,
)
from colocated_grpo.batching.pack import Batch, Minibatch, pack

__all__ = [
    "PADDING_TOKENS",
    "Batch",
    "MicroBatch",
    "Minibatch",
    "SharedKeys",
    "TrainSequence",
    "build_micro_batch",
    "pack",
]
