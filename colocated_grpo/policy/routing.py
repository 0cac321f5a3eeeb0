"""Routing replay: experts chosen by the engine in place of the policy's own choice.

The policy still computes the weight of each expert from its own router's logits, so gradients reach the router.

Shapes: T tokens, E experts, K experts per token, L layers with experts.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import PreTrainedConfig

from colocated_grpo.batching import PackedRoutes, PackedTokens
from colocated_grpo.metrics import Stat
from colocated_grpo.policy.backward_sum import BackwardSum
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.types import MAX_UINT8_EXPERTS

FIRST_WITH_LOGITS = Version("5.6")
"""First minor release of transformers after pull request 45131. In earlier releases, most routers returned
probabilities."""
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
    "deepseek_v3": sigmoid_weights,
    "glm4_moe": sigmoid_weights,
    "gpt_oss": softmax_of_chosen,
    "mixtral": softmax_weights,
    "olmoe": softmax_weights,
    "qwen2_moe": softmax_weights,
    "qwen3_5_moe_text": softmax_weights,
    "qwen3_moe": softmax_weights,
    "qwen3_next": softmax_weights,
}
"""How to compute the weights of the chosen experts, by model type."""


class RoutingReplay:
    """Replaces the experts chosen by the model's routers with the recorded experts."""

    def __init__(self, blocks: Iterable[nn.Module], config: PreTrainedConfig, device: torch.device) -> None:
        """blocks: the transformer blocks of the model with this config, in order.

        Raises ConfigError for families whose routers are not known.
        """
        check_returns_logits("policy.routing_replay=true")
        weigh = WEIGHTS.get(config.model_type)
        if weigh is None:
            raise ConfigError(f"policy.routing_replay=true: not supported for model type {config.model_type!r}")
        self._experts_per_token: int = config.num_experts_per_tok
        self._routers = routers_of(blocks)
        self._replaced_and_recorded = BackwardSum(2, device)
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
        replaced, recorded = self._replaced_and_recorded.values()
        self._replaced_and_recorded.reset()
        return Stat.mean(replaced, recorded)


class _LayerReplay:
    """Replaces the experts that one router has chosen.

    A forward hook sees the router's logits, weights and experts, so the code of model families needs no change.
    """

    def __init__(self, router: nn.Module, weigh: Weigh, replaced_and_recorded: BackwardSum) -> None:
        self.experts_TK: Tensor
        self.recorded_T: Tensor
        self._weigh = weigh
        self._replaced_and_recorded = replaced_and_recorded
        router.register_forward_hook(self._replace)

    def _replace(self, router: nn.Module, _inputs: object, output: tuple[Tensor, Tensor, Tensor]) -> object:
        logits_TE, own_weights_TK, own_experts_TK = routed(output, "policy.routing_replay=true")
        # Skip tokens without a record: their zeros name one expert several times, and could make the gradient NaN.
        experts_TK = torch.where(self.recorded_T[:, None], self.experts_TK.to(own_experts_TK.dtype), own_experts_TK)
        # If engine and policy chose the same experts, keep the policy's order, which gives the same bits as without
        # replay.
        replaced_T = (experts_TK.sort(-1).values != own_experts_TK.sort(-1).values).any(-1)
        replaced_T1 = replaced_T[:, None]
        weights_TK = self._weigh(router, logits_TE, experts_TK).to(own_weights_TK.dtype)
        weights_TK = torch.where(replaced_T1, weights_TK, own_weights_TK)
        if weights_TK.requires_grad:
            counts = torch.stack([replaced_T.sum(), self.recorded_T.sum()]).float()
            weights_TK = self._replaced_and_recorded.attach(weights_TK, counts)
        return logits_TE, weights_TK, torch.where(replaced_T1, experts_TK, own_experts_TK)


def check_returns_logits(setting: str) -> None:
    """Raise ConfigError for releases of transformers whose routers return probabilities in place of logits."""
    if Version(transformers.__version__) < FIRST_WITH_LOGITS:
        raise ConfigError(
            f"{setting}: routers of transformers {transformers.__version__} return probabilities in place of logits; "
            f"install {FIRST_WITH_LOGITS} or later"
        )


def routed(output: object, setting: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return a router's output: logits [T, E], routing weights [T, K] and expert indices [T, K].

    Raises ConfigError if the installed transformers has routers with another output.
    """
    if not (isinstance(output, tuple) and len(output) == 3):
        raise ConfigError(
            f"{setting}: the routers of this version of transformers return no experts; install a newer one"
        )
    return output


def routers_of(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the routers of the blocks that have experts, in order."""
    return [router for block in blocks if (router := router_of(block)) is not None]


def router_of(block: nn.Module) -> nn.Module | None:
    """Return the module next to `experts`: `router` in gpt-oss, `gate` in all other families here."""
    modules = dict(block.named_modules())
    places = [name.removesuffix("experts") for name in modules if name.endswith(".experts")]
    return (modules.get(f"{places[0]}gate") or modules[f"{places[0]}router"]) if places else None
