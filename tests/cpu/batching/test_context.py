"""Context parallelism: the ranks of a group hold a micro-batch's rows in order, and each scored token is on one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from colocated_grpo.batching.micro_batch import MicroBatch, TrainSequence, build_micro_batch, local_rows
from colocated_grpo.batching.pack import pack
from colocated_grpo.settings.training import BatchConfig
from colocated_grpo.types import ContextGroup
from tests.support.small_policy import random_groups, sequence_of, with_own_advantages

COUNT = 3


def split(sequences: Sequence[TrainSequence]) -> list[MicroBatch]:
    whole = build_micro_batch(sequences, COUNT)
    return [local_rows(whole, ContextGroup(rank, COUNT, "group")) for rank in range(COUNT)]


def packed(siblings: int, budget: int, **place) -> list[MicroBatch]:
    groups = [
        replace(group, rollouts=[replace(one, ref_logprobs=one.sampling_logprobs) for one in group.rollouts])
        for group in with_own_advantages(random_groups(5, siblings))
    ]
    advantages = [[0.0] * siblings] * len(groups)
    config = BatchConfig(max_tokens_per_micro_batch=budget)
    batch = pack(groups, advantages, [False] * len(groups), config, shuffle_seed=0, **place)
    return list(batch.minibatches[0].micro_batches)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors))


@pytest.mark.parametrize("siblings", [1, 4], ids=["alone", "with common prefixes"])
def test_parts_together_are_the_micro_batch(siblings):
    (whole,) = packed(siblings, 1024, rank=0, world_size=1)
    rows = whole.tokens.num_tokens
    assert (whole.tokens.prefix_keys is None) == (siblings == 1)
    assert rows % COUNT, "the last part ends with padding"
    groups = [ContextGroup(rank, COUNT, "group") for rank in range(COUNT)]
    parts = [packed(siblings, 1024, rank=one.rank, world_size=COUNT, context=one)[0] for one in groups]
    padded = rows + -rows % COUNT
    for name in ("input_ids_T", "position_ids_T"):
        assert torch.equal(joined(getattr(part.tokens, name) for part in parts)[:rows], getattr(whole.tokens, name))
    for part in parts:
        assert (len(part.tokens.input_ids_T), part.tokens.num_rows) == (padded // COUNT, padded)
        assert part.tokens.cu_seqlens.tolist() == [*whole.tokens.cu_seqlens.tolist(), padded]
    # In the order of their rows, because parts of a micro-batch with common prefixes mix its sequences.
    order = whole.tokens.source_N.argsort(stable=True)
    sources = joined(part.tokens.source_N + index * (padded // COUNT) for index, part in enumerate(parts))
    again = sources.argsort(stable=True)
    assert torch.equal(sources[again], whole.tokens.source_N[order])
    for name in ("targets_N", "temperature_N"):
        actual = joined(getattr(part.tokens, name) for part in parts)
        assert torch.equal(actual[again], getattr(whole.tokens, name)[order])
    for name in (field.name for field in fields(whole.loss_inputs) if field.name.endswith("_N")):
        expected = getattr(whole.loss_inputs, name)
        if expected is not None:
            assert torch.equal(joined(getattr(part.loss_inputs, name) for part in parts)[again], expected[order])


def test_a_part_that_predicts_nothing_has_one_token_without_loss():
    first, *others = split([sequence_of(9)])
    assert first.loss_inputs.loss_mask_N.tolist() == [True]
    for part in others:
        assert part.loss_inputs.loss_mask_N.tolist() == [False]
        assert part.tokens.source_N.item() < len(part.tokens.input_ids_T)


def test_the_padding_of_a_rank_without_work_is_split_too():
    parts = split([])
    assert [len(part.tokens.input_ids_T) for part in parts] == [2] * COUNT, "the compiler specializes on sizes of 1"
    assert not any(part.loss_inputs.loss_mask_N.any() for part in parts)


def test_routes_stay_beside_their_tokens():
    routes_TLK = np.arange(1, 1 + 5 * 2, dtype=np.uint8).reshape(5, 2, 1)
    parts = [part.tokens.routes for part in split([replace(sequence_of(8), routes=routes_TLK)])]
    experts_TLK = torch.cat([part.experts_LTK for part in parts], 1).swapaxes(0, 1)
    assert experts_TLK.flatten().tolist() == [*routes_TLK.flatten().tolist(), *[0] * 4 * 2]
    assert joined(part.recorded_T for part in parts).tolist() == [True] * 5 + [False] * 4


def test_micro_batches_of_a_group_have_the_tokens_of_all_its_ranks():
    alone = packed(2, 40, rank=1, world_size=2)
    together = [packed(2, 20, rank=rank, world_size=4, context=ContextGroup(rank % 2, 2, "group")) for rank in (2, 3)]
    assert len(alone) == len(together[0]) == len(together[1]) > 1
    for whole, *parts in zip(alone, *together, strict=True):
        ids = joined(part.tokens.input_ids_T for part in parts)
        assert torch.equal(ids[: whole.tokens.num_tokens], whole.tokens.input_ids_T)
