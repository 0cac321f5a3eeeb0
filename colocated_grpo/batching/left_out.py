"""Groups without a gradient that are left out of the forward pass, as far as metrics need them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from colocated_grpo.batching.plan import Outline
from colocated_grpo.metrics import Stat
from colocated_grpo.types import Group


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Trained tokens of a minibatch that are not in the forward pass, over all ranks."""

    tokens: int = 0
    known: int = 0
    """Tokens of rollouts with log-probabilities from the sampler."""
    surprisal: float = 0.0
    """Sum of their negative log-probabilities."""

    def stats(self, names: Iterable[str], world_size: int) -> dict[str, Stat]:
        """Return one rank's part of the metrics in `names` that count every trained token, as TRL does.

        The mean of -log p over tokens sampled from p is an unbiased estimate of the entropy of p. No token of a group
        with advantage 0 is clipped.
        """
        entropy = Stat.mean(self.surprisal / world_size, self.known / world_size)
        unclipped = Stat.mean(0.0, self.tokens / world_size)
        clipped = (name for name in names if name.startswith("clip_fraction/"))
        return {"entropy": entropy} | dict.fromkeys(clipped, unclipped)


def left_out(groups: Sequence[Group], outlines: Iterable[Outline]) -> LeftOut:
    """Sum over the rollouts of `outlines`. groups: all of the batch, indexed by Outline.group."""
    tokens = known = 0
    surprisal = 0.0
    for outline in outlines:
        logprobs = groups[outline.group].rollouts[outline.sibling].sampling_logprobs
        tokens += outline.loss_tokens
        # The built-in sum, because there may be millions of tokens. Those that are not sampled have 0.0.
        if outline.trained and logprobs is not None and math.isfinite(total := sum(logprobs)):
            known += outline.loss_tokens
            surprisal -= total
    return LeftOut(tokens=tokens, known=known, surprisal=surprisal)
