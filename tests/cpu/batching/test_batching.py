"""Packing: every sequence once, within the budget, equally many micro-batches on every rank, nothing lost."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colocated_grpo.batching.micro_batch import PADDING_TOKENS, MicroBatch, build_micro_batch
from colocated_grpo.batching.pack import pack
from colocated_grpo.batching.plan import COPIED_KEY_COST, Outline, computed_tokens, plan
from colocated_grpo.errors import RunError
from colocated_grpo.settings.training import BatchConfig
from colocated_grpo.types import ContextGroup, Group, Rollout
from tests.support.small_policy import (
    group_of,
    positions_of,
    random_groups,
    random_trees,
    rollout_of,
    rows_of,
    sequence_of,
)

BUDGET = 32
LONGEST = 24

# Not 0, the padding token: a truncated completion without loss could equal a padding micro-batch.
prompts = st.lists(st.integers(1, 99), min_size=1, max_size=8)


@st.composite
def rollouts(draw, prompt: list[int]) -> Rollout:
    completion = draw(st.lists(st.integers(1, 99), min_size=1, max_size=LONGEST - 8))
    rollout = rollout_of(
        prompt,
        completion,
        finish_reason=draw(st.sampled_from(["stop", "length", "repetition"])),
        temperature=draw(st.sampled_from([0.5, 1.0])),
        observed=draw(st.integers(0, len(completion) - 1)),
        logprob=draw(st.floats(-9, 0, width=32)),
    )
    own = [draw(st.floats(-2, 2, width=32)) for _ in range(sum(rollout.loss_mask))]
    return replace(rollout, advantages=draw(st.sampled_from([None, own])))


@st.composite
def siblings(draw) -> list[Rollout]:
    """With one prompt, or with different ones, as in turns of a game: these can have a common prefix too."""
    prompt, different = draw(prompts), draw(st.booleans())
    return [draw(rollouts(draw(prompts) if different else prompt)) for _ in range(draw(st.integers(2, 4)))]


groups_of_rollouts = st.lists(siblings(), min_size=1, max_size=8).map(
    lambda groups: [group_of(index, members) for index, members in enumerate(groups)]
)
world_sizes = st.integers(1, 4)


def pack_on_all_ranks(groups, config, world_size, without_gradient=None, advantages=None, shuffle_seed=0):
    """Return the batch of each rank."""
    return [
        pack(
            groups,
            advantages or values_of(groups),
            without_gradient or [False] * len(groups),
            config,
            rank=rank,
            world_size=world_size,
            shuffle_seed=shuffle_seed,
        )
        for rank in range(world_size)
    ]


def values_of(groups: list[Group]) -> list[list[float]]:
    """Return a different advantage for each rollout."""
    return [[index + sibling / 8 for sibling in range(len(group.rollouts))] for index, group in enumerate(groups)]


def is_padding(micro_batch: MicroBatch) -> bool:
    return micro_batch.tokens.input_ids_T.tolist() == PADDING_TOKENS


def unpack(micro_batch: MicroBatch) -> list[tuple]:
    """Return each sequence as training sees it: tokens, then (position, target, temperature, ...) per scored token."""
    tokens, inputs, sequences = micro_batch.tokens, micro_batch.loss_inputs, []
    for index, rows in enumerate(rows_of(micro_batch)):
        own = (inputs.sequence_N == index).nonzero()[:, 0]
        scored = zip(
            (positions_of(rows, tokens.source_N[own]) + 1).tolist(),
            tokens.targets_N[own].tolist(),
            tokens.temperature_N[own].tolist(),
            inputs.advantages_N[own].tolist(),
            inputs.sampling_logprobs_N[own].tolist(),
            inputs.loss_mask_N[own].tolist(),
            strict=True,
        )
        sequences.append((tuple(tokens.input_ids_T[rows].tolist()), tuple(scored)))
    return sequences


def expected_sequence(rollout: Rollout, value: float, mask_truncated: bool) -> tuple:
    """value: its advantage, unless it has its own."""
    trained = not (mask_truncated and rollout.finish_reason in ("length", "repetition"))
    numbers = iter([value] * len(rollout.token_ids) if rollout.advantages is None else rollout.advantages)
    scored = tuple(
        (position, rollout.token_ids[position], rollout.temperature, next(numbers), logprob, trained)
        for position, (sampled, logprob) in enumerate(zip(rollout.loss_mask, rollout.sampling_logprobs, strict=True))
        if sampled
    )
    return tuple(rollout.token_ids), scored


@given(groups_of_rollouts, world_sizes, st.booleans())
def test_every_sequence_is_packed_exactly_once_and_survives_the_round_trip(groups, world_size, mask_truncated):
    config = BatchConfig(max_tokens_per_micro_batch=BUDGET, mask_truncated=mask_truncated)
    advantages = values_of(groups)
    batches = pack_on_all_ranks(groups, config, world_size, advantages=advantages)
    parts = [m for batch in batches for m in batch.minibatches[0].micro_batches if not is_padding(m)]
    expected = Counter(
        expected_sequence(rollout, value, mask_truncated)
        for group, values in zip(groups, advantages, strict=True)
        for rollout, value in zip(group.rollouts, values, strict=True)
    )
    assert Counter(sequence for part in parts for sequence in unpack(part)) == expected
    for part in parts:
        rows, packed = rows_of(part), part.tokens
        assert packed.cu_seqlens[-1] == packed.num_tokens == len(torch.cat(rows).unique()), "no padding"
        assert all(packed.position_ids_T[own].tolist() == list(range(len(own))) for own in rows)
        assert packed.max_seqlen == packed.cu_seqlens.diff().max()
        assert part.loss_inputs.num_sequences == len(rows)
    tokens = sum(len(rollout.token_ids) for group in groups for rollout in group.rollouts)
    assert all(batch.num_tokens == tokens for batch in batches)
    assert all(batch.computed_tokens == sum(part.tokens.num_tokens for part in parts) for batch in batches)


@given(groups_of_rollouts, world_sizes, st.integers(1, 3), st.lists(st.booleans(), min_size=8, max_size=8))
def test_no_micro_batch_exceeds_the_budget_and_every_rank_has_equally_many(
    groups, world_size, minibatches, without_gradient
):
    config = BatchConfig(max_tokens_per_micro_batch=BUDGET, minibatches=minibatches)
    batches = pack_on_all_ranks(groups, config, world_size, without_gradient[: len(groups)])
    filled = min(minibatches, len(groups))
    assert {len(batch.minibatches) for batch in batches} == {filled}, "no optimizer step on nothing"
    for part in range(filled):
        by_rank = [batch.minibatches[part].micro_batches for batch in batches]
        assert all(m.tokens.num_tokens <= BUDGET for micro_batches in by_rank for m in micro_batches)
        assert len({len(micro_batches) for micro_batches in by_rank}) == 1
        assert by_rank[0], "a rank without work still joins the collectives"
        assert batches[0].minibatches[part].counts.minibatches == filled
        assert all(batch.minibatches[part].counts == batches[0].minibatches[part].counts for batch in batches)


def outlines_of(lengths: list[int]) -> list[Outline]:
    return [
        Outline(group=index, sibling=0, length=length, scored=1, trained=True) for index, length in enumerate(lengths)
    ]


def rank_loads(lengths: list[int], budget: int, world_size: int) -> list[int]:
    return [sum(seq.length for bin in bins for seq in bin) for bins in plan(outlines_of(lengths), budget, world_size)]


@given(st.lists(st.integers(LONGEST // 2, LONGEST), max_size=30), world_sizes)
def test_sequences_close_to_the_budget_stay_within_it(lengths, world_size):
    assignment = plan(outlines_of(lengths), BUDGET, world_size)
    assert all(sum(seq.length for seq in bin) <= BUDGET for bins in assignment for bin in bins)
    assert len({len(bins) for bins in assignment}) == 1
    assert sorted(seq.length for bins in assignment for bin in bins for seq in bin) == sorted(lengths)


@pytest.mark.parametrize(("context", "least"), [(None, 65), (ContextGroup(0, 2, "group"), 33)])
def test_a_sequence_longer_than_the_budget_is_rejected_in_one_line(context, least):
    groups = [group_of(0, [rollout_of([1], [2] * 64), rollout_of([1], [2])])]
    config = BatchConfig(max_tokens_per_micro_batch=least - 1)
    message = rf"max_tokens_per_micro_batch={least - 1}: a rollout of 65 tokens, .* set it to at least {least}"
    with pytest.raises(RunError, match=message) as caught:
        pack(groups, [[0.0, 0.0]], [False], config, rank=0, world_size=2, context=context, shuffle_seed=0)
    assert "\n" not in str(caught.value)


def test_a_dropped_group_may_be_longer_than_the_budget():
    groups = [group_of(0, [rollout_of([1], [2] * 64)] * 2), group_of(1, [rollout_of([1], [2])] * 2)]
    config = BatchConfig(max_tokens_per_micro_batch=16)
    (batch,) = pack_on_all_ranks(groups, config, 1, [True, False])
    assert batch.num_tokens == 4


@given(st.lists(st.integers(2, LONGEST), max_size=60), world_sizes)
def test_loads_of_the_ranks_differ_by_less_than_one_micro_batch(lengths, world_size):
    loads = rank_loads(lengths, BUDGET, world_size)
    assert sum(loads) == sum(lengths)
    assert max(loads) - min(loads) <= BUDGET


def test_the_rank_with_the_smaller_load_gets_the_fuller_micro_batch():
    assert rank_loads([30, 28, 22, 20], 30, 2) == [50, 50]


@given(st.lists(st.integers(2, 64), min_size=200, max_size=300), st.integers(2, 4))
@settings(max_examples=20)
def test_many_sequences_balance_to_within_five_percent(lengths, world_size):
    loads = rank_loads(lengths, 512, world_size)
    assert max(loads) <= 1.05 * sum(loads) / world_size


@given(st.lists(st.integers(2, LONGEST), min_size=1, max_size=40), world_sizes)
def test_the_number_of_micro_batches_stays_close_to_the_least_possible(lengths, world_size):
    """A micro-batch without room for another sequence of the longest length has more than BUDGET - LONGEST tokens."""
    bins = sum(len(own) for own in plan(outlines_of(lengths), BUDGET, world_size))
    at_most = sum(lengths) // (BUDGET - LONGEST) + world_size
    assert bins <= max(world_size, at_most)


def test_groups_without_gradient_are_not_computed_but_counted():
    groups = random_groups(4, 3)
    config = BatchConfig(max_tokens_per_micro_batch=1000)
    without_gradient = [False, True, False, True]
    (kept,) = pack_on_all_ranks(groups, config, 1)
    (dropped,) = pack_on_all_ranks(groups, config, 1, without_gradient)
    (not_dropped,) = pack_on_all_ranks(
        groups, config.model_copy(update={"drop_constant_groups": False}), 1, without_gradient
    )
    assert dropped.minibatches[0].counts == kept.minibatches[0].counts
    assert dropped.minibatches[0].counts.sequences == 12
    assert dropped.minibatches[0].micro_batches[0].loss_inputs.num_sequences == 6
    assert not_dropped.num_tokens == kept.num_tokens > dropped.num_tokens


def test_truncated_completions_are_scored_without_loss_and_their_tokens_are_not_counted():
    finished = rollout_of([1], [2, 3, 4])
    cut = rollout_of([1], [5, 6], finish_reason="length")
    groups = [group_of(0, [finished, cut])]
    for mask_truncated, trained, tokens in [(True, [3], 3), (False, [2, 3], 5)]:
        (batch,) = pack_on_all_ranks(
            groups, BatchConfig(max_tokens_per_micro_batch=BUDGET, mask_truncated=mask_truncated), 1
        )
        (micro_batch,) = batch.minibatches[0].micro_batches
        per_sequence = micro_batch.loss_inputs.sequence_N[micro_batch.loss_inputs.loss_mask_N].bincount().tolist()
        assert sorted(count for count in per_sequence if count) == trained
        assert batch.minibatches[0].counts.tokens == batch.minibatches[0].counts.batch_tokens == tokens
        assert batch.minibatches[0].counts.sequences == 2
        assert len(micro_batch.tokens.targets_N) == 5


def test_observed_tokens_are_inputs_but_never_scored():
    (batch,) = pack_on_all_ranks(
        [group_of(0, [rollout_of([7], [1, 2, 3, 4], observed=2)])], BatchConfig(max_tokens_per_micro_batch=BUDGET), 1
    )
    (micro_batch,) = batch.minibatches[0].micro_batches
    assert micro_batch.tokens.input_ids_T.tolist() == [7, 1, 2, 3, 4]
    assert micro_batch.tokens.targets_N.tolist() == [1, 4]
    assert micro_batch.tokens.source_N.tolist() == [0, 3]


@pytest.mark.parametrize("all_dropped", [True, False], ids=["no group has a gradient", "fewer sequences than ranks"])
def test_a_rank_without_work_gets_a_padding_micro_batch_without_loss(all_dropped):
    groups = [group_of(0, [rollout_of([1], [2, 3])])]
    batches = pack_on_all_ranks(groups, BatchConfig(max_tokens_per_micro_batch=BUDGET), 2, [all_dropped])
    without_work = [batch for batch in batches if is_padding(batch.minibatches[0].micro_batches[0])]
    assert len(without_work) == (2 if all_dropped else 1)
    padding = without_work[0].minibatches[0].micro_batches[0]
    assert padding.tokens.cu_seqlens.tolist() == [0, len(PADDING_TOKENS)]
    assert padding.tokens.source_N.max() < padding.tokens.num_tokens
    assert not padding.loss_inputs.loss_mask_N.any()
    assert without_work[0].minibatches[0].counts.sequences == 1


@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 5))
def test_minibatches_partition_the_groups_and_keep_siblings_together(count, minibatches, shuffle_seed):
    groups = [group_of(index, [rollout_of([index], [50, 51])] * 2) for index in range(count)]
    (batch,) = pack_on_all_ranks(
        groups, BatchConfig(max_tokens_per_micro_batch=BUDGET, minibatches=minibatches), 1, shuffle_seed=shuffle_seed
    )
    prompts = [
        Counter(tokens[0] for m in part.micro_batches if not is_padding(m) for tokens, _ in unpack(m))
        for part in batch.minibatches
    ]
    assert sum(prompts, Counter()) == Counter(dict.fromkeys(range(count), 2))
    assert all(seen == 2 for part in prompts for seen in part.values())
    sizes = [len(part) for part in prompts]
    assert max(sizes) - min(sizes) <= 1
    assert [part.counts.sequences for part in batch.minibatches] == [2 * size for size in sizes]
    assert {part.counts.batch_tokens for part in batch.minibatches} == {4 * count}


def test_only_the_seed_decides_how_minibatches_are_shuffled():
    groups = random_groups(8, 2)
    config = BatchConfig(max_tokens_per_micro_batch=BUDGET, minibatches=4)

    def first_minibatch(seed: int, groups: list[Group] = groups) -> list:
        (batch,) = pack_on_all_ranks(groups, config, 1, shuffle_seed=seed)
        return [unpack(m) for m in batch.minibatches[0].micro_batches]

    assert first_minibatch(1) == first_minibatch(1)
    assert len({repr(first_minibatch(seed)) for seed in range(6)}) > 1


def test_imbalance_is_the_excess_of_the_fullest_rank_over_the_mean():
    groups = [group_of(0, [rollout_of([1], [2] * 5), rollout_of([1], [2])])]
    even, uneven = (
        pack_on_all_ranks(groups, BatchConfig(max_tokens_per_micro_batch=BUDGET), world_size)[0].imbalance
        for world_size in (1, 2)
    )
    assert even == 0.0
    assert uneven == pytest.approx(6 / 4 - 1)


def test_each_target_is_predicted_by_the_token_before_it_in_its_own_sequence():
    micro_batch = build_micro_batch([sequence_of(3), sequence_of(2)])
    assert micro_batch.tokens.source_N.tolist() == [0, 3]
    assert micro_batch.loss_inputs.sequence_N.tolist() == [0, 1]


def test_a_rollout_without_sampled_tokens_is_not_packed_but_counted():
    sampled, empty = rollout_of([1, 2], [3, 4]), rollout_of([5, 6], [])
    groups = [group_of(0, [sampled, empty]), group_of(1, [empty, empty])]
    batches = pack_on_all_ranks(groups, BatchConfig(max_tokens_per_micro_batch=BUDGET), world_size=2)
    packed = [m for batch in batches for part in batch.minibatches for m in part.micro_batches if not is_padding(m)]
    assert [micro_batch.tokens.input_ids_T.tolist() for micro_batch in packed] == [[1, 2, 3, 4]]
    assert batches[0].minibatches[0].counts.sequences == 4
    assert batches[0].minibatches[0].counts.tokens == 2


def siblings_of(prompt: list[int], *completions: int, group: int = 0) -> Group:
    """completions: their lengths."""
    return group_of(group, [rollout_of(prompt, [50 + index] * length) for index, length in enumerate(completions)])


def test_a_common_prefix_is_packed_once_and_seen_by_each_sibling():
    (batch,) = pack_on_all_ranks([siblings_of([1, 2], 3, 1)], BatchConfig(max_tokens_per_micro_batch=BUDGET), 1)
    (micro_batch,) = batch.minibatches[0].micro_batches
    tokens = micro_batch.tokens
    assert tokens.input_ids_T.tolist() == [1, 2, 50, 50, 50, 51]
    assert tokens.position_ids_T.tolist() == [0, 1, 2, 3, 4, 2]
    assert tokens.cu_seqlens.tolist() == [0, 5, 6]
    assert tokens.source_N.tolist() == [1, 2, 3, 1], "both first sampled tokens follow the last prompt token"
    keys = tokens.prefix_keys
    assert keys.rows_E.tolist() == [0, 1, 2, 3, 4, 0, 1, 5]
    assert keys.cu_seqlens.tolist() == [0, 5, 8]
    assert keys.keys_E.tolist() == [0, 5, 1, 6, 2, 3, 4, 7], "two keys of each prompt token, one of each other"
    assert keys.starts_E.tolist() == [0, 2, 4, 5, 6, 7, 8, *[8, 8]]
    assert (batch.num_tokens, batch.computed_tokens) == (8, 6)


def packed_siblings(*rollouts: Rollout) -> MicroBatch:
    """Return the micro-batch of one group."""
    (batch,) = pack_on_all_ranks([group_of(0, rollouts)], BatchConfig(max_tokens_per_micro_batch=4 * BUDGET), 1)
    (micro_batch,) = batch.minibatches[0].micro_batches
    return micro_batch


def test_each_turn_is_packed_behind_the_turn_that_its_prompt_continues():
    first = replace(rollout_of([1, 2], [7, 8]), further=[rollout_of([1, 2, 3, 4], [9])])
    second = replace(rollout_of([1, 2], [6]), further=[rollout_of([1, 2, 3, 5], [6, 6])])
    micro_batch = packed_siblings(first, second)
    tokens, keys = micro_batch.tokens, micro_batch.tokens.prefix_keys
    assert tokens.input_ids_T.tolist() == [1, 2, 7, 8, *[6], *[3, 4, 9], *[5, 6, 6]]
    assert tokens.position_ids_T.tolist() == [0, 1, 2, 3, *[2], *[2, 3, 4], *[3, 4, 5]]
    assert tokens.cu_seqlens.tolist() == [0, 4, 5, 8, 11]
    seen = [[0, 1, 2, 3], [0, 1, 4], [0, 1, 5, 6, 7], [0, 1, 5, 8, 9, 10]]
    assert [rows.tolist() for rows in rows_of(micro_batch)] == seen
    assert keys.cu_seqlens.tolist() == [0, 4, 7, 12, 18]
    assert tokens.source_N.tolist() == [1, 2, *[1], *[6], *[8, 9]]
    assert tokens.targets_N.tolist() == [7, 8, *[6], *[9], *[6, 6]]


def test_a_branch_is_packed_behind_the_sampled_tokens_that_it_continues():
    whole, branch = rollout_of([1], [2, 3, 4, 5]), rollout_of([1, 2, 3, 6], [7])
    micro_batch = packed_siblings(branch, whole, rollout_of([1], [8]))
    assert micro_batch.tokens.input_ids_T.tolist() == [1, 8, *[2, 3, 4, 5], *[6, 7]]
    assert Counter(unpack(micro_batch)) == Counter(
        expected_sequence(rollout, value, False)
        for rollout, value in [(branch, 0.0), (whole, 1 / 8), (rollout_of([1], [8]), 2 / 8)]
    )


def test_siblings_without_a_longer_prefix_have_the_shorter_one_in_common():
    rollouts = [rollout_of([1, 2, 3], [7, 7, 7]), rollout_of([1, 2], [3, 7, 7]), rollout_of([1, 2, 9], [7] * 4)]
    assert packed_siblings(*rollouts).tokens.input_ids_T.tolist() == [1, 2, 3, 7, 7, 7, 7, 7, 9, 7, 7, 7, 7]


def test_equal_rollouts_and_rollouts_that_end_where_another_prompt_goes_on_have_a_token_of_their_own():
    again = rollout_of([1, 2], [3])
    micro_batch = packed_siblings(again, again, rollout_of([1, 2, 3, 4], [5]))
    assert micro_batch.tokens.input_ids_T.tolist() == [1, 2, 3, 3, 4, 5]
    assert micro_batch.tokens.cu_seqlens.tolist() == [0, 3, 4, 6]


def test_a_rollout_that_is_not_packed_hides_no_prefix():
    micro_batch = packed_siblings(rollout_of([1, 2, 3, 4], [5]), rollout_of([1, 2, 9], []), rollout_of([1, 2, 3], [6]))
    assert micro_batch.tokens.input_ids_T.tolist() == [1, 2, 3, 6, 4, 5]


def outlines_of_groups(groups: int, siblings: int, prefix: int, own: Callable[[], int]) -> list[Outline]:
    return [
        Outline(group=g, sibling=s, length=prefix + own(), scored=1, trained=True, prefix_length=prefix)
        for g in range(groups)
        for s in range(siblings)
    ]


def test_work_with_common_prompts_is_balanced_over_ranks_and_close_to_the_minimum():
    lengths = random.Random(0)
    outlines = outlines_of_groups(32, 16, prefix=80, own=lambda: lengths.randint(1, 900))
    least = computed_tokens(outlines)
    for world_size in (1, 2, 4, 8):
        assignment = plan(outlines, 16_384, world_size)
        loads = [sum(map(computed_tokens, bins)) for bins in assignment]
        assert sum(loads) <= 1.01 * least
        assert max(loads) <= 1.01 * sum(loads) / world_size
        assert len(assignment[0]) <= 1.1 * least / 16_384 / world_size + 1
        assert sorted(o for bins in assignment for bin in bins for o in bin) == outlines


@given(st.integers(1, 4), st.integers(0, 999), st.sampled_from([32, 64, 128, 4096]), world_sizes)
def test_trees_are_packed_whole_within_the_budget_and_each_prompt_token_once_where_they_fit(
    count, seed, budget, world_size
):
    groups = random_trees(count, seed)
    batches = pack_on_all_ranks(groups, BatchConfig(max_tokens_per_micro_batch=budget), world_size)
    by_rank = [list(batch.minibatches[0].micro_batches) for batch in batches]
    parts = [part for own in by_rank for part in own if not is_padding(part)]
    assert Counter(sequence for part in parts for sequence in unpack(part)) == Counter(
        expected_sequence(rollout, value, False)
        for group, values in zip(groups, values_of(groups), strict=True)
        for rollout, value in zip(group.rollouts, values, strict=True)
    )
    for part in parts:
        rows, keys = part.tokens.num_tokens, part.tokens.prefix_keys
        copies = 0 if keys is None else len(keys.rows_E) - rows
        assert rows + COPIED_KEY_COST * copies <= budget or len(rows_of(part)) == 1
    assert len({len(own) for own in by_rank}) == 1
    computed = batches[0].computed_tokens
    assert computed == sum(part.tokens.num_tokens for part in parts)
    if len(parts) == 1:
        rollouts = [(group.prompt.index, one) for group in groups for one in group.rollouts]
        prompts = {(index, *one.token_ids[: n + 1]) for index, one in rollouts for n in range(one.prompt_length)}
        assert computed <= len(prompts) + sum(len(one.token_ids) - one.prompt_length for _, one in rollouts)


def test_work_with_the_trees_of_agents_is_balanced_over_ranks_and_close_to_the_minimum():
    """Each of six turns adds a message to the prompt, without what was sampled before."""
    lengths = random.Random(0)
    groups = []
    for index in range(16):
        root, rollouts = [index] * 300, []
        for episode in range(8):
            messages = list(root)
            for _ in range(6):
                rollouts.append(rollout_of(messages, [1] * lengths.randint(30, 60)))
                messages = messages + [100 + episode] * lengths.randint(100, 200)
        groups.append(group_of(index, rollouts))
    least = pack_on_all_ranks(groups, BatchConfig(max_tokens_per_micro_batch=1 << 20), 1)[0]
    assert len(least.minibatches[0].micro_batches) == 1
    assert least.computed_tokens < 0.25 * least.num_tokens
    for world_size in (1, 2, 4, 8):
        batch = pack_on_all_ranks(groups, BatchConfig(max_tokens_per_micro_batch=16_384), world_size)[0]
        assert batch.computed_tokens <= 1.05 * least.computed_tokens
        assert batch.imbalance <= 0.03


def test_a_short_common_prefix_is_not_used():
    outlines = outlines_of_groups(8, 4, prefix=2, own=lambda: 400)
    assignment = plan(outlines, 1024, 2)
    assert all(outline.prefix_length == 0 for bins in assignment for bin in bins for outline in bin)


def test_copies_of_prefix_keys_count_towards_the_budget():
    outlines = outlines_of_groups(1, 64, prefix=1000, own=lambda: 10)
    (bins,) = plan(outlines, 4000, 1)
    sizes = sorted(len(bin) for bin in bins)
    assert len(sizes) == 6, "with five, one would get 13: 1010 + 12 * (10 + 1000 / 4) > 4000"
    assert sizes[-1] - sizes[0] <= 3, "and evenly"


def test_micro_batches_are_built_anew_and_alike_on_each_access():
    groups = random_groups(4, 3)
    (batch,) = pack_on_all_ranks(groups, BatchConfig(max_tokens_per_micro_batch=BUDGET), 1)
    micro_batches = batch.minibatches[0].micro_batches
    first, again = (list(micro_batches) for _ in range(2))
    assert len(first) == len(micro_batches) > 1
    assert [unpack(m) for m in first] == [unpack(m) for m in again]
    assert not any(a is b for a, b in zip(first, again, strict=True))


@given(groups_of_rollouts, world_sizes)
def test_tokens_of_plainly_sampled_rollouts_are_marked(groups, world_size):
    groups = [
        Group(
            prompt=group.prompt,
            rollouts=[
                replace(rollout, plain=(index + sibling) % 2 == 0) for sibling, rollout in enumerate(group.rollouts)
            ],
        )
        for index, group in enumerate(groups)
    ]
    config, marked = BatchConfig(max_tokens_per_micro_batch=BUDGET), 0
    for rank in range(world_size):
        options = {"rank": rank, "world_size": world_size, "shuffle_seed": 0}
        batch = pack(groups, values_of(groups), [False] * len(groups), config, **options)
        marked += sum(
            int(micro_batch.loss_inputs.plain_N.sum())
            for minibatch in batch.minibatches
            for micro_batch in minibatch.micro_batches
        )
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert marked == sum(r.loss_mask.count(True) for r in rollouts if r.plain)


def test_an_episode_of_several_sequences_is_trained_whole_with_one_advantage():
    further = [rollout_of([7, 8], [9, 9, 9]), rollout_of([7], [4])]
    episode, sibling = replace(rollout_of([1, 2], [3, 4]), further=further), rollout_of([1, 2], [5])
    config = BatchConfig(max_tokens_per_micro_batch=BUDGET)
    [batch] = pack_on_all_ranks([group_of(0, [episode, sibling])], config, 1, advantages=[[0.5, -0.5]])
    [minibatch] = batch.minibatches
    packed = [sequence for micro_batch in minibatch.micro_batches for sequence in unpack(micro_batch)]
    expected = [expected_sequence(one, 0.5, False) for one in episode.sequences]
    assert Counter(packed) == Counter([*expected, expected_sequence(sibling, -0.5, False)])
    assert (minibatch.counts.sequences, minibatch.counts.tokens) == (4, 7)
