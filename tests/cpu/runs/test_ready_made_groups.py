"""Groups with missing sampling log-probabilities, or with their own reference log-probabilities or advantages."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from colocated_grpo.policy.policy import fill_missing
from colocated_grpo.trainer import make_batch, update, with_advantages
from colocated_grpo.types import Group
from tests.support.small_policy import config_of, group_of, pack_for, policy_of, random_groups, rollout_of


def without_logprobs(group: Group) -> Group:
    return replace(group, rollouts=[replace(rollout, sampling_logprobs=None) for rollout in group.rollouts])


def groups() -> list[Group]:
    """Return one group with sampling log-probabilities and one without."""
    pair = [rollout_of([1, 2], [3, 4, 5], reward=1.0, logprob=-3.0), rollout_of([1, 2], [6, 7], temperature=0.5)]
    return [group_of(0, pair), without_logprobs(group_of(1, pair))]


@pytest.fixture
def policy(world, model_folder):
    return policy_of(config_of(model_folder()), world)


def test_a_batch_detects_missing_sampling_logprobs(world, model_folder):
    config = config_of(model_folder())
    assert pack_for(world, groups(), config).lacks_sampling_logprobs
    assert not pack_for(world, groups()[:1], config).lacks_sampling_logprobs


def test_the_trainer_fills_in_only_the_missing_sampling_logprobs(world, model_folder, policy):
    batch = pack_for(world, groups(), config_of(model_folder()))
    ((before,),) = ([*minibatch.micro_batches] for minibatch in batch.minibatches)
    ((after,),) = ([*minibatch.micro_batches] for minibatch in policy.with_sampling_logprobs(batch).minibatches)
    missing = before.loss_inputs.sampling_logprobs_N.isnan()
    assert (missing.sum(), (~missing).sum()) == (5, 5)
    expected = policy.score(before)
    torch.testing.assert_close(after.loss_inputs.sampling_logprobs_N[missing], expected[missing], rtol=0, atol=0)
    assert set(after.loss_inputs.sampling_logprobs_N[~missing].tolist()) <= {-3.0, -2.0}


def test_given_reference_logprobs_take_precedence_over_the_reference_model(world, model_folder):
    given = rollout_of([1, 2], [3, 4])
    given = replace(given, ref_logprobs=[0.0, 0.0, -7.0, -8.0])
    batch = pack_for(world, [group_of(0, [given, rollout_of([1, 2], [5])])], config_of(model_folder()))
    (micro_batch,) = batch.minibatches[0].micro_batches
    scored = torch.tensor([-1.0, -2.0, -3.0])
    assert sorted(fill_missing(micro_batch.loss_inputs.ref_logprobs_N, scored).tolist()) == [-8.0, -7.0, -3.0]


def test_without_given_reference_logprobs_the_reference_model_is_used(world, model_folder):
    batch = pack_for(world, groups(), config_of(model_folder()))
    (micro_batch,) = batch.minibatches[0].micro_batches
    assert micro_batch.loss_inputs.ref_logprobs_N is None
    assert fill_missing(None, torch.tensor([-1.0])).tolist() == [-1.0]


def test_an_empty_minibatch_takes_no_optimizer_step(world, model_folder, policy):
    config = config_of(model_folder(), batch={"minibatches": 4, "epochs": 2})
    run = SimpleNamespace(config=config, world=world, policy=policy, judge_samples=lambda *_: None)
    update(run, policy.with_old_logprobs(pack_for(world, random_groups(3, 2), config)), staleness=0)
    assert policy.version == 3 * 2


def test_a_group_of_equal_rewards_with_its_own_advantages_is_trained(world, model_folder):
    config = config_of(model_folder())
    clock = SimpleNamespace(time=lambda _phase: torch.no_grad())
    policy = SimpleNamespace(version=0, model=SimpleNamespace(shares_prefixes=True))
    run = SimpleNamespace(config=config, world=world, clock=clock, policy=policy)
    plain = group_of(0, [rollout_of([1], [2, 3], reward=1.0)] * 2)
    judged = group_of(1, [replace(rollout_of([1], [4, 5], reward=1.0), advantages=[0.5, -0.5])] * 2)
    groups = with_advantages([plain, judged], config.advantage)
    (micro_batch,) = make_batch(run, 0, groups).minibatches[0].micro_batches
    assert micro_batch.tokens.targets_N.tolist() == [4, 5, 4, 5]
    assert micro_batch.loss_inputs.advantages_N.tolist() == [0.5, -0.5, 0.5, -0.5]
