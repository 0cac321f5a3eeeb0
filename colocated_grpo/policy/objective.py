"""Loss of a micro-batch: the model's forward pass and the loss function, fused or one after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from colocated_grpo.batching import MicroBatch
from colocated_grpo.losses import ChunkedLoss, LossFn, make_chunked_loss, make_loss
from colocated_grpo.losses.parts import weighted_mean
from colocated_grpo.metrics import Stat
from colocated_grpo.policy.logprobs import linear_loss
from colocated_grpo.policy.model import PackedLM
from colocated_grpo.settings.losses import LossConfig

Objective = Callable[[PackedLM, MicroBatch, float], tuple[Tensor, dict[str, Stat]]]
"""(model, micro-batch on the device, denominator) -> (loss to call backward on, metrics)."""


def make_objective(config: LossConfig) -> Objective:
    """Return the fused objective where the loss can be computed in chunks, else the unfused one."""
    loss_fn, chunked_loss = make_loss(config), make_chunked_loss(config)
    return unfused_objective(loss_fn) if chunked_loss is None else fused_objective(loss_fn, chunked_loss)


def unfused_objective(loss_fn: LossFn) -> Objective:
    """Apply the loss to the log-probabilities of all scored tokens. The backward pass computes the logits again."""

    def objective(model: PackedLM, micro_batch: MicroBatch, denominator: float) -> tuple[Tensor, dict[str, Stat]]:
        logprobs_N, entropy_N = model(micro_batch.tokens)
        output = loss_fn(logprobs_N, micro_batch.loss_inputs)
        return output.loss_sum / denominator, output.metrics | _entropy(entropy_N, micro_batch)

    return objective


def fused_objective(loss_fn: LossFn, chunked_loss: ChunkedLoss) -> Objective:
    """Apply the loss chunk by chunk inside the output layer, where the forward pass also computes the gradients."""

    def objective(model: PackedLM, micro_batch: MicroBatch, denominator: float) -> tuple[Tensor, dict[str, Stat]]:
        chunk_loss = chunked_loss(micro_batch.loss_inputs)
        head = partial(linear_loss, loss_of=lambda tokens, logprobs_C: chunk_loss(tokens, logprobs_C) / denominator)
        loss, logprobs_N, entropy_N = model(micro_batch.tokens, head)
        with torch.no_grad():
            metrics = loss_fn(logprobs_N, micro_batch.loss_inputs).metrics
        return loss, metrics | _entropy(entropy_N, micro_batch)

    return objective


def _entropy(entropy_N: Tensor, micro_batch: MicroBatch) -> dict[str, Stat]:
    return {"entropy": weighted_mean(entropy_N, micro_batch.loss_inputs.loss_mask_N)}
