"""Checks that the engine samples from the policy's weights.

After a weight sync both score the same probe tokens. The engine runs them as a prefill, which does not test decode
attention, sampling kernels or scheduling. So in each step the log-probabilities of samples are compared as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from colocated_grpo.batching import TrainSequence, build_micro_batch
from colocated_grpo.config.schema import FreshnessConfig
from colocated_grpo.errors import RunError
from colocated_grpo.policy.policy import Policy
from colocated_grpo.rollout.engine import RolloutEngine

# Two correct 16-bit implementations of a model differ by 0.007 on average, through rounding (mismatch/abs in
# docs/results/step_qwen3-0.6b_1xh200.json). Damaged weights must exceed that clearly.
TOLERANCE = {torch.bfloat16: 0.15, torch.float16: 0.15, torch.float32: 1e-3}


class FreshnessCheck:
    """Compares engine and policy on probe tokens after every `freshness.every`-th sync."""

    def __init__(
        self,
        policy: Policy,
        engines: Sequence[RolloutEngine],
        engine_dtype: torch.dtype,
        config: FreshnessConfig,
        *,
        temperature: float = 1.0,
    ) -> None:
        """engines: all that hold weights of their own.

        temperature: of training samples. Differences of log-probabilities grow with its inverse.
        """
        self._policy = policy
        self._engines = engines
        self._config = config
        self._tolerance = config.max_mean_diff or max(TOLERANCE[policy.dtype], TOLERANCE[engine_dtype])
        self._sample_tolerance = self._tolerance / min(1.0, temperature)
        self._syncs = 0
        self._expected: list[float] | None = None
        self._probe: list[int] = []

    def before_sync(self, probe: Sequence[int]) -> None:
        """Score the probe with the policy, before the GPU is handed to the engine. Collective."""
        due = self._config.every > 0 and self._syncs % self._config.every == 0 and len(probe) >= 2
        self._syncs += 1
        self._probe = list(probe[: self._config.probe_tokens])
        self._expected = self._policy_logprobs() if due else None

    def after_sync(self) -> float | None:
        """Return the mean |engine - policy| of the probe's log-probabilities, or None if no check is due.

        Of several engines, the largest mean. Raises RunError above the tolerance.
        """
        expected = self._expected
        return None if expected is None else max(self._check(engine, expected) for engine in self._engines)

    def _check(self, engine: RolloutEngine, expected: Sequence[float]) -> float:
        actual = engine.score(self._probe)
        differences = [abs(a - b) for a, b in zip(actual, expected, strict=True)]
        mean = sum(differences) / len(differences)
        if not mean <= self._tolerance:  # NaN fails too
            worst = max(range(len(differences)), key=differences.__getitem__)
            raise RunError(
                f"freshness: after the weight sync engine and policy disagree by {mean:.4g} on average "
                f"(limit freshness.max_mean_diff={self._tolerance:g}; worst token: engine {actual[worst]:.4f}, "
                f"policy {expected[worst]:.4f}): the engine does not have the policy's weights; look for engine "
                "arguments that transform weights (quantization)"
            )
        return mean

    def check_samples(self, mean_diff: float) -> None:
        """Raise RunError if mismatch/on_policy exceeds the tolerance at the sampling temperature.

        mean_diff: mean |sampling - policy's log-probability| over plain samples of the current weights. It leaves out
        top_p, top_k, min_p, penalties, structured output, stale samples and samples of other processes.
        """
        if self._config.every > 0 and not mean_diff <= self._sample_tolerance:  # NaN fails too
            raise RunError(
                f"mismatch/on_policy={mean_diff:.4g}: samples of the current weights have other log-probabilities in "
                f"the engine than in the policy (limit {self._sample_tolerance:g}, from freshness.max_mean_diff); if "
                "freshness/mean_diff is small, decoding, sampling or scheduling fails: try engine.enforce_eager=true"
            )

    def _policy_logprobs(self) -> list[float]:
        length = len(self._probe)
        unused = np.zeros(length - 1, np.float32)
        sequence = TrainSequence(
            token_ids=np.array(self._probe),
            scored=np.arange(1, length),
            sampling_logprobs=unused,
            advantages=unused,
            temperature=1.0,
            trained=False,
        )
        # Eager: compiling a forward pass for the shape of a probe would take seconds.
        with torch.compiler.set_stance("force_eager"):
            return self._policy.score(build_micro_batch([sequence])).tolist()
