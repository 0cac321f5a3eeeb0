"""One copy of the weights: the policy computes with the engine's own parameters, so a sync moves nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from colocated_grpo.errors import RunError
from colocated_grpo.weights.colocated import ColocatedSync


class SharedSync:
    """A sync without copies: each optimizer step writes the engine's weights."""

    def sync(self) -> None:
        """Wait for the kernels that write the weights: the engine's process does not see this one's streams.

        `RolloutEngine.weights_changed`, which the caller runs next, drops cached prefixes.
        """
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()


Adopt = Callable[[Mapping[str, Tensor]], bool]
"""Makes the policy compute with these tensors, by checkpoint name; False if it cannot."""


def share(copies: ColocatedSync, adopt: Adopt) -> SharedSync:
    """Replace the policy's compute weights by views of the engine's parameters.

    The engine's weights must be mapped; its KV cache need not be. Raises RunError for models without a verified plan,
    and where the policy cannot compute with the engine's tensors.
    """
    copies.sync()  # builds and verifies the plan
    plan = copies.plan
    if plan is None or not adopt({name: target.view for name, target in plan.targets.items()}):
        raise RunError(
            "weights=shared: the engine stores this model's weights in another layout than the checkpoint; "
            "set weights=copied"
        )
    for rows in plan.padding:
        rows.zero_()  # once is enough: no sync writes to them later
    return SharedSync()


def share_exported(views: Mapping[str, Tensor], prefix: str, adopt: Adopt) -> SharedSync:
    """Replace the policy's compute weights by a server's parameters. Raises RunError where they do not fit.

    prefix: the base model's, such as "model"; names of the views may have or lack it.
    """
    start = f"{prefix}."
    named = {alias: view for name, view in views.items() for alias in (name, name.removeprefix(start), start + name)}
    if not adopt(named):
        raise RunError(
            "engine.bridge=shared: the server's weights have other names, shapes, types or devices than the policy's; "
            "start it with the run's model and --dtype, on the same device"
        )
    return SharedSync()
