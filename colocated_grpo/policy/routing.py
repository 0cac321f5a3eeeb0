"""Routing replay: experts chosen by the engine in place of the policy's own choice.

The policy still computes the weight of each expert from its own router's logits, so gradients reach the router.

Shapes: T tokens, E experts, K experts per token, L layers with experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from colocated_grpo.batching import PackedRoutes
from colocated_grpo.config.errors import ConfigError
from colocated_grpo.metrics import Stat

FIRST_WITH_LOGITS = Version("5.6")
"""First minor release of transformers after pull request 45131. Before it, most routers returned probabilities."""
Weigh = Callable[[Any, Tensor, Tensor], Tensor]
"""(router, its logits [T, E], experts [T, K]) -> their weights [T, K], as the router of the family computes them."""


def softmax_weights(router: Any, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """Return the experts' probabilities, normalised unless the family has a setting for it that says no."""
    weights_TK = logits_TE.softmax(-1, dtype=torch.float32).gather(1, experts_TK)
    return weights_TK / weights_TK.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights_TK


def softmax_of_chosen(router: Any, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """Return the softmax of the experts' own logits, as in gpt-oss."""
    return logits_TE.gather(1, experts_TK).softmax(-1)


def sigmoid_weights(router: Any, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """Return the experts' scores without the bias that is only for choosing, as in DeepSeek-V3 and GLM-4.5."""
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
"""By model type."""


class Replay:
    """Replaces the experts that one layer's router has chosen.

    A forward hook does so, which sees the router's logits, weights and experts; the families' code stays as it is.
    """

    def __init__(self, router: nn.Module, layer: int, weigh: Weigh) -> None:
        """layer: position among the layers with experts."""
        self._layer = layer
        self._weigh = weigh
        self._routes: PackedRoutes | None = None
        self._counts: tuple[Tensor | float, Tensor | float] = (0.0, 0.0)
        router.register_forward_hook(self._replace)

    def run(self, block: nn.Module, routes: PackedRoutes, *args: Any, **kwargs: Any) -> Any:
        """Run the block with these routes. Under activation checkpointing, backward calls this again."""
        self._routes = routes
        try:
            return block(*args, **kwargs)
        finally:
            self._routes = None

    def take_counts(self) -> Stat:
        """Return the fraction of recorded tokens whose experts have been replaced since the last call."""
        replaced, recorded = self._counts
        self._counts = (0.0, 0.0)
        return Stat.mean(replaced, recorded)

    def _replace(self, router: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        if self._routes is None:
            return output
        logits_TE, own_weights_TK, own_experts_TK = routed(output, "policy.routing_replay=true")
        experts_TK = self._routes.experts_LTK[self._layer].to(own_experts_TK.dtype)
        # Where both chose the same experts, the order of the policy's choice gives the same bits as without replay.
        agrees_T = (experts_TK.sort(-1).values == own_experts_TK.sort(-1).values).all(-1)
        replaced_T1 = (self._routes.recorded_T & ~agrees_T)[:, None]
        weights_TK = self._weigh(router, logits_TE, experts_TK).to(own_weights_TK.dtype)
        replaced, recorded = self._counts
        self._counts = replaced + replaced_T1.sum(), recorded + self._routes.recorded_T.sum()
        return (
            logits_TE,
            torch.where(replaced_T1, weights_TK, own_weights_TK),
            torch.where(replaced_T1, experts_TK, own_experts_TK),
        )


def replays_of(blocks: nn.ModuleList, model_type: str) -> list[Replay | None]:
    """Prepare the routers of the blocks for replay. Returns one entry for each block; None for those without experts.

    Raises ConfigError for families whose routers are not known.
    """
    check_returns_logits("policy.routing_replay=true")
    weigh = WEIGHTS.get(model_type)
    if weigh is None:
        raise ConfigError(f"policy.routing_replay=true: not supported for model type {model_type!r}")
    routers = [router_of(block) for block in blocks]
    layers = count()
    return [None if router is None else Replay(router, next(layers), weigh) for router in routers]


def check_returns_logits(setting: str) -> None:
    """Raise ConfigError for releases of transformers whose routers return probabilities in place of logits."""
    if Version(transformers.__version__) < FIRST_WITH_LOGITS:
        raise ConfigError(
            f"{setting}: routers of transformers {transformers.__version__} return probabilities in place of logits; "
            f"install {FIRST_WITH_LOGITS} or later"
        )


def routed(output: Any, setting: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return a router's output: logits [T, E], routing weights [T, K] and expert indices [T, K].

    Raises ConfigError if the installed transformers has routers with another output.
    """
    if not (isinstance(output, tuple) and len(output) == 3):
        raise ConfigError(
            f"{setting}: the routers of this version of transformers return no experts; install a newer one"
        )
    return output


def router_of(block: nn.Module) -> nn.Module | None:
    """Return the module that stands beside `experts`: `router` in gpt-oss, `gate` in all other families here."""
    modules = dict(block.named_modules())
    places = [name.removesuffix("experts") for name in modules if name.endswith(".experts")]
    return (modules.get(f"{places[0]}gate") or modules[f"{places[0]}router"]) if places else None


def running(block: nn.Module, replay: Replay | None, routes: PackedRoutes | None) -> Callable[..., Any]:
    """Return the block, or a function in its place that replays the routes."""
    return block if replay is None or routes is None else partial(replay.run, block, routes)
