"""Packing of groups and advantages into the micro-batches that each rank runs."""

from colocated_grpo.batching.context import local_rows
from colocated_grpo.batching.micro_batch import (
    PADDING_TOKENS,
    MicroBatch,
    PackedRoutes,
    PackedTokens,
    PrefixKeys,
    TrainSequence,
    build_micro_batch,
)
from colocated_grpo.batching.pack import Batch, Minibatch, pack

__all__ = [
    "PADDING_TOKENS",
    "Batch",
    "MicroBatch",
    "Minibatch",
    "PackedRoutes",
    "PackedTokens",
    "PrefixKeys",
    "TrainSequence",
    "build_micro_batch",
    "local_rows",
    "pack",
]
