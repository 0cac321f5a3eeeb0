"""Load-balancing loss of mixtures of experts, which falls as a router uses its experts more equally.

E * sum_e f_e P_e for each layer and micro-batch, averaged over both: f_e is the fraction of tokens routed to expert e,
and P_e the mean probability of e (Switch Transformers, Fedus et al. 2021, equations 4 to 6). The scale is that of
transformers' `load_balancing_loss_func`, so that coefficients carry over. That function pools the tokens of all layers,
so that imbalances of different layers can cancel out.

Shapes: T packed tokens, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from colocated_grpo.batching import MicroBatch
from colocated_grpo.config.errors import ConfigError
from colocated_grpo.metrics import Stat
from colocated_grpo.policy.backward_sum import BackwardSum, with_gradient
from colocated_grpo.policy.blocks import blocks_of
from colocated_grpo.policy.routing import WEIGHTS, check_returns_logits, routed, routers_of, sigmoid_weights

Probabilities = Callable[[Tensor], Tensor]
"""A router's logits [T, E] -> probabilities [T, E] float32."""


class LoadBalancing:
    """Adds the gradient of the loss in every backward pass through the routers.

    A forward hook attaches the loss to the routing weights [T, K] that a router returns, so compiled and checkpointed
    blocks need not return the loss.
    """

    def __init__(self, model: nn.Module, model_type: str, coefficient: float, device: torch.device) -> None:
        """model: with prepared blocks, before its first forward pass. Routers that are not trained get no loss.

        Raises ConfigError if no router is trained, or if the routers of this transformers return no logits.
        """
        self._setting = f"policy.load_balancing={coefficient:g}"  # formatted here: a compiled block cannot
        check_returns_logits(self._setting)
        self._coefficient = coefficient
        self._probabilities = normalized_sigmoid if WEIGHTS.get(model_type) is sigmoid_weights else softmax
        # Both are tensors on the device: compiled blocks would treat numbers as constants.
        self._scale = torch.zeros((), device=device)
        self._share = 0.0
        self._loss_and_count = BackwardSum(2, device)
        routers = routers_of(blocks_of(model))
        self._trained = [router for router in routers if any(p.requires_grad for p in router.parameters())]
        if not self._trained:
            raise ConfigError(f"{self._setting}: no trained block has a router; leave it out")
        for router in self._trained:
            router.register_forward_hook(self._attach)

    def begin(self, micro_batches: int, ranks: int) -> None:
        """Start a minibatch, which averages over layers, ranks and the `micro_batches` of each rank."""
        self._loss_and_count.reset()
        self._share = self._coefficient / (len(self._trained) * micro_batches * ranks)

    def begin_micro_batch(self, micro_batch: MicroBatch) -> None:
        """Call before the forward pass. The padding micro-batch of a rank without work gets no loss."""
        self._scale.fill_(self._share if micro_batch.loss_inputs.loss_mask_N.any() else 0.0)

    def mean(self) -> Stat:
        """Return the mean loss of the minibatch's layers and micro-batches, without padding and the coefficient."""
        return Stat.mean(*self._loss_and_count.values())

    def _attach(self, _router: nn.Module, _inputs: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        logits_TE, weights_TK, experts_TK = routed(output, self._setting)
        loss = load_balancing_loss(self._probabilities(logits_TE), experts_TK)
        counted = torch.stack([loss.detach(), torch.ones_like(loss)]) * (self._scale > 0)
        weights_TK = self._loss_and_count.attach(weights_TK, counted)
        return logits_TE, with_gradient(weights_TK, loss, self._scale), experts_TK


def load_balancing_loss(probabilities_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """Return the loss of one layer, [] float32: K if all experts are used equally, more if some are preferred."""
    tokens, experts = probabilities_TE.shape
    choices = experts_TK.reshape(-1)
    counts_E = probabilities_TE.new_zeros(experts).scatter_add_(0, choices, probabilities_TE.new_ones(choices.shape))
    return experts * (counts_E / tokens * probabilities_TE.mean(0)).sum()


def softmax(logits_TE: Tensor) -> Tensor:
    return logits_TE.softmax(-1, dtype=torch.float32)


def normalized_sigmoid(logits_TE: Tensor) -> Tensor:
    """Return scores divided by their sum over the experts, as in DeepSeek-V3's balance loss (equations 18 to 20)."""
    scores_TE = logits_TE.float().sigmoid()
    return scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
