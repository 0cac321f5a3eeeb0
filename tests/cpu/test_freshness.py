"""The freshness check passes if engine and policy agree after a sync, and ends the run otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from colocated_grpo.config.schema import FreshnessConfig
from colocated_grpo.errors import RunError
from colocated_grpo.freshness import FreshnessCheck
from colocated_grpo.runtime.distributed import World
from tests.support.engines import PROBE, Pair
from tests.support.fakes import FakeEngine
from tests.support.ranks import run_on_ranks
from tests.support.small_policy import config_of, policy_of
from tests.support.training_runs import tiny_model


def one_changed_parameter(world: World, folder: Path) -> dict[str, Any]:
    pair = Pair(world, folder)
    pair.write()
    check = FreshnessCheck(pair.policy, [pair.engine], torch.float32, FreshnessConfig())
    check.before_sync(PROBE)
    facts: dict[str, Any] = {"fresh": check.after_sync(), "errors": {}}
    for name in (
        "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.norm.weight",
    ):
        check.before_sync(PROBE)
        pair.write()
        pair.engine.model.get_parameter(name).data.mul_(1.1)
        try:
            check.after_sync()
        except RunError as error:
            facts["errors"][name] = str(error)
    pair.engine.close()
    return facts


def test_any_wrong_engine_parameter_ends_the_run_with_both_numbers():
    [facts] = run_on_ranks(one_changed_parameter, 1, tiny_model(), timeout=300.0)
    assert facts["fresh"] < 1e-5
    assert len(facts["errors"]) == 3
    for line in facts["errors"].values():
        assert line.startswith("freshness: after the weight sync engine and policy disagree by 0.")
        assert "(limit freshness.max_mean_diff=0.001; worst token: engine -" in line
        assert ", policy -" in line
        assert "\n" not in line


def test_scoring_a_probe_compiles_nothing(world, model_folder):
    policy = policy_of(config_of(model_folder(), policy={"compile": True}), world)
    check = FreshnessCheck(policy, [FakeEngine()], torch.float32, FreshnessConfig())
    counters.clear()
    check.before_sync(PROBE)
    assert counters["stats"]["unique_graphs"] == 0


class Scorer:
    """A policy under which every token has the same log-probability."""

    dtype = torch.float32

    def __init__(self, logprob: float) -> None:
        self.logprob = logprob
        self.lengths: list[int] = []

    def score(self, micro_batch: Any) -> torch.Tensor:
        self.lengths.append(len(micro_batch.loss_inputs.sampling_logprobs_N))
        return torch.full((self.lengths[-1],), self.logprob)


def outcome(policy: Scorer, config: FreshnessConfig, probe: Sequence[int] = PROBE) -> float | None:
    """Return the result of one sync; FakeEngine scores every token -1."""
    check = FreshnessCheck(policy, [FakeEngine()], torch.float32, config)
    check.before_sync(probe)
    return check.after_sync()


def test_the_limit_applies_to_the_mean_difference_and_is_configurable():
    assert outcome(Scorer(-1.0009), FreshnessConfig()) == pytest.approx(0.0009, rel=1e-3)
    with pytest.raises(RunError, match=r"disagree by 0.0011.*engine -1.0000, policy -1.0011"):
        outcome(Scorer(-1.0011), FreshnessConfig())
    assert outcome(Scorer(-1.4), FreshnessConfig(max_mean_diff=0.5)) == pytest.approx(0.4)


def test_nan_log_probabilities_fail_the_check():
    with pytest.raises(RunError, match="disagree by nan"):
        outcome(Scorer(math.nan), FreshnessConfig())


def test_only_every_nth_sync_is_checked():
    policy = Scorer(-1.0)
    check = FreshnessCheck(policy, [FakeEngine()], torch.float32, FreshnessConfig(every=3))
    checked = []
    for _ in range(7):
        check.before_sync(PROBE)
        checked.append(check.after_sync() is not None)
    assert checked == [True, False, False, True, False, False, True]


def test_a_long_probe_is_truncated_and_a_short_one_or_a_disabled_check_is_skipped():
    policy = Scorer(-1.0)
    assert outcome(policy, FreshnessConfig(probe_tokens=4)) == 0
    assert policy.lengths == [3]
    assert outcome(policy, FreshnessConfig(), probe=[7]) is None
    assert outcome(policy, FreshnessConfig(every=0)) is None


def samples_pass(mean_diff: float, *, temperature: float = 1.0, **config: float) -> bool:
    check = FreshnessCheck(
        Scorer(-1.0), [FakeEngine()], torch.float32, FreshnessConfig(**config), temperature=temperature
    )
    try:
        check.check_samples(mean_diff)
    except RunError as error:
        assert str(error).startswith(f"mismatch/plain={mean_diff:.4g}: ") and "\n" not in str(error)
        return False
    return True


def test_on_policy_samples_have_the_limit_of_the_probe():
    assert samples_pass(0.0009) and not samples_pass(0.0011)
    assert samples_pass(0.4, max_mean_diff=0.5) and not samples_pass(0.6, max_mean_diff=0.5)
    assert not samples_pass(math.nan)


def test_the_limit_of_samples_grows_with_the_inverse_of_a_low_temperature():
    assert samples_pass(0.0015, temperature=0.5) and not samples_pass(0.0025, temperature=0.5)
    assert not samples_pass(0.0015, temperature=2.0)


def test_without_freshness_checks_samples_are_not_checked_either():
    assert samples_pass(7.0, every=0)
