"""Packing: every sequence once, in budget, equally many forwards on every rank, and nothing lost on the way."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colocated_grpo.batching import PADDING_TOKENS, MicroBatch, build_micro_batch, pack
from colocated_grpo.batching.plan import Outline, computed_tokens, plan
from colocated_grpo.config.schema import BatchConfig
from colocated_grpo.errors import RunError
from colocated_grpo.types import Group, Rollout
from tests.support.small_policy import group_of, positions_of, random_groups, rollout_of, rows_of, sequence_of

BUDGET = 32
LONGEST = 24


# No token of a stand-in: a truncated completion without loss may look like one otherwise.
prompts = st.lists(st.integers(1, 99), min_size=1, max_size=8)


@st.composite
def rollouts(draw, prompt: list[int]) -> Rollout:
    completion = draw(st.lists(st.integers(1, 99), min_size=1, max_size=LONGEST - 8))
    rollout = rollout_of(
        prompt,
        completion,
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        temperature=draw(st.sampled_from([0.5, 1.0])),
        observed=draw(st.integers(0, len(completion) - 1)),
        logprob=draw(st.floats(-9, 0, width=32)),
    )
    own = [draw(st.floats(-2, 2, width=32)) for _ in range(sum(rollout.loss_mask))]
    return replace(rollout, advantages=draw(st.sampled_from([None, own])))


@st.composite
def siblings(draw) -> list[Rollout]:
    """All of one prompt, or each of its own: turns of a game may differ and still begin alike."""
    prompt, apart = draw(prompts), draw(st.booleans())
    return [draw(rollouts(draw(prompts) if apart else prompt)) for _ in range(draw(st.integers(2, 4)))]


groups_of_rollouts = st.lists(siblings(), min_size=1, max_size=8).map(
    lambda groups: [group_of(index, members) for index, members in enumerate(groups)]
)
world_sizes = st.integers(1, 4)


def pack_everywhere(groups, config, world_size, idle=None, advantages=None, shuffle_seed=0):
    """The batch of each rank."""
    return [
        pack(
            groups,
            advantages or values_of(groups),
            idle or [False] * len(groups),
            config,
            rank=rank,
            world_size=world_size,
            shuffle_seed=shuffle_seed,
        )
        for rank in range(world_size)
    ]


def values_of(groups: list[Group]) -> list[list[float]]:
    """A different number for each rollout."""
    return [[index + sibling / 8 for sibling in range(len(group.rollouts))] for index, group in enumerate(groups)]


def is_stand_in(micro_batch: MicroBatch) -> bool:
    return micro_batch.input_ids_T.tolist() == PADDING_TOKENS


def unpack(micro_batch: MicroBatch) -> list[tuple]:
    """What training sees of each sequence: tokens, then (position, target, temperature, advantage, ...) as scored."""
    sequences = []
    for index, rows in enumerate(rows_of(micro_batch)):
        own = (micro_batch.sequence_N == index).nonzero()[:, 0]
        scored = zip(
            (positions_of(rows, micro_batch.source_N[own]) + 1).tolist(),
            micro_batch.targets_N[own].tolist(),
            micro_batch.temperature_N[own].tolist(),
            micro_batch.advantages_N[own].tolist(),
            micro_batch.sampling_logprobs_N[own].tolist(),
            micro_batch.loss_mask_N[own].tolist(),
            strict=True,
        )
        sequences.append((tuple(micro_batch.input_ids_T[rows].tolist()), tuple(scored)))
    return sequences


def expected_sequence(rollout: Rollout, value: float, mask_truncated: bool) -> tuple:
    """`value`: its advantage, unless it brings its own."""
    trained = not (mask_truncated and rollout.finish_reason == "length")
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
    batches = pack_everywhere(groups, config, world_size, advantages=advantages)
    parts = [m for batch in batches for m in batch.minibatches[0].micro_batches if not is_stand_in(m)]
    expected = Counter(
        expected_sequence(rollout, value, mask_truncated)
        for group, values in zip(groups, advantages, strict=True)
        for rollout, value in zip(group.rollouts, values, strict=True)
    )
    assert Counter(sequence for part in parts for sequence in unpack(part)) == expected
    for part in parts:
        rows = rows_of(part)
        assert part.cu_seqlens[-1] == part.num_tokens == len(torch.cat(rows).unique()), "no padding"
        assert all(part.position_ids_T[own].tolist() == list(range(len(own))) for own in rows)
        assert part.max_seqlen == part.cu_seqlens.diff().max()
        assert part.num_sequences == len(rows)
    tokens = sum(len(rollout.token_ids) for group in groups for rollout in group.rollouts)
    assert all(batch.num_tokens == tokens for batch in batches)
    assert all(batch.computed_tokens == sum(part.num_tokens for part in parts) for batch in batches)


@given(groups_of_rollouts, world_sizes, st.integers(1, 3), st.lists(st.booleans(), min_size=8, max_size=8))
def test_no_micro_batch_exceeds_the_budget_and_every_rank_has_equally_many(groups, world_size, minibatches, idle):
    config = BatchConfig(max_tokens_per_micro_batch=BUDGET, minibatches=minibatches)
    batches = pack_everywhere(groups, config, world_size, idle[: len(groups)])
    filled = min(minibatches, len(groups))
    assert {len(batch.minibatches) for batch in batches} == {filled}, "no optimizer step on nothing"
    for part in range(filled):
        of_ranks = [batch.minibatches[part].micro_batches for batch in batches]
        assert all(m.num_tokens <= BUDGET for micro_batches in of_ranks for m in micro_batches)
        assert len({len(micro_batches) for micro_batches in of_ranks}) == 1
        assert of_ranks[0], "a rank without work still joins the collectives"
        assert batches[0].minibatches[part].counts.minibatches == filled
        assert all(batch.minibatches[part].counts == batches[0].minibatches[part].counts for batch in batches)


def outlines_of(lengths: list[int]) -> list[Outline]:
    return [
        Outline(group=index, sibling=0, length=length, scored=1, trained=True) for index, length in enumerate(lengths)
    ]


def rank_loads(lengths: list[int], budget: int, world_size: int) -> list[int]:
    shares = plan(outlines_of(lengths), budget, world_size)
    return [sum(seq.length for bin in share for seq in bin) for share in shares]


@given(st.lists(st.integers(LONGEST // 2, LONGEST), max_size=30), world_sizes)
def test_long_sequences_that_hardly_share_a_micro_batch_stay_in_budget(lengths, world_size):
    shares = plan(outlines_of(lengths), BUDGET, world_size)
    assert all(sum(seq.length for seq in bin) <= BUDGET for share in shares for bin in share)
    assert len({len(share) for share in shares}) == 1
    assert sorted(seq.length for share in shares for bin in share for seq in bin) == sorted(lengths)


def test_a_sequence_that_no_micro_batch_holds_is_refused_in_one_line():
    with pytest.raises(
        RunError, match=r"max_tokens_per_micro_batch=64: a rollout of 65 tokens cannot be packed"
    ) as caught:
        plan(outlines_of([65, 3]), 64, world_size=2)
    assert "\n" not in str(caught.value)


@given(st.lists(st.integers(2, LONGEST), max_size=60), world_sizes)
def test_loads_of_the_ranks_differ_by_less_than_one_micro_batch(lengths, world_size):
    loads = rank_loads(lengths, BUDGET, world_size)
    assert sum(loads) == sum(lengths)
    assert max(loads) - min(loads) <= BUDGET


def test_the_rank_with_less_so_far_gets_the_fuller_micro_batch():
    assert rank_loads([30, 28, 22, 20], 30, 2) == [50, 50]


@given(st.lists(st.integers(2, 64), min_size=200, max_size=300), st.integers(2, 4))
@settings(max_examples=20)
def test_many_sequences_balance_to_within_five_percent(lengths, world_size):
    loads = rank_loads(lengths, 512, world_size)
    assert max(loads) <= 1.05 * sum(loads) / world_size


@given(st.lists(st.integers(2, LONGEST), min_size=1, max_size=40), world_sizes)
def test_the_number_of_micro_batches_stays_close_to_the_least_possible(lengths, world_size):
    """Bins that could not take one more of the longest sequence are more than BUDGET - LONGEST full."""
    bins = sum(len(share) for share in plan(outlines_of(lengths), BUDGET, world_size))
    at_most = sum(lengths) // (BUDGET - LONGEST) + world_size
    assert bins <= max(world_size, at_most)


def test_idle_groups_are_left_out_of_the_forward_but_counted():
    groups = random_groups(4, 3)
    config = BatchConfig(max_tokens_per_micro_batch=1000)
    idle = [False, True, False, True]
    (kept,) = pack_everywhere(groups, config, 1)
    (dropped,) = pack_everywhere(groups, config, 1, idle)
    (asked_to_keep,) = pack_everywhere(groups, config.model_copy(update={"drop_constant_groups": False}), 1, idle)
    assert dropped.minibatches[0].counts == kept.minibatches[0].counts
    assert dropped.minibatches[0].counts.sequences == 12
    assert dropped.minibatches[0].micro_batches[0].num_sequences == 6
    assert asked_to_keep.num_tokens == kept.num_tokens > dropped.num_tokens


def test_truncated_completions_are_scored_without_loss_and_their_tokens_are_not_counted():
    finished = rollout_of([1], [2, 3, 4])
    cut = rollout_of([1], [5, 6], finish_reason="length")
    groups = [group_of(0, [finished, cut])]
    for mask_truncated, trained, tokens in [(True, [3], 3), (False, [2, 3], 5)]:
        (batch,) = pack_everywhere(
            groups, BatchConfig(max_tokens_per_micro_batch=BUDGET, mask_truncated=mask_truncated), 1
        )
        (micro_batch,) = batch.minibatches[0].micro_batches
        per_sequence = micro_batch.sequence_N[micro_batch.loss_mask_N].bincount().tolist()
        assert sorted(count for count in per_sequence if count) == trained
        assert batch.minibatches[0].counts.tokens == batch.minibatches[0].counts.batch_tokens == tokens
        assert batch.minibatches[0].counts.sequences == 2
        assert len(micro_batch.targets_N) == 5


def test_observed_tokens_are_read_but_never_scored():
    (batch,) = pack_everywhere(
        [group_of(0, [rollout_of([7], [1, 2, 3, 4], observed=2)])], BatchConfig(max_tokens_per_micro_batch=BUDGET), 1
    )
    (micro_batch,) = batch.minibatches[0].micro_batches
    assert micro_batch.input_ids_T.tolist() == [7, 1, 2, 3, 4]
    assert micro_batch.targets_N.tolist() == [1, 4]
    assert micro_batch.source_N.tolist() == [0, 3]


@pytest.mark.parametrize("nothing", ["every group is idle", "fewer sequences than ranks"])
def test_a_rank_without_work_gets_a_stand_in_that_carries_no_loss(nothing):
    groups = [group_of(0, [rollout_of([1], [2, 3])])]
    idle = [nothing == "every group is idle"]
    batches = pack_everywhere(groups, BatchConfig(max_tokens_per_micro_batch=BUDGET), 2, idle)
    without_work = [batch for batch in batches if is_stand_in(batch.minibatches[0].micro_batches[0])]
    assert len(without_work) == (2 if idle[0] else 1)
    stand_in = without_work[0].minibatches[0].micro_batches[0]
    assert stand_in.cu_seqlens.tolist() == [0, 2]
    assert stand_in.source_N.max() < stand_in.num_tokens
    assert without_work[0].minibatches[0].counts.sequences == 1


@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 5))
def test_minibatches_partition_the_groups_and_keep_siblings_together(count, minibatches, shuffle_seed):
    groups = [group_of(index, [rollout_of([index], [50, 51])] * 2) for index in range(count)]
    (batch,) = pack_everywhere(
        groups, BatchConfig(max_tokens_per_micro_batch=BUDGET, minibatches=minibatches), 1, shuffle_seed=shuffle_seed
    )
    prompts = [
        Counter(tokens[0] for m in part.micro_batches if not is_stand_in(m) for tokens, _ in unpack(m))
        for part in batch.minibatches
    ]
    assert sum(prompts, Counter()) == Counter(dict.fromkeys(range(count), 2))
    assert all(seen == 2 for part in prompts for seen in part.values())
    sizes = [len(part) for part in prompts]
    assert max(sizes) - min(sizes) <= 1
    assert [part.counts.sequences for part in batch.minibatches] == [2 * size for size in sizes]
    assert {part.counts.batch_tokens for part in batch.minibatches} == {4 * count}


def test_minibatches_are_shuffled_by_the_seed_and_by_nothing_else():
    groups = random_groups(8, 2)
    config = BatchConfig(max_tokens_per_micro_batch=BUDGET, minibatches=4)

    def first_minibatch(seed: int, groups: list[Group] = groups) -> list:
        (batch,) = pack_everywhere(groups, config, 1, shuffle_seed=seed)
        return [unpack(m) for m in batch.minibatches[0].micro_batches]

    assert first_minibatch(1) == first_minibatch(1)
    assert len({repr(first_minibatch(seed)) for seed in range(6)}) > 1


def test_imbalance_is_what_the_fullest_rank_has_above_the_mean():
    groups = [group_of(0, [rollout_of([1], [2] * 5), rollout_of([1], [2])])]
    even, uneven = (
        pack_everywhere(groups, BatchConfig(max_tokens_per_micro_batch=BUDGET), world_size)[0].imbalance
        for world_size in (1, 2)
    )
    assert even == 0.0
    assert uneven == pytest.approx(6 / 4 - 1)


def test_targets_follow_their_sources_across_sequence_borders():
    micro_batch = build_micro_batch([sequence_of(3), sequence_of(2)])
    assert micro_batch.source_N.tolist() == [0, 3]
    assert micro_batch.sequence_N.tolist() == [0, 1]


def test_a_rollout_that_sampled_nothing_is_not_packed_and_still_counts():
    said, silent = rollout_of([1, 2], [3, 4]), rollout_of([5, 6], [])
    groups = [group_of(0, [said, silent]), group_of(1, [silent, silent])]
    batches = pack_everywhere(groups, BatchConfig(max_tokens_per_micro_batch=BUDGET), world_size=2)
    packed = [m for batch in batches for part in batch.minibatches for m in part.micro_batches if not is_stand_in(m)]
    assert [micro_batch.input_ids_T.tolist() for micro_batch in packed] == [[1, 2, 3, 4]]
    assert batches[0].minibatches[0].counts.sequences == 4
    assert batches[0].minibatches[0].counts.tokens == 2


def siblings_of(prompt: list[int], *completions: int, group: int = 0) -> Group:
    """Completions of so many tokens."""
    return group_of(group, [rollout_of(prompt, [50 + index] * length) for index, length in enumerate(completions)])


def test_a_beginning_that_siblings_share_is_there_once_and_seen_by_each():
    (batch,) = pack_everywhere([siblings_of([1, 2], 3, 1)], BatchConfig(max_tokens_per_micro_batch=BUDGET), 1)
    (micro_batch,) = batch.minibatches[0].micro_batches
    assert micro_batch.input_ids_T.tolist() == [1, 2, 50, 50, 50, 51]
    assert micro_batch.position_ids_T.tolist() == [0, 1, 2, 3, 4, 2]
    assert micro_batch.cu_seqlens.tolist() == [0, 2, 5, 6]
    assert micro_batch.source_N.tolist() == [1, 2, 3, 1], "both first tokens follow the last one of the prompt"
    shared = micro_batch.shared_keys
    assert shared.rows_E.tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 5]
    assert shared.cu_seqlens.tolist() == [0, 2, 7, 10]
    assert shared.keys_of_T.tolist() == [0, 1, 4, 5, 6, 9]
    assert shared.copies_UR.tolist() == [[2, 7], [3, 8]]
    assert (batch.num_tokens, batch.computed_tokens) == (8, 6)


def test_siblings_share_no_more_than_all_of_them_have_and_no_sampled_token():
    longer = rollout_of([1, 2, 9], [7, 7, 7, 7])
    groups = [group_of(0, [rollout_of([1, 2, 3], [7, 7, 7]), rollout_of([1, 2], [3, 7, 7]), longer])]
    (batch,) = pack_everywhere(groups, BatchConfig(max_tokens_per_micro_batch=BUDGET), 1)
    (micro_batch,) = batch.minibatches[0].micro_batches
    assert micro_batch.input_ids_T.tolist() == [1, 2, 9, 7, 7, 7, 7, 3, 7, 7, 7, 3, 7, 7]


def family_outlines(groups: int, siblings: int, shared: int, own: Callable[[], int]) -> list[Outline]:
    return [
        Outline(group=g, sibling=s, length=shared + own(), scored=1, trained=True, shared=shared)
        for g in range(groups)
        for s in range(siblings)
    ]


def test_work_with_shared_prompts_is_even_over_ranks_and_nearly_as_small_as_it_can_be():
    lengths = random.Random(0)
    outlines = family_outlines(32, 16, shared=80, own=lambda: lengths.randint(1, 900))
    least = computed_tokens(outlines)
    for world_size in (1, 2, 4, 8):
        shares = plan(outlines, 16_384, world_size)
        loads = [sum(map(computed_tokens, share)) for share in shares]
        assert sum(loads) <= 1.01 * least
        assert max(loads) <= 1.01 * sum(loads) / world_size
        assert len(shares[0]) <= 1.1 * least / 16_384 / world_size + 1
        assert sorted(o for share in shares for bin in share for o in bin) == outlines


def test_siblings_stay_apart_where_their_beginning_is_not_worth_it():
    outlines = family_outlines(8, 4, shared=2, own=lambda: 400)
    shares = plan(outlines, 1024, 2)
    assert all(outline.shared == 0 for share in shares for bin in share for outline in bin)


def test_copies_of_a_long_beginning_s_keys_count_as_a_part_of_the_budget():
    outlines = family_outlines(1, 64, shared=1000, own=lambda: 10)
    shares = plan(outlines, 4000, 1)
    sizes = sorted(len(bin) for bin in shares[0])
    assert len(sizes) == 6, "in five one would hold 13, too many for 1010 + 12 * (10 + 1000 / 4)"
    assert sizes[-1] - sizes[0] <= 3, "and evenly"


def test_micro_batches_are_built_when_they_are_asked_for_and_every_time_alike():
    groups = random_groups(4, 3)
    (batch,) = pack_everywhere(groups, BatchConfig(max_tokens_per_micro_batch=BUDGET), 1)
    micro_batches = batch.minibatches[0].micro_batches
    first, again = (list(micro_batches) for _ in range(2))
    assert len(first) == len(micro_batches) > 1
    assert [unpack(m) for m in first] == [unpack(m) for m in again]
    assert not any(a is b for a, b in zip(first, again, strict=True))
