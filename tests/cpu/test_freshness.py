"""Samples whose log-probabilities are not the policy's end the run before the optimizer step."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colocated_grpo.batching.micro_batch import MicroBatch
from colocated_grpo.batching.pack import Batch
from colocated_grpo.environments.chat import ChatCodec, Conversation
from colocated_grpo.errors import RunError
from colocated_grpo.freshness import DRIFT_PER_RATE, QUANTIZED_LIMIT, Judge, default_limit, make_judge, staleness_of
from colocated_grpo.losses import parts
from colocated_grpo.metrics import Metrics, Stat, reduce
from colocated_grpo.settings.schema import FreshnessConfig
from colocated_grpo.tools.make_model import build_char_tokenizer
from colocated_grpo.trainer import update, with_logprobs
from colocated_grpo.types import Prompt, Score
from tests.support.loss_inputs import random_inputs
from tests.support.small_policy import config_of, group_of, pack_for, policy_of, random_groups, rollout_of

LIMIT = 0.15
RATE = 2e-5
DRIFT = DRIFT_PER_RATE * RATE


def check_of(*, limit: float = LIMIT, temperature: float = 1.0, **config: float) -> Judge:
    keep = lambda tensor: tensor  # noqa: E731
    return make_judge(FreshnessConfig(**config), limit, temperature, (keep, keep))


def error_of(check: Judge, plain: float, worst: float = 0.0, staleness: int = 0) -> str | None:
    metrics = Metrics("cpu")
    metrics.add({"mismatch/plain": Stat.mean(plain, 1.0), "mismatch/worst": Stat.max(worst), "loss": Stat.mean(1, 1)})
    try:
        check(metrics, staleness * RATE)
    except RunError as error:
        return str(error)
    return None


def test_the_mean_over_all_tokens_and_the_worst_completion_have_limits():
    check = check_of()
    assert error_of(check, 0.149, 0.749) is None
    assert error_of(check, 0.151).startswith("mismatch/plain=0.151: ")
    assert error_of(check, 0.01, 0.76).startswith("mismatch/worst=0.76: ")


def test_the_line_gives_limit_setting_and_advice():
    line = error_of(check_of(max_mean_diff=0.02), 0.021)
    assert "(limit 0.02, from freshness.max_mean_diff); this optimizer step was not taken." in line
    assert "try engine.enforce_eager=true" in line and "\n" not in line


def test_with_exact_numerics_any_difference_on_policy_ends_the_run():
    check = check_of(limit=default_limit([torch.bfloat16], quantized=False, exact=True))
    assert error_of(check, 0.0) is None
    assert "benchmarks.exactness" in error_of(check, 1e-9)
    assert error_of(check, 1e-9, staleness=1) is None  # the policy has moved since


@pytest.mark.parametrize("values", [{"plain": math.nan}, {"plain": 0.0, "worst": math.inf}])
def test_values_that_are_not_finite_end_the_run_without_blaming_the_engine_alone(values):
    line = error_of(check_of(), **values)
    assert "the log-probabilities of the engine or of the policy are not finite" in line and "policy.lr" in line


def test_a_configured_limit_replaces_the_default_for_both():
    check = check_of(max_mean_diff=0.5)
    assert error_of(check, 0.4, 2.4) is None
    assert error_of(check, 0.6) is not None and error_of(check, 0.4, 2.6) is not None


def test_a_low_temperature_widens_the_limits_and_a_high_one_does_not_narrow_them():
    assert error_of(check_of(temperature=0.5), 0.29, 1.4) is None
    assert error_of(check_of(temperature=0.5), 0.31) is not None
    assert error_of(check_of(temperature=2.0), 0.149) is None


def test_samples_of_older_weights_have_room_for_the_policys_own_movement():
    check = check_of()
    assert error_of(check, LIMIT + 2 * DRIFT - 0.01, staleness=2) is None
    assert error_of(check, LIMIT + 2 * DRIFT + 0.01, staleness=2) is not None
    assert error_of(check, 0.0, 5 * LIMIT + 2 * DRIFT + 0.01, staleness=2) is not None


@pytest.mark.parametrize(("moved", "plain", "worst"), [(1e-5, 0.0869, 0.0577), (3e-5, 0.3161, 0.3266)])
def test_the_drift_of_a_healthy_run_with_small_batches_is_within_the_limits(moved, plain, worst):
    """Measured with SmolLM2 in float32, sync_frequency 4, 8 completions of 8 tokens a step."""
    check = check_of(limit=default_limit([torch.float32], quantized=False))
    assert error_of(check, plain, worst, staleness=moved / RATE) is None


def test_nothing_is_judged_without_plain_samples_or_without_checks():
    empty = Metrics("cpu")
    empty.add({"mismatch/plain": Stat.mean(0.0, 0.0)})
    check_of()(empty, 0.0)
    assert error_of(check_of(every=0), 7.0, 7.0) is None


def test_default_limits_follow_the_less_precise_side():
    assert default_limit([torch.float32, torch.float32], quantized=False) == 0.01
    assert default_limit([torch.float32, torch.bfloat16], quantized=False) == 0.1
    assert default_limit([torch.bfloat16, torch.bfloat16], quantized=True) == QUANTIZED_LIMIT


def test_staleness_counts_updates_since_the_oldest_plain_sequence_was_sampled():
    plain = replace(rollout_of([1], [2]), plain=True, policy_version=4)
    older = replace(plain, policy_version=1, further=[replace(plain, policy_version=2)])
    assert staleness_of([group_of(0, [plain, older]), group_of(1, [rollout_of([1], [2])])], 5) == 5 - 1
    assert staleness_of([group_of(0, [plain])], 5) == 5 - 4
    assert staleness_of([group_of(0, [rollout_of([1], [2])])], 5) == 0


def test_an_episode_that_failed_before_its_first_message_is_not_stale():
    """Otherwise it would raise the limits of the whole batch by all steps of the run."""
    codec = ChatCodec(build_char_tokenizer())
    prompt = Prompt(index=0, token_ids=[1, 2], text="", item={}, source="own")
    failed = Conversation(prompt, codec, 8, None).rollout(Score(reward=None), 1.0, plain=True)
    plain = replace(rollout_of([1], [2]), plain=True, policy_version=1000)
    assert staleness_of([group_of(0, [failed, plain])], 1000) == 0


def statistics(distances: list[list[float]], *, plain: list[bool]) -> dict[str, Stat]:
    """Return the metrics of completions whose tokens have these differences."""
    flat = torch.tensor([distance for completion in distances for distance in completion])
    sequence = torch.tensor([index for index, completion in enumerate(distances) for _ in completion])
    inputs = replace(
        random_inputs(0, [len(completion) for completion in distances]),
        sequence_N=sequence,
        num_sequences=len(distances),
        loss_mask_N=torch.ones(len(flat)),
        sampling_logprobs_N=torch.full((len(flat),), -1.0),
        old_logprobs_N=flat - 1.0,
        plain_N=torch.tensor(plain)[sequence],
    )
    return parts.mismatch(inputs)


def test_only_plain_tokens_count_and_a_short_completion_weighs_as_if_it_had_sixteen_tokens():
    found = statistics([[0.1] * 20, [-1.6] * 2, [9.0] * 4], plain=[True, True, False])
    total, count = found["mismatch/plain"].parts
    assert float(total / count) == pytest.approx((2.0 + 3.2) / 22)
    assert float(found["mismatch/worst"].parts[0]) == pytest.approx(3.2 / 16)


def test_one_wrong_completion_is_seen_among_many():
    found = statistics([[0.01] * 30 for _ in range(63)] + [[1.2] * 30], plain=[True] * 64)
    assert float(found["mismatch/worst"].parts[0]) == pytest.approx(1.2)
    assert float(found["mismatch/plain"].parts[0] / found["mismatch/plain"].parts[1]) < 0.03


def run_of_two_minibatches(world, folder, **loss: Any) -> SimpleNamespace:
    """What the loop reads of a run that takes two optimizer steps for each batch."""
    config = config_of(folder, batch={"minibatches": 2}, policy={"lr": 1e-9}, loss={"type": "grpo", **loss})
    judge = make_judge(FreshnessConfig(), LIMIT, 1.0, (world.sum_, world.max_))
    policy = policy_of(config, world)
    return SimpleNamespace(config=config, world=world, policy=policy, reference=None, judge_samples=judge)


def faulty_batch(run: SimpleNamespace, minibatch: int) -> Batch:
    """Return plain samples of the policy. The engine's log-probabilities are wrong in one minibatch."""

    def recorded(index: int, micro_batch: MicroBatch) -> MicroBatch:
        inputs = micro_batch.loss_inputs
        wrong = 1.0 if index == minibatch else 0.0
        sampled_N = run.policy.score(micro_batch) + wrong
        inputs = replace(inputs, sampling_logprobs_N=sampled_N, plain_N=torch.ones_like(inputs.loss_mask_N))
        return replace(micro_batch, loss_inputs=inputs)

    batch = pack_for(run.world, random_groups(4, 4), run.config)
    parts = [
        replace(part, micro_batches=[recorded(index, each) for each in part.micro_batches])
        for index, part in enumerate(batch.minibatches)
    ]
    return replace(batch, minibatches=parts)


@pytest.mark.parametrize("minibatch", [0, 1])
def test_all_minibatches_of_a_batch_are_judged_before_its_first_update(world, model_folder, minibatch):
    run = run_of_two_minibatches(world, model_folder("qwen3"))
    with pytest.raises(RunError, match=r"^mismatch/plain=1: "):
        update(run, with_logprobs(run, faulty_batch(run, minibatch)), staleness=0)
    assert run.policy.version == 0


def test_with_ratios_against_the_sampler_a_minibatch_is_judged_before_its_own_update(world, model_folder):
    """No log-probabilities of the policy from before the batch exist."""
    run = run_of_two_minibatches(world, model_folder("qwen3"), old_logprobs="sampling")
    with pytest.raises(RunError, match=r"^mismatch/plain=1: "):
        update(run, with_logprobs(run, faulty_batch(run, 1)), staleness=0)
    assert run.policy.version == 1


@pytest.mark.parametrize("old_logprobs", ["trainer", "sampling"])
def test_healthy_minibatches_pass_and_keep_their_metrics(world, model_folder, old_logprobs):
    run = run_of_two_minibatches(world, model_folder("qwen3"), old_logprobs=old_logprobs)
    metrics = update(run, with_logprobs(run, faulty_batch(run, minibatch=-1)), staleness=0)
    assert run.policy.version == 2
    found = reduce(metrics, world.sum_, world.max_)
    assert found["mismatch/plain"] < 1e-3 and found["mismatch/worst"] < 1e-3
