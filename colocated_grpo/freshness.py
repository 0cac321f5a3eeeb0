"""Judges each batch by its own samples, before the first weight changes.

`weights/transport.py` has shown that the engine's weights are the policy's, bit for bit. What is left are the engine's
kernels, decoding, sampling and scheduling: the log-probability of each sampled token is compared with the one of the
policy's forward pass, which training computes in any case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from colocated_grpo.errors import RunError
from colocated_grpo.metrics import AllReduce, Metrics, reduce
from colocated_grpo.settings.schema import FreshnessConfig
from colocated_grpo.types import Group

Judge = Callable[[Metrics, float], None]
"""Collective: `SampleCheck.judge`, or the same without effect."""
MEAN, WORST = "mismatch/plain", "mismatch/worst"
# About twice the largest mean of healthy batches, more in float32: docs/results/mismatch_healthy.json.
LIMITS = {torch.bfloat16: 0.1, torch.float16: 0.1, torch.float32: 0.01}
QUANTIZED_LIMIT = 0.3
"""Where the engine's weights or KV cache have 8 bits or fewer."""
WORST_PER_MEAN = 5.0
"""Limit of mismatch/worst over that of the mean."""
DRIFT_PER_RATE = 5000.0
"""Times the learning rate, this is added to both limits for each optimizer step since the tokens were sampled: a policy
moves while it trains, under adaptive optimizers in proportion to the rate. Seen for the mean of SmolLM2 at 1e-5: 1,200
times the rate."""


def default_limit(dtypes: Sequence[torch.dtype], *, quantized: bool) -> float:
    """Return the limit of the mean. dtypes: of policy and engine. quantized: the engine's weights or its KV cache."""
    return QUANTIZED_LIMIT if quantized else max(LIMITS[dtype] for dtype in dtypes)


class SampleCheck:
    """Compares sampling log-probabilities with the policy's, for each optimizer step."""

    def __init__(
        self,
        limit: float,
        temperature: float,
        all_reduce: tuple[AllReduce, AllReduce],
    ) -> None:
        """limit: of the mean. all_reduce: of sums and of maxima.

        temperature: of training samples. Differences of log-probabilities grow with its inverse.
        """
        self._limit = limit / min(1.0, temperature)
        self._all_reduce = all_reduce

    def judge(self, metrics: Metrics, moved: float) -> None:
        """Raise RunError on every rank if the samples differ too much from the policy. Collective.

        metrics: of a forward pass. moved: learning rate times the optimizer steps since the oldest token was sampled.
        """
        found = reduce(metrics.only((MEAN, WORST)), *self._all_reduce)
        drift = DRIFT_PER_RATE * moved
        for name, limit in ((MEAN, self._limit + drift), (WORST, WORST_PER_MEAN * self._limit + drift)):
            value = found.get(name, 0.0)
            if not math.isfinite(value):
                raise RunError(
                    f"{name}={value}: the log-probabilities of the engine or of the policy are not finite; this "
                    "optimizer step was not taken. Resume from the last checkpoint with a lower policy.lr or "
                    "policy.grad_clip"
                )
            if value > limit:
                raise RunError(
                    f"{name}={value:.4g}: samples have other log-probabilities in the engine than in the policy (limit "
                    f"{limit:g}, from freshness.max_mean_diff); this optimizer step was not taken. The weights passed "
                    "their last comparison, so decoding, sampling or scheduling fails: try engine.enforce_eager=true"
                )


def staleness_of(groups: Sequence[Group], policy_version: int) -> int:
    """Return the most optimizer steps since a plainly sampled sequence was sampled; 0 without any."""
    sequences = (one for group in groups for episode in group.rollouts for one in episode.sequences)
    return max((policy_version - one.policy_version for one in sequences if one.plain), default=0)


def make_judge(
    config: FreshnessConfig,
    limit: float,
    temperature: float,
    all_reduce: tuple[AllReduce, AllReduce],
) -> Judge:
    """Return `SampleCheck.judge` with the configured limit or else with `limit`; with `every: 0` a judge of nothing."""
    if config.every == 0:
        return lambda metrics, moved: None
    return SampleCheck(config.max_mean_diff or limit, temperature, all_reduce).judge
