"""One copy of the weights: the policy computes with the engine's own parameters, so a sync moves nothing."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from colocated_grpo.errors import RunError
from colocated_grpo.runtime.distributed import World
from colocated_grpo.weights.colocated import ColocatedSync
from colocated_grpo.weights.plan import Target
from colocated_grpo.weights.transport import Due, TransportCheck


class SharedSync:
    """A sync without copies: each optimizer step writes the engine's weights."""

    def __init__(self, check: TransportCheck | None, check_every: int) -> None:
        """check: compares the masters with the engine's tensors. None if they are the same tensors."""
        self._check = check
        self._check_due = Due(check_every)

    def sync(self) -> None:
        """Wait for the kernels that write the weights.

        An engine in another process does not see the streams of this process. `RolloutEngine.weights_changed`, which
        the caller runs next, drops cached prefixes. Raises RunError if the engine's tensors differ from the masters
        cast to the engine's type.
        """
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if self._check_due() and self._check is not None:
            self._check.verify()


Adopt = Callable[[Mapping[str, Tensor]], bool]
"""Makes the policy compute with these tensors, by checkpoint name; False if it cannot."""


def share(
    copies: ColocatedSync, published: Callable[[], Mapping[str, Tensor]], adopt: Adopt, world: World, check_every: int
) -> SharedSync:
    """Replace the policy's compute weights by views of the engine's parameters.

    published: `Weights.published`.

    The engine's weights must be mapped; its KV cache need not be. Raises RunError if the model has no verified plan, or
    if the policy cannot compute with the engine's tensors.
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
    return verified_sync(published(), {name: target.view for name, target in plan.targets.items()}, world, check_every)


def verified_sync(
    published: Mapping[str, Tensor], views: Mapping[str, Tensor], world: World, check_every: int
) -> SharedSync:
    """Return the sync of a policy that computes with `views`. published: `Weights.published`."""
    masters = {name: master for name, master in published.items() if master.data_ptr() != views[name].data_ptr()}
    if not masters:
        return SharedSync(None, check_every)
    targets = {name: Target(view=views[name], dim=0, start=0) for name in masters}
    dtype = next(iter(targets.values())).view.dtype
    return SharedSync(TransportCheck(masters, targets, dtype, world), check_every)
