"""One copy of the weights: the policy computes with the engine's own parameters, so that a sync moves nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from colocated_grpo.errors import RunError
from colocated_grpo.weights.colocated import ColocatedSync


class SharedSync:
    """Stands where `ColocatedSync` would: each optimizer step has written the engine's weights already."""

    def sync(self) -> None:
        """Nothing to do: what was computed with older weights is forgotten by `RolloutEngine.weights_changed`."""


def share(copies: ColocatedSync, adopt: Callable[[Mapping[str, Tensor]], bool]) -> SharedSync:
    """Let the policy `adopt` the engine's parameters, as the plan of `copies` splits them. The engine must be mapped.

    Raises RunError where there is no plan, or the policy cannot compute with its views.
    """
    copies.sync()  # builds the plan and proves it
    plan = copies.plan
    if plan is None or not adopt({name: target.view for name, target in plan.targets.items()}):
        raise RunError(
            "weights=shared: the engine does not hold this model's weights as the checkpoint has them; "
            "use weights=copied"
        )
    for rows in plan.padding:
        rows.zero_()  # once: nobody else writes them
    return SharedSync()
