"""Judges each batch by its own samples, before the first weight changes.

`weights/transport.py` has already compared the weights of engine and policy, bit for bit. This check covers kernels,
decoding, sampling and scheduling of the engine: it compares the engine's log-probability of each sampled token with the
log-probability from the policy's forward pass, which training computes anyway. With several updates for each batch and
`loss.old_logprobs: sampling`, no forward pass precedes the first update: each minibatch is then judged before its own.
"""

import math
from collections.abc import Callable, Sequence

import torch

from colocated_grpo.errors import RunError
from colocated_grpo.metrics import AllReduce, Metrics, reduce
from colocated_grpo.settings.schema import FreshnessConfig
from colocated_grpo.types import Group

Judge = Callable[[Metrics, float], None]
"""(metrics, moved) -> raises RunError on every rank if the samples differ too much from the policy. Collective.

metrics: statistics of a forward pass. moved: learning rate times optimizer steps since the oldest sample.
"""
MEAN, WORST = "mismatch/plain", "mismatch/worst"
# About twice the largest mean of healthy batches, more in float32: docs/results/mismatch_healthy.json.
LIMITS = {torch.bfloat16: 0.1, torch.float16: 0.1, torch.float32: 0.01}
QUANTIZED_LIMIT = 0.3
"""Limit if the engine's weights or KV cache have 8 bits or fewer."""
WORST_PER_MEAN = 5.0
"""Ratio of the limit of mismatch/worst to the limit of the mean."""
DRIFT_PER_RATE = 20_000.0
"""Each optimizer step since the tokens were sampled raises both limits by this number times the learning rate: a policy
moves while it trains, and under adaptive optimizers in proportion to the rate. Measured drift of the mean, for SmolLM2
at a rate of 1e-5: 1,200 times the rate for each step with 256 completions, up to 12,800 times with 8 completions of 8
tokens (docs/results/drift_smollm2_2cores.json)."""


def default_limit(dtypes: Sequence[torch.dtype], *, quantized: bool, exact: bool = False) -> float:
    """Return the limit of the mean.

    dtypes: types of policy and engine. quantized: True if the engine's weights or its KV cache are quantized. exact:
    True with `numerics: exact`, where a token that differs at all is an error.
    """
    if exact:
        return 0.0
    return QUANTIZED_LIMIT if quantized else max(LIMITS[dtype] for dtype in dtypes)


def staleness_of(groups: Sequence[Group], policy_version: int) -> int:
    """Return the optimizer steps since the oldest plainly sampled sequence was sampled; 0 without such sequences."""
    sequences = (one for group in groups for episode in group.rollouts for one in episode.sequences)
    return max((policy_version - one.policy_version for one in sequences if one.plain), default=0)


def make_judge(
    config: FreshnessConfig, limit: float, temperature: float, all_reduce: tuple[AllReduce, AllReduce]
) -> Judge:
    """Return the check of each minibatch's samples; a no-op with `every: 0`.

    limit: limit of the mean, unless it is configured. all_reduce: one for sums, one for maxima. temperature: of
    training samples. Differences of log-probabilities grow with its inverse.
    """
    if config.every == 0:
        return lambda metrics, moved: None
    mean_limit = (config.max_mean_diff or limit) / min(1.0, temperature)

    def judge(metrics: Metrics, moved: float) -> None:
        found = reduce(metrics.only((MEAN, WORST)), *all_reduce)
        drift = DRIFT_PER_RATE * moved
        for name, limit in ((MEAN, mean_limit + drift), (WORST, WORST_PER_MEAN * mean_limit + drift)):
            value = found.get(name, 0.0)
            if not math.isfinite(value):
                raise RunError(
                    f"{name}={value}: the log-probabilities of the engine or of the policy are not finite; this "
                    "optimizer step was not taken. Resume from the last checkpoint with a lower policy.lr or "
                    "policy.grad_clip"
                )
            if value > limit:
                cause = "decoding, sampling or scheduling fails: try engine.enforce_eager=true"
                if limit == 0:
                    cause = "an operator differs: set numerics=fast, or find it with a checkout's "
                    cause += "`python -m benchmarks.exactness`"
                raise RunError(
                    f"{name}={value:.4g}: samples have other log-probabilities in the engine than in the policy (limit "
                    f"{limit:g}, from freshness.max_mean_diff); this optimizer step was not taken. The weights passed "
                    f"their last comparison, so {cause}"
                )

    return judge
