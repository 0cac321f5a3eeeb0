"""Load-balancing loss of mixtures of experts, which falls as a router uses its experts more equally.

The loss is E * sum_e f_e P_e for each layer, averaged over layers: f_e is the fraction of tokens routed to expert e,
and P_e the mean probability of e (Switch Transformers, Fedus et al. 2021, equations 4 to 6). f_e and P_e are taken over
all sequences of a minibatch, on all ranks. A token of a common prefix counts once for each sequence with this prefix,
however the sequences are packed.

The loss, a product of two means, is not a sum over micro-batches, but its gradient is. f_e has no gradient, so each
micro-batch adds the gradient of sum_e f_e P_e over its own tokens. An extra forward pass, before the backward passes,
counts f_e.

The scale is the same as in transformers' `load_balancing_loss_func`, so that coefficients carry over.
`load_balancing_loss_func` takes the means over one micro-batch of one rank, and pools the tokens of all layers, so that
imbalances of different layers can cancel out.

Shapes: T packed tokens, E experts, K experts per token, L layers with a trained router.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from colocated_grpo.batching import PackedTokens
from colocated_grpo.metrics import Stat
from colocated_grpo.policy.backward_sum import with_gradient
from colocated_grpo.policy.blocks import blocks_of
from colocated_grpo.policy.routing import WEIGHTS, check_returns_logits, routed, routers_of, sigmoid_weights
from colocated_grpo.settings.errors import ConfigError

Probabilities = Callable[[Tensor], Tensor]
"""A router's logits [T, E] -> probabilities [T, E] float32."""


class LoadBalancing:
    """Adds the gradient of the loss in every backward pass through the routers.

    For each minibatch: call `reset`, run each micro-batch forward without gradient, then call `set_loss`.
    """

    def __init__(self, model: nn.Module, model_type: str, coefficient: float, device: torch.device) -> None:
        """model: its blocks are prepared, and it has not run a forward pass. Routers that are not trained get no loss.

        Raises ConfigError if no router is trained, or if the routers of this transformers return no logits.
        """
        # Formatted here, because compiled blocks cannot format numbers.
        setting = f"policy.load_balancing={coefficient:g}"
        check_returns_logits(setting)
        probabilities = normalized_sigmoid if WEIGHTS.get(model_type) is sigmoid_weights else softmax
        routers = routers_of(blocks_of(model))
        trained = [router for router in routers if any(p.requires_grad for p in router.parameters())]
        if not trained:
            raise ConfigError(f"{setting}: no trained block has a router; leave the setting out")
        self._coefficient = coefficient
        self._layers = [_LayerBalancing(router, probabilities, setting, device) for router in trained]

    def load(self, tokens: PackedTokens) -> None:
        """Set the weights of the next forward pass, and of its recomputation in the backward pass."""
        weights_T = sequences_per_row(tokens)
        for layer in self._layers:
            layer.weights_T = weights_T

    def reset(self) -> None:
        for layer in self._layers:
            layer.sums_2E.zero_()

    def set_loss(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> Stat:
        """Set the loss from the forward passes without gradient since `reset`, and return it without the coefficient.

        Collective. Each rank returns the loss of the whole minibatch. If the minibatch has no tokens, the returned mean
        has weight 0.
        """
        sums_L2E = sum_over_ranks(torch.stack([layer.sums_2E for layer in self._layers]))
        choices_LE, probabilities_LE = sums_L2E.unbind(1)
        tokens = probabilities_LE[0].sum()  # each token's probabilities add up to 1
        layers, experts = choices_LE.shape
        factors_LE = experts * choices_LE / tokens.clamp(min=1).square()
        for layer, factors_E in zip(self._layers, factors_LE, strict=True):
            layer.factors_E.copy_(self._coefficient / layers * factors_E)
        return Stat.mean((factors_LE * probabilities_LE).sum() / layers, (tokens > 0).float())


class _LayerBalancing:
    """Loss of one router.

    A forward hook attaches the loss to the routing weights [T, K] that the router returns, so compiled and checkpointed
    blocks need not return the loss. All state is in tensors: compiled blocks would treat numbers as constants.
    """

    def __init__(self, router: Any, probabilities: Probabilities, setting: str, device: torch.device) -> None:
        self.weights_T: Tensor
        self.sums_2E = torch.zeros(2, router.weight.shape[0], device=device)
        """Choices of each expert, and sums of its probabilities, in forward passes without gradient."""
        self.factors_E = torch.zeros(router.weight.shape[0], device=device)
        """One per expert: the loss is the sum over experts of this factor times the expert's summed probabilities."""
        self._probabilities = probabilities
        self._setting = setting
        router.register_forward_hook(self._attach)

    def _attach(self, _router: nn.Module, _inputs: object, output: object) -> object:
        logits_TE, weights_TK, experts_TK = routed(output, self._setting)
        summed_E = self.weights_T @ self._probabilities(logits_TE)
        if not torch.is_grad_enabled():
            weights_TK = self.weights_T[:, None].expand(experts_TK.shape)
            choices_E = torch.zeros_like(summed_E).scatter_add_(0, experts_TK.reshape(-1), weights_TK.reshape(-1))
            self.sums_2E.add_(torch.stack([choices_E, summed_E]))
            return output
        loss = (self.factors_E * summed_E).sum()
        return logits_TE, with_gradient(weights_TK, loss, torch.ones_like(loss)), experts_TK


def sequences_per_row(tokens: PackedTokens) -> Tensor:
    """Return the number of sequences that each row belongs to, [T] float32: 0 in padding, several in a prefix."""
    device = tokens.input_ids_T.device
    if tokens.padding:
        return torch.zeros(tokens.num_tokens, device=device)
    sequences_T = torch.ones(tokens.num_tokens, device=device)
    if tokens.prefix_keys is not None:
        copies_UR = tokens.prefix_keys.copies_UR
        sequences_T[: len(copies_UR)] = (copies_UR >= 0).sum(1).float()
    return sequences_T


def softmax(logits_TE: Tensor) -> Tensor:
    return logits_TE.softmax(-1, dtype=torch.float32)


def normalized_sigmoid(logits_TE: Tensor) -> Tensor:
    """Return scores divided by their sum over the experts, as in DeepSeek-V3's balance loss (equations 18 to 20)."""
    scores_TE = logits_TE.float().sigmoid()
    return scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
