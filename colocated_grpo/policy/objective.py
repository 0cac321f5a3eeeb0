"""From a micro-batch to its loss: the model's forward pass and the loss function, put together in one of two ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

import torch
from torch import Tensor

from colocated_grpo.batching import MicroBatch
from colocated_grpo.config.losses import LossConfig
from colocated_grpo.losses import LossFn, LossInputs, SplitLoss, make_loss, make_split_loss
from colocated_grpo.losses.parts import mean
from colocated_grpo.metrics import Stat
from colocated_grpo.policy.logprobs import linear_loss
from colocated_grpo.policy.model import PackedLM, PackedTokens

Objective = Callable[[PackedLM, MicroBatch, float], tuple[Tensor, dict[str, Stat]]]
"""(model, micro-batch on the device, denominator) -> (loss to call backward on, metrics)."""


def make_objective(config: LossConfig) -> Objective:
    """Gradients of the logits are made in the forward pass where the loss allows it, else logits are computed twice."""
    loss_fn, split = make_loss(config), make_split_loss(config)
    return whole_objective(loss_fn) if split is None else split_objective(loss_fn, split)


def whole_objective(loss_fn: LossFn) -> Objective:
    def objective(model: PackedLM, micro_batch: MicroBatch, denominator: float) -> tuple[Tensor, dict[str, Stat]]:
        logprobs_N, entropy_N = model(packed_tokens(micro_batch))
        output = loss_fn(_loss_inputs(micro_batch, logprobs_N))
        return output.loss_sum / denominator, output.metrics | _entropy(entropy_N, micro_batch)

    return objective


def split_objective(loss_fn: LossFn, split: SplitLoss) -> Objective:
    def objective(model: PackedLM, micro_batch: MicroBatch, denominator: float) -> tuple[Tensor, dict[str, Stat]]:
        constants = _loss_inputs(micro_batch, micro_batch.sampling_logprobs_N)
        part = split(constants)
        head = partial(linear_loss, loss_of=lambda tokens, logprobs_C: part(tokens, logprobs_C) / denominator)
        loss, logprobs_N, entropy_N = model(packed_tokens(micro_batch), head)
        with torch.no_grad():
            metrics = loss_fn(replace(constants, logprobs_T=logprobs_N)).metrics
        return loss, metrics | _entropy(entropy_N, micro_batch)

    return objective


def packed_tokens(micro_batch: MicroBatch) -> PackedTokens:
    return PackedTokens(**{f.name: getattr(micro_batch, f.name) for f in fields(PackedTokens)})


def _loss_inputs(micro_batch: MicroBatch, logprobs_N: Tensor) -> LossInputs:
    return LossInputs(
        logprobs_T=logprobs_N,
        old_logprobs_T=micro_batch.old_logprobs_N,
        sampling_logprobs_T=micro_batch.sampling_logprobs_N,
        ref_logprobs_T=micro_batch.ref_logprobs_N,
        advantages_T=micro_batch.advantages_N,
        loss_mask_T=micro_batch.loss_mask_N,
        sequence_T=micro_batch.sequence_N,
        num_sequences=micro_batch.num_sequences,
    )


def _entropy(entropy_N: Tensor, micro_batch: MicroBatch) -> dict[str, Stat]:
    return {"entropy": mean(entropy_N, micro_batch.loss_mask_N)}
