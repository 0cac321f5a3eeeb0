"""Only as many blocks are checkpointed as memory requires, and checkpointing changes no result of training."""

from __future__ import annotations

import random

import pytest
import torch

from colocated_grpo.batching.micro_batch import local_rows
from colocated_grpo.errors import RunError
from colocated_grpo.metrics import Metrics, reduce
from colocated_grpo.policy import activations
from colocated_grpo.policy.activations import (
    Fit,
    Footprint,
    StepSettings,
    choose_micro_batch_size,
    dummy_micro_batch,
    fit_to_memory,
    min_checkpointed_blocks,
    out_of_memory_in_one_line,
    run_trial_step,
)
from colocated_grpo.policy.blocks import blocks_of, num_checkpointed, set_checkpointed
from colocated_grpo.runtime.distributed import World
from colocated_grpo.types import ContextGroup
from tests.support.config_text import config_error
from tests.support.ranks import run_on_ranks
from tests.support.small_policy import (
    assert_same,
    config_of,
    gradients_of,
    pack_for,
    policy_of,
    random_groups,
    train,
    weights_of,
    whole,
    with_ref_logprobs,
)

GIB = 1 << 30
BLOCKS, TOKENS = 20, 16_000
FOOTPRINT = Footprint(peak=4 * GIB, tokens=2_000, per_token=GIB / 1000)
SAVED = 0.9 * GIB / 1000 / BLOCKS
EVERYTHING = 4 * GIB + 14 * 1.1 * GIB
"""Bytes for TOKENS: 14,000 more than the trial had, each with 10 % more for the block whose backward pass runs."""

OOM = """CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.10 GiB of which 1.00 GiB is free.
If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF."""


def chosen(free: float, tokens: int = TOKENS) -> int:
    return min_checkpointed_blocks(FOOTPRINT, SAVED, tokens=tokens, free=free, blocks=BLOCKS)


def test_no_block_is_checkpointed_if_everything_just_fits():
    assert FOOTPRINT.bytes_needed(TOKENS, BLOCKS) == pytest.approx(EVERYTHING)
    assert chosen(EVERYTHING + 1) == 0


def test_each_checkpointed_block_saves_the_same_memory():
    saved = SAVED * TOKENS
    assert chosen(EVERYTHING - 1) == 1
    for count in range(1, BLOCKS):
        assert chosen(EVERYTHING - (count - 0.01) * saved) == count
        assert chosen(EVERYTHING - (count + 0.01) * saved) == count + 1


def test_fewer_tokens_need_fewer_checkpointed_blocks():
    counts = [chosen(12 * GIB, tokens) for tokens in (4_000, 8_000, 12_000, 16_000)]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] > counts[-2] > 0


def test_a_size_that_does_not_fit_with_every_block_checkpointed_is_rejected_in_one_line():
    least = EVERYTHING - BLOCKS * SAVED * TOKENS
    assert chosen(least + 1) == BLOCKS
    with pytest.raises(
        RunError, match=r"batch\.max_tokens_per_micro_batch=16000: .*needs 5.0 GiB .* 4.9 GiB are usable"
    ) as caught:
        chosen(least - 0.1 * GIB)
    assert "\n" not in str(caught.value)


def test_a_trial_is_an_eighth_of_a_micro_batch_and_fills_a_chunk_of_logits_at_any_size(model_folder):
    def config(tokens: int, chunk: int = 2048):
        batch, policy = {"max_tokens_per_micro_batch": tokens}, {"logprob_chunk_tokens": chunk}
        return config_of(model_folder(), batch=batch, policy=policy, rollout={"max_completion_tokens": 16})

    sizes = [StepSettings.of(config(tokens)).trial_sizes() for tokens in (128, 1024, 6000, 8192, 65_536)]
    assert sizes == [(63, 128), (127, 256), (375, 750), (511, 1024), (1023, 2048)]
    assert dummy_micro_batch(StepSettings.of(config(8192)), 511, prefix=0).tokens.num_tokens == 511
    for size in StepSettings.of(config(8192)).trial_sizes():
        tokens = dummy_micro_batch(StepSettings.of(config(8192)), size).tokens
        assert tokens.num_tokens == size
        assert tokens.longest_sequence <= config(8192).max_sequence_tokens
        assert tokens.prefix_keys is not None
        assert size + 2048 >= len(tokens.targets_N) > 2048


@pytest.mark.parametrize("tokens", [2, 8, 16, 30])
def test_small_micro_batches_have_trials_too(world, model_folder, tokens):
    config = config_of(model_folder(), batch={"max_tokens_per_micro_batch": tokens})
    policy, computed = policy_of(config, world), []
    policy.model.register_forward_hook(lambda _, inputs, __: computed.append(inputs[0].num_tokens))
    for size in StepSettings.of(config).trial_sizes():
        run_trial_step(policy, StepSettings.of(config), size)
    small, large = StepSettings.of(config).trial_sizes()
    assert all(0 < count <= size for count, size in zip(computed, (small, small, large, large), strict=True))


def test_on_each_rank_of_a_group_a_trial_fills_a_chunk_of_logits(model_folder):
    config = config_of(model_folder(), policy={"context_parallel": 2}, batch={"max_tokens_per_micro_batch": 8192})
    for size in StepSettings.of(config).trial_sizes():
        dummy = dummy_micro_batch(StepSettings.of(config), 2 * size)
        for rank in range(2):
            tokens = local_rows(dummy, ContextGroup(rank, 2, "group")).tokens
            assert tokens.num_tokens == size
            assert 2048 <= len(tokens.targets_N) < 1.01 * (size + 2048)


def update_with(world: World, folder, count: int) -> tuple[dict, list[int], dict]:
    """Return gradients with `count` checkpointed blocks, forward passes of each block per micro-batch, and metrics."""
    config = config_of(folder, batch={"max_tokens_per_micro_batch": 60})
    policy = policy_of(config, world)
    set_checkpointed(policy.model, count)
    runs = [0] * len(blocks_of(policy.model))
    for index, block in enumerate(blocks_of(policy.model)):
        inner = block._checkpoint_wrapped_module
        inner.register_forward_pre_hook(lambda *_, i=index: runs.__setitem__(i, runs[i] + 1))
    metrics = Metrics(world.device)
    minibatch = pack_for(world, random_groups(4, 3), config).minibatches[0]
    policy.forward_backward(minibatch, metrics)
    parts = len(minibatch.micro_batches)
    assert parts > 1
    return gradients_of(policy), [count // parts for count in runs], reduce(metrics, world.sum_, world.max_)


def updates(world: World, folder) -> list[tuple]:
    return [update_with(world, folder, count) for count in (0, 1, 2)]


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt2"])
def test_loss_and_gradients_do_not_depend_on_checkpointing(world, model_folder, family):
    assert_equal_updates(*updates(world, model_folder(family)))


def test_loss_and_gradients_on_two_ranks_do_not_depend_on_checkpointing(model_folder):
    for results in run_on_ranks(updates, 2, model_folder()):
        assert_equal_updates(*results)


def assert_equal_updates(kept: tuple, *others: tuple) -> None:
    gradients, runs, metrics = kept
    assert runs == [1, 1]
    assert [runs for _, runs, _ in others] == [[2, 1], [2, 2]], "the leading blocks run twice"
    for other_gradients, _, other_metrics in others:
        assert_same(other_gradients, gradients, rtol=0, atol=0)
        assert other_metrics == metrics


def test_scoring_recomputes_nothing(world, model_folder):
    config = config_of(model_folder(), policy={"gradient_checkpointing": True})
    policy = policy_of(config, world)
    (micro_batch,) = pack_for(world, random_groups(2, 2), config).minibatches[0].micro_batches
    before = policy.score(micro_batch)
    set_checkpointed(policy.model, 0)
    assert torch.equal(policy.score(micro_batch), before)


@pytest.mark.parametrize(("setting", "count"), [("auto", 0), (False, 0), ("no", 0), (True, 2), ("yes", 2)])
def test_the_setting_decides_which_blocks_are_checkpointed_at_first(world, model_folder, setting, count):
    config = config_of(model_folder(), policy={"gradient_checkpointing": setting})
    policy = policy_of(config, world)
    assert num_checkpointed(policy.model) == count
    assert all("_checkpoint" not in name for name in policy.parameters())


def test_an_unknown_setting_is_rejected_in_one_line():
    line = config_error("policy: {gradient_checkpointing: some}")
    assert line == "policy.gradient_checkpointing='some': must be 'auto' or true or false (line 3 of x.yaml)"


def around_a_trial_step(world: World, folder, loss: dict) -> dict:
    """Return the policy's state before and after a trial step, and weights one step later with and without it."""
    config = config_of(folder, loss=loss, batch={"max_tokens_per_micro_batch": 64})
    policies = [policy_of(config, world) for _ in range(2)]
    batch = pack_for(world, random_groups(4, 3), config)
    for policy in policies:
        train(policy, batch.map(with_ref_logprobs))
    policy = policies[0]

    def trace() -> dict:
        states = [whole(v) for s in policy.optimizer_states().values() for v in s.values() if torch.is_tensor(v)]
        random_state = torch.get_rng_state(), random.getstate()
        return {"version": policy.version, "random": random_state, "states": states, "weights": weights_of(policy)}

    before = trace()
    run_trial_step(policy, StepSettings.of(config), 32)
    after = trace()
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    for one in policies:
        train(one, batch.map(with_ref_logprobs))
    return {"before": before, "after": after, "later": [weights_of(one) for one in policies]}


def assert_no_state_changed(facts: dict) -> None:
    before, after = facts["before"], facts["after"]
    assert after["version"] == before["version"] == 1
    assert torch.equal(after["random"][0], before["random"][0])
    assert after["random"][1] == before["random"][1]
    assert all(torch.equal(a, b) for a, b in zip(after["states"], before["states"], strict=True))
    assert_same(after["weights"], before["weights"], rtol=0, atol=0)
    assert_same(facts["later"][0], facts["later"][1], rtol=0, atol=0)


@pytest.mark.parametrize("loss", [{"type": "dapo"}, {"type": "gspo", "kl": {"coef": 0.1, "target": "reference"}}])
def test_a_trial_step_changes_no_state(world, model_folder, loss):
    assert_no_state_changed(around_a_trial_step(world, model_folder(), loss))


def test_a_trial_step_on_two_ranks_changes_no_state_on_either(model_folder):
    for facts in run_on_ranks(around_a_trial_step, 2, model_folder(), {"type": "dapo"}):
        assert_no_state_changed(facts)


def fitted(world: World, folder, free_by_rank: list[float], tokens: int | str = 1000, **settings) -> tuple | str:
    """Return (tokens, blocks), or the error. A block keeps 1000 bytes per token, or 100 when checkpointed."""
    policy = policy_of(config_of(folder, policy=settings), world)
    config = config_of(folder, batch={"max_tokens_per_micro_batch": tokens}, policy=settings)

    def measure(policy, _step) -> Footprint:
        kept = sum(100 if block.checkpointed else 1000 for block in blocks_of(policy.model))
        return Footprint(peak=0, tokens=0, per_token=kept)

    activations.measure, activations.usable_bytes = measure, lambda device: free_by_rank[world.rank]
    try:
        return fit_to_memory(policy, StepSettings.of(config), world).tokens, num_checkpointed(policy.model)
    except RunError as error:
        return str(error)


def fitted_one_by_one(world: World, folder, free_by_rank: list[list[float]], tokens: int | str = 1000) -> list:
    return [fitted(world, folder, free, tokens) for free in free_by_rank]


def test_every_rank_checkpoints_as_many_blocks_as_the_fullest_device_needs(model_folder):
    free = [[4e6, 4e6], [4e6, 3.5e6], [3.5e6, 4e6], [3e6, 3.5e6]]
    chosen = [(1000, count) for count in (0, 1, 1, 2)]
    assert run_on_ranks(fitted_one_by_one, 2, model_folder(), free) == [chosen] * 2


PER_TOKEN = 2 * 1000 * (1 + 2 / 2)
"""Bytes per token of the model in `fitted` without checkpointing."""


def test_the_automatic_size_is_the_largest_without_checkpointing_or_the_largest_that_fits(model_folder):
    expected_by_room = {
        100_000: (24_576, 0),
        24_576: (24_576, 0),
        24_575: (16_384, 0),
        8_192: (8_192, 0),
        8_191: (8_192, 1),
        3_500: (4_096, 1),
        1_500: (2_048, 2),
    }
    free = [[1e9, fits * PER_TOKEN] for fits in expected_by_room]
    for results in run_on_ranks(fitted_one_by_one, 2, model_folder(), free, "auto"):
        assert dict(zip(expected_by_room, results, strict=True)) == expected_by_room


@pytest.mark.parametrize(("fits", "tokens"), [(30_000, 24_576), (9_000, 8_192), (100, 2_048)])
def test_the_automatic_size_follows_memory_if_checkpointing_is_set(world, model_folder, monkeypatch, fits, tokens):
    monkeypatch.setattr(activations, "measure", activations.measure)
    monkeypatch.setattr(activations, "usable_bytes", activations.usable_bytes)
    assert fitted(world, model_folder(), [fits * PER_TOKEN], "auto", gradient_checkpointing=False) == (tokens, 0)


def test_memory_that_runs_out_in_a_training_step_is_one_line_with_the_cause():
    cause = torch.OutOfMemoryError(OOM)
    with pytest.raises(RunError) as raised, out_of_memory_in_one_line(4096):
        raise cause
    assert str(raised.value).startswith(
        "batch.max_tokens_per_micro_batch=4096: a training step does not fit into device memory (OutOfMemoryError: "
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.10 GiB of which 1.00 GiB is free.); lower it, "
    )
    assert "\n" not in str(raised.value)
    assert raised.value.__cause__ is cause


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: an illegal memory access"), RunError("a norm is inf")])
def test_other_errors_of_a_training_step_stay_as_they_are(error):
    with pytest.raises(type(error)) as raised, out_of_memory_in_one_line("auto"):
        raise error
    assert raised.value is error


def test_the_automatic_size_fits_the_longest_sequence(model_folder):
    def sizes(longest: int) -> list[int]:
        rollout = {"max_prompt_tokens": 100, "max_completion_tokens": longest - 100}
        config = config_of(model_folder(), batch={"max_tokens_per_micro_batch": "auto"}, rollout=rollout)
        return StepSettings.of(config).candidate_sizes()

    assert sizes(2048)[-1] == 2048
    assert sizes(2049)[-1] == 4096
    assert sizes(30_000) == [30_000]


@pytest.mark.parametrize(("longest", "tokens"), [(1000, 16_384), (20_000, 24_576), (30_000, 30_000)])
def test_on_cpu_the_automatic_size_is_chosen_without_measuring(world, model_folder, longest, tokens):
    rollout = {"max_prompt_tokens": 100, "max_completion_tokens": longest - 100}
    config = config_of(model_folder(), batch={"max_tokens_per_micro_batch": "auto", "epochs": 2}, rollout=rollout)
    fit = choose_micro_batch_size(policy_of(config, world), StepSettings.of(config), world)
    chosen = config.with_values("batch", max_tokens_per_micro_batch=fit.tokens)
    assert chosen.batch.max_tokens_per_micro_batch == tokens
    assert chosen.batch.epochs == 2


def test_engine_and_graphs_stay_on_the_device_only_if_they_leave_half_of_its_memory_free():
    assert Fit(8_192, needed=10e9, usable=60e9).leaves_room(9e9)
    assert not Fit(8_192, needed=10e9, usable=60e9).leaves_room(11e9)
    assert not Fit(8_192).leaves_room(0)  # nothing was measured


def test_all_ranks_raise_the_same_error_if_one_device_is_too_small(model_folder):
    errors = run_on_ranks(fitted, 2, model_folder(), [4e6, 1e6])
    assert errors[0] == errors[1]
    assert errors[0].startswith("batch.max_tokens_per_micro_batch=1000")
