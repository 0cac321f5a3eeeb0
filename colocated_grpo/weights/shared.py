"""One copy of the weights: the policy computes with the engine's own parameters, so a sync moves nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from colocated_grpo.errors import RunError
from colocated_grpo.weights.colocated import ColocatedSync


class SharedSync:
    """A sync without copies: each optimizer step writes the engine's weights."""

    def sync(self) -> None:
        """Do nothing. `RolloutEngine.weights_changed`, which the caller runs next, drops cached prefixes."""


def share(copies: ColocatedSync, adopt: Callable[[Mapping[str, Tensor]], bool]) -> SharedSync:
    """Replace the policy's compute weights by views of the engine's parameters.

    The engine's weights must be mapped; its KV cache need not be. adopt: takes the views by checkpoint name; False if
    the policy cannot compute with them. Raises RunError in that case, and for models without a verified plan.
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
