"""A second set of weights for the engine: a frozen opponent for games against the policy."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from colocated_grpo.runtime.distributed import local_part
from colocated_grpo.weights.colocated import ColocatedSync

Parameters = Mapping[str, Tensor]

NO_VERSION = -1
"""policy_version of the opponent's completions."""


class FrozenOpponent:
    """Loads its weights into the engine between two batches, so that no second engine is needed.

    Every method is collective. No request may be running when the weights change.
    """

    def __init__(
        self,
        parameters: Parameters,
        policy: Parameters,
        into_engine: ColocatedSync,
        weights_changed: Callable[[int], None],
        restore_policy: Callable[[], None],
        refresh_every: int,
    ) -> None:
        """parameters: the frozen weights, named and sharded like the policy's weights, in host or device memory.

        into_engine: the sync of these parameters. weights_changed: `RolloutEngine.weights_changed`. restore_policy:
        writes the policy's weights into the engine again. refresh_every: steps between refreshes; 0: never.
        """
        self.parameters = parameters
        self._policy = policy
        self._into_engine = into_engine
        self._weights_changed = weights_changed
        self._restore_policy = restore_policy
        self._refresh_every = refresh_every

    @contextmanager
    def plays(self) -> Generator[None]:
        """Sample with the opponent's weights inside the context. The engine must be awake.

        The opponent's weights stay loaded after an error: restoring the policy's weights is collective, and other ranks
        may not have failed.
        """
        self._into_engine.sync()
        self._weights_changed(NO_VERSION)
        yield
        self._restore_policy()

    @torch.no_grad()
    def refresh(self, step: int) -> None:
        """Copy the policy's weights if a refresh is due at `step`. A run resumed at `step` repeats the refresh."""
        if self._refresh_every and step and step % self._refresh_every == 0:
            own = [local_part(parameter) for parameter in self.parameters.values()]
            torch._foreach_copy_(own, [local_part(parameter) for parameter in self._policy.values()])
