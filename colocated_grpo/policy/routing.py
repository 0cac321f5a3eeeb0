"""Routing of mixtures of experts: replay of the engine's choices, and the load-balancing loss.

Replay uses the experts chosen by the engine in place of the policy's own choice. The policy still computes the weight
of each expert from its own router's logits, so gradients reach the router.

The load-balancing loss falls as a router uses its experts more equally. It is E * sum_e f_e P_e for each layer,
averaged over layers: f_e is the fraction of tokens routed to expert e, and P_e the mean probability of e (Switch
Transformers, Fedus et al. 2021, equations 4 to 6). f_e and P_e are taken over all sequences of a minibatch, on all
ranks. A token of a common prefix counts once for each sequence with this prefix, however the sequences are packed.

The loss, a product of two means, is not a sum over micro-batches, but its gradient is. f_e has no gradient, so each
micro-batch adds the gradient of sum_e f_e P_e over its own tokens. An extra forward pass, before the backward passes,
counts f_e.

The scale is the same as in transformers' `load_balancing_loss_func`, so that coefficients carry over.
`load_balancing_loss_func` takes the means over one micro-batch of one rank, and pools the tokens of all layers, so that
imbalances of different layers can cancel out.

Shapes: T packed tokens, E experts, K experts per token, L layers with experts (for the loss, with a trained router).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import PreTrainedConfig

from colocated_grpo.batching.micro_batch import PackedRoutes, PackedTokens
from colocated_grpo.errors import ConfigError
from colocated_grpo.metrics import Stat
from colocated_grpo.policy.blocks import blocks_of
from colocated_grpo.types import MAX_UINT8_EXPERTS


class _WithGradient(torch.autograd.Function):
    """Returns `value` unchanged; its backward pass adds `gradient`, shaped like `target`, to `target`'s gradient.

    The gradient of a leaf tensor sums over the blocks of a backward pass: a checkpointed block counts once although it
    runs forward twice, and a compiled block has no side effect.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, target: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.view_as(value)

    @staticmethod
    # pyrefly: ignore[bad-override]  (torch declares *grad_outputs, but passes one argument per output)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return grad, gradient, None


with_gradient = _WithGradient.apply

FIRST_WITH_LOGITS = Version("5.6")
"""First minor release of transformers after pull request 45131. Earlier, most routers returned probabilities."""
RouterOutput = tuple[Tensor, Tensor, Tensor]
"""Logits [T, E], routing weights [T, K] and expert indices [T, K]."""
Weigh = Callable[[Any, Tensor, Tensor], Tensor]
"""(router, its logits [T, E], experts [T, K]) -> their weights [T, K], as the router of the family computes them."""


def softmax_weights(router: nn.Module, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """Return the experts' probabilities, normalised to sum to 1 unless the router's `norm_topk_prob` is False."""
    weights_TK = logits_TE.softmax(-1, dtype=torch.float32).gather(1, experts_TK)
    return weights_TK / weights_TK.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights_TK


def softmax_of_chosen(router: nn.Module, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """Return the softmax over the logits of the chosen experts only, as in gpt-oss."""
    return logits_TE.gather(1, experts_TK).softmax(-1)


def sigmoid_weights(router: Any, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """Return the experts' scores without the selection bias, as in DeepSeek-V3 and GLM-4.5."""
    weights_TK = logits_TE.sigmoid().gather(1, experts_TK)
    if router.norm_topk_prob:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return weights_TK * router.routed_scaling_factor


WEIGHTS: dict[str, Weigh] = {
    **dict.fromkeys(("mixtral", "olmoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"), softmax_weights),
    **dict.fromkeys(("deepseek_v3", "glm4_moe"), sigmoid_weights),
    "gpt_oss": softmax_of_chosen,
}
"""How to compute the weights of the chosen experts, by model type."""


class RoutingReplay:
    """Replaces the experts chosen by the model's routers with the recorded experts."""

    def __init__(self, blocks: Iterable[nn.Module], config: PreTrainedConfig, device: torch.device) -> None:
        """blocks: of the model with this config, in order. Raises ConfigError for families with unknown routers."""
        check_returns_logits("policy.routing_replay=true")
        weigh = WEIGHTS.get(config.model_type)
        if weigh is None:
            raise ConfigError(f"policy.routing_replay=true: not supported for model type {config.model_type!r}")
        self._experts_per_token: int = config.num_experts_per_tok
        self._routers = routers_of(blocks)
        self._replaced_and_recorded = torch.zeros(2, device=device, requires_grad=True)
        """Its gradient counts the tokens whose experts were replaced, and the recorded tokens. See `_WithGradient`."""
        self._layers = [_LayerReplay(router, weigh, self._replaced_and_recorded) for router in self._routers]

    def load(self, tokens: PackedTokens) -> None:
        """Set the record of the next forward pass and of its recomputation in the backward pass.

        Called outside the blocks, because a compiled, checkpointed block must not mutate state. Tokens without a record
        get an empty record, so that they run the same compiled graph. Trial steps have no record, and thus compile the
        graph of all later steps.
        """
        routes = self._empty_record(tokens) if tokens.routes is None else tokens.routes
        for layer, experts_TK in zip(self._layers, routes.experts_LTK, strict=True):
            layer.experts_TK, layer.recorded_T = experts_TK, routes.recorded_T

    def _empty_record(self, tokens: PackedTokens) -> PackedRoutes:
        """Return an empty record: every token keeps the policy's choice."""
        router: Any = self._routers[0]
        rows, device = tokens.num_tokens, tokens.input_ids_T.device
        dtype = torch.uint8 if router.weight.shape[0] <= MAX_UINT8_EXPERTS else torch.int16
        experts_LTK = torch.zeros(len(self._routers), rows, self._experts_per_token, dtype=dtype, device=device)
        return PackedRoutes(experts_LTK, torch.zeros(rows, dtype=torch.bool, device=device))

    def take_mismatch(self) -> Stat:
        """Return the fraction of recorded tokens whose experts were replaced, over the layers that backward reached."""
        counts = self._replaced_and_recorded
        replaced, recorded = torch.zeros_like(counts.detach()) if counts.grad is None else counts.grad
        counts.grad = None
        return Stat.mean(replaced, recorded)


class _LayerReplay:
    """Replaces the experts that one router has chosen.

    A forward hook sees the router's logits, weights and experts, so the code of model families needs no change.
    """

    def __init__(self, router: nn.Module, weigh: Weigh, replaced_and_recorded: Tensor) -> None:
        self.experts_TK: Tensor
        self.recorded_T: Tensor
        self._weigh = weigh
        self._replaced_and_recorded = replaced_and_recorded
        router.register_forward_hook(self._replace)

    def _replace(self, router: nn.Module, _inputs: object, output: RouterOutput) -> object:
        logits_TE, own_weights_TK, own_experts_TK = output
        # Skip tokens without a record: their zeros name one expert several times, and could make the gradient NaN.
        experts_TK = torch.where(self.recorded_T[:, None], self.experts_TK.to(own_experts_TK.dtype), own_experts_TK)
        # If engine and policy chose the same experts, keep the policy's order, for the same bits as without replay.
        replaced_T = (experts_TK.sort(-1).values != own_experts_TK.sort(-1).values).any(-1)
        replaced_T1 = replaced_T[:, None]
        weights_TK = self._weigh(router, logits_TE, experts_TK).to(own_weights_TK.dtype)
        weights_TK = torch.where(replaced_T1, weights_TK, own_weights_TK)
        if weights_TK.requires_grad:
            counts = torch.stack([replaced_T.sum(), self.recorded_T.sum()]).float()
            weights_TK = with_gradient(weights_TK, self._replaced_and_recorded, counts)
        return logits_TE, weights_TK, torch.where(replaced_T1, experts_TK, own_experts_TK)


def check_returns_logits(setting: str) -> None:
    """Raise ConfigError for releases of transformers whose routers return probabilities in place of logits."""
    if Version(transformers.__version__) < FIRST_WITH_LOGITS:
        raise ConfigError(
            f"{setting}: routers of transformers {transformers.__version__} return probabilities in place of logits; "
            f"install {FIRST_WITH_LOGITS} or later"
        )


def routers_of(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the routers of the blocks that have experts, in order.

    A router is the module next to `experts`: `router` in gpt-oss, `gate` in all other families here.
    """
    found = []
    for block in blocks:
        modules = dict(block.named_modules())
        places = [name.removesuffix("experts") for name in modules if name.endswith(".experts")]
        found += [modules.get(f"{place}gate") or modules[f"{place}router"] for place in places[:1]]
    return found


class LoadBalancing:
    """Adds the gradient of the loss in every backward pass through the routers.

    For each minibatch: call `reset`, run each micro-batch forward without gradient, then call `set_loss`.
    """

    def __init__(self, model: nn.Module, model_type: str, coefficient: float, device: torch.device) -> None:
        """model: its blocks are prepared, and it has not run a forward pass. Routers that are not trained get no loss.

        Raises ConfigError if no router is trained, or if the routers of this transformers return no logits.
        """
        setting = f"policy.load_balancing={coefficient:g}"
        check_returns_logits(setting)
        probabilities = normalized_sigmoid if WEIGHTS.get(model_type) is sigmoid_weights else softmax
        routers = routers_of(blocks_of(model))
        trained = [router for router in routers if any(p.requires_grad for p in router.parameters())]
        if not trained:
            raise ConfigError(f"{setting}: no trained block has a router; leave the setting out")
        self._coefficient = coefficient
        self._layers = [_LayerBalancing(router, probabilities, device) for router in trained]

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

        Collective. Each rank returns the loss of the whole minibatch. Without tokens, the returned mean has weight 0.
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

    def __init__(self, router: Any, probabilities: Callable[[Tensor], Tensor], device: torch.device) -> None:
        """probabilities: computes float32 probabilities [T, E] from the router's logits [T, E]."""
        self.weights_T: Tensor
        self.sums_2E = torch.zeros(2, router.weight.shape[0], device=device)
        """Choices of each expert, and sums of its probabilities, in forward passes without gradient."""
        self.factors_E = torch.zeros(router.weight.shape[0], device=device)
        """One per expert: the loss is the sum over experts of this factor times the expert's summed probabilities."""
        self._probabilities = probabilities
        router.register_forward_hook(self._attach)

    def _attach(self, _router: nn.Module, _inputs: object, output: RouterOutput) -> object:
        logits_TE, weights_TK, experts_TK = output
        summed_E = self.weights_T @ self._probabilities(logits_TE)
        if not torch.is_grad_enabled():
            weights_TK = self.weights_T[:, None].expand(experts_TK.shape)
            choices_E = torch.zeros_like(self.factors_E).scatter_add_(0, experts_TK.reshape(-1), weights_TK.reshape(-1))
            self.sums_2E.add_(torch.stack([choices_E, summed_E]))
            return output
        loss = (self.factors_E * summed_E).sum()
        return logits_TE, with_gradient(weights_TK, loss, torch.ones_like(loss)), experts_TK


def sequences_per_row(tokens: PackedTokens) -> Tensor:
    """Return the number of sequences that each row belongs to, [T] float32: 0 in padding, several in a prefix."""
    device = tokens.input_ids_T.device
    if tokens.padding:
        return torch.zeros(tokens.num_tokens, device=device)
    if tokens.prefix_keys is None:
        return torch.ones(tokens.num_tokens, device=device)
    rows_E = tokens.prefix_keys.rows_E
    return torch.zeros(tokens.num_rows, device=device).index_add_(0, rows_E, torch.ones(len(rows_E), device=device))


def softmax(logits_TE: Tensor) -> Tensor:
    return logits_TE.softmax(-1, dtype=torch.float32)


def normalized_sigmoid(logits_TE: Tensor) -> Tensor:
    """Return scores divided by their sum over the experts, as in DeepSeek-V3's balance loss (equations 18 to 20)."""
    scores_TE = logits_TE.float().sigmoid()
    return scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
