"""A second set of weights for the engine: a frozen opponent that plays against the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from colocated_grpo.runtime.distributed import local_part
from colocated_grpo.weights.colocated import ColocatedSync

Parameters = Mapping[str, Tensor]

NO_VERSION = -1
"""Policy version of what the opponent samples."""


class Opponent:
    """Takes the engine over between two batches, when nothing is under way: all ranks change together, and no second
    engine holds memory. Every method is collective.
    """

    def __init__(
        self,
        parameters: Parameters,
        policy: Parameters,
        into_engine: ColocatedSync,
        weights_changed: Callable[[int], None],
        put_policy_back: Callable[[], None],
        refresh_every: int,
    ) -> None:
        """parameters: the frozen weights, named and sharded as the policy's, wherever they rest.

        into_engine: writes them. weights_changed: tells the engine so. refresh_every: steps; 0: never.
        """
        self.parameters = parameters
        self._policy = policy
        self._into_engine = into_engine
        self._weights_changed = weights_changed
        self._put_policy_back = put_policy_back
        self._refresh_every = refresh_every

    @contextmanager
    def plays(self) -> Iterator[None]:
        """The engine, awake, samples with the opponent's weights.

        An error leaves them there: to put the policy's back takes all ranks, and the others may not have met it.
        """
        self._into_engine.sync()
        self._weights_changed(NO_VERSION)
        yield
        self._put_policy_back()

    @torch.no_grad()
    def refresh(self, step: int) -> None:
        """Become what the policy is before `step`, where that is due. A run resumed at `step` does the same again."""
        if self._refresh_every and step and step % self._refresh_every == 0:
            own = [local_part(parameter) for parameter in self.parameters.values()]
            torch._foreach_copy_(own, [local_part(parameter) for parameter in self._policy.values()])
