"""From groups and advantages to packed micro-batches, the same number on every rank.

Every rank holds the same groups and computes the same plan, so nothing is communicated here. Pure: arrays and tensors.
Shapes: T packed tokens of one micro-batch, N scored tokens (the ones that the policy sampled), S rollouts in it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from colocated_grpo.config.schema import BatchConfig
from colocated_grpo.errors import RunError
from colocated_grpo.losses import Counts
from colocated_grpo.types import Group

PADDING_TOKENS = [0, 0]
"""What a rank without work of its own runs: two tokens, one of them scored and masked out."""


class Outline(NamedTuple):
    """A rollout as planning sees it; only the rank that trains it turns its tokens into arrays."""

    group: int
    sibling: int
    length: int
    scored: int
    """Tokens that the policy sampled."""
    trained: bool
    """False: its tokens are scored but carry no loss (a truncated completion that is masked)."""

    @property
    def loss_tokens(self) -> int:
        return self.scored if self.trained else 0


@dataclass(frozen=True, kw_only=True)
class TrainSequence:
    """One rollout ready for training.

    Arrays, one conversion a rollout: of a list torch would read every Python number by itself.
    """

    token_ids: np.ndarray
    scored: np.ndarray
    """Positions of sampled tokens, ascending; position 0 is never scored."""
    sampling_logprobs: np.ndarray
    """Of the scored tokens, as `advantages`; NaN where the sampler's are not known."""
    advantages: np.ndarray
    temperature: float
    trained: bool
    ref_logprobs: np.ndarray | None = None
    """From the environment; None: not given."""

    @property
    def length(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One forward pass of one rank. Example: two rollouts of 5 and 3 tokens give T = 8, cu_seqlens = [0, 5, 8]."""

    input_ids_T: Tensor
    position_ids_T: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    source_N: Tensor
    """Position whose hidden state predicts the scored token, the one before it."""
    targets_N: Tensor
    temperature_N: Tensor
    sequence_N: Tensor
    num_sequences: int
    loss_mask_N: Tensor
    advantages_N: Tensor
    sampling_logprobs_N: Tensor
    old_logprobs_N: Tensor | None = None
    ref_logprobs_N: Tensor | None = None
    """As packed: from the environment, NaN where it gave none."""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids_T)


@dataclass(frozen=True, kw_only=True)
class Minibatch:
    """What one optimizer step consumes on this rank."""

    micro_batches: list[MicroBatch]
    counts: Counts
    """Over all ranks; rollouts that were dropped before packing are counted."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    minibatches: list[Minibatch]
    num_tokens: int
    """Packed tokens over all ranks and minibatches, one epoch."""
    imbalance: float
    """Tokens of the fullest rank over the mean, minus one."""
    padding: float
    """Tokens that run without being trained, over those that are: stand-ins of ranks without work."""
    lacks_sampling_logprobs: bool = False
    """Whether any rank holds NaN in sampling_logprobs_N."""

    def map(self, change: Callable[[MicroBatch], MicroBatch]) -> Batch:
        """The batch with every micro-batch replaced."""
        parts = [replace(part, micro_batches=[change(m) for m in part.micro_batches]) for part in self.minibatches]
        return replace(self, minibatches=parts)


def pack(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[float]],
    idle: Sequence[bool],
    config: BatchConfig,
    *,
    rank: int,
    world_size: int,
    shuffle_seed: int,
) -> Batch:
    """Split groups into minibatches and pack this rank's share of each.

    advantages: [group][sibling], of every token that it sampled; those that a rollout brings itself go before.
    idle: [group], True where nothing has a gradient.
    Siblings stay in one minibatch; groups are shuffled over minibatches by `shuffle_seed`.
    """
    order = list(range(len(groups)))
    if config.minibatches > 1:
        random.Random(shuffle_seed).shuffle(order)
    outlines = [_outlines(index, group, config) for index, group in enumerate(groups)]
    batch_tokens = sum(outline.loss_tokens for siblings in outlines for outline in siblings)
    minibatches, loads, stand_ins = [], [0] * world_size, 0
    count = min(config.minibatches, len(groups))  # groups may be held back, all of them too
    for part in range(count):
        members = order[part::count]
        chosen = [outline for g in members for outline in outlines[g]]
        kept = [g for g in members if not (idle[g] and config.drop_constant_groups)]
        # An episode may fail before the policy said anything: nothing of it is scored.
        packed = [outline for g in kept for outline in outlines[g] if outline.scored]
        shares = plan(packed, config.max_tokens_per_micro_batch, world_size)
        loads = [load + sum(o.length for bin in share for o in bin) for load, share in zip(loads, shares, strict=True)]
        stand_ins += sum(not bin for share in shares for bin in share)
        counts = Counts(
            tokens=sum(outline.loss_tokens for outline in chosen),
            sequences=len(chosen),
            batch_tokens=batch_tokens,
            minibatches=count,
        )
        own = [build_micro_batch([_sequence(o, groups, advantages) for o in bin]) for bin in shares[rank]]
        minibatches.append(Minibatch(micro_batches=own, counts=counts))
    total = sum(loads)
    return Batch(
        minibatches=minibatches,
        num_tokens=total,
        imbalance=max(loads) * world_size / total - 1 if total else 0.0,
        padding=stand_ins * len(PADDING_TOKENS) / total if total else 0.0,
        lacks_sampling_logprobs=any(r.sampling_logprobs is None for group in groups for r in group.rollouts),
    )


def _outlines(group: int, siblings: Group, config: BatchConfig) -> list[Outline]:
    return [
        Outline(
            group=group,
            sibling=sibling,
            length=len(rollout.token_ids),
            scored=rollout.loss_mask.count(True),
            trained=not (config.mask_truncated and rollout.finish_reason == "length"),
        )
        for sibling, rollout in enumerate(siblings.rollouts)
    ]


def _sequence(outline: Outline, groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> TrainSequence:
    rollout = groups[outline.group].rollouts[outline.sibling]
    scored = np.flatnonzero(rollout.loss_mask)
    sampling, ref, given = rollout.sampling_logprobs, rollout.ref_logprobs, rollout.advantages
    value = advantages[outline.group][outline.sibling]
    return TrainSequence(
        token_ids=np.array(rollout.token_ids, np.int64),
        scored=scored,
        sampling_logprobs=_at(scored, sampling),
        advantages=np.full(len(scored), value, np.float32) if given is None else np.array(given, np.float32),
        temperature=rollout.temperature,
        trained=outline.trained,
        ref_logprobs=None if ref is None else _at(scored, ref),
    )


def _at(positions: np.ndarray, values: Sequence[float] | None) -> np.ndarray:
    """Values at these positions; NaN where there are none."""
    if values is None:
        return np.full(len(positions), math.nan, np.float32)
    return np.array(values, np.float32)[positions]


def plan(outlines: Sequence[Outline], budget: int, world_size: int) -> list[list[list[Outline]]]:
    """Deal rollouts to [rank][micro-batch]: no bin above `budget` tokens, equally many bins a rank, loads balanced.

    Longest first into the emptiest bin (Graham's LPT rule): with many sequences the bins differ by less than one short
    sequence. At least one bin a rank, possibly empty: a rank without work still joins the collectives.
    """
    longest_first = sorted(outlines, key=lambda outline: (-outline.length, outline.group, outline.sibling))
    if longest_first and longest_first[0].length > budget:
        raise RunError(
            f"batch.max_tokens_per_micro_batch={budget}: a rollout of {longest_first[0].length} tokens cannot be "
            "packed; it was sampled before the run was resumed with less room"
        )
    total = sum(outline.length for outline in longest_first)
    per_rank = max(1, -(-total // (budget * world_size)))
    while (bins := _fill_bins(longest_first, budget, per_rank * world_size)) is None:
        per_rank += 1
    return _deal(bins, world_size)


def _fill_bins(longest_first: Sequence[Outline], budget: int, count: int) -> list[list[Outline]] | None:
    bins: list[list[Outline]] = [[] for _ in range(count)]
    loads = [0] * count
    for outline in longest_first:
        emptiest = min(range(count), key=loads.__getitem__)
        if loads[emptiest] + outline.length > budget:
            return None
        bins[emptiest].append(outline)
        loads[emptiest] += outline.length
    return bins


def _deal(bins: list[list[Outline]], world_size: int) -> list[list[list[Outline]]]:
    """Fullest bin to the rank with the least so far, among the ranks that still lack one this round."""
    load = lambda bin: sum(outline.length for outline in bin)  # noqa: E731
    shares: list[list[list[Outline]]] = [[] for _ in range(world_size)]
    totals = [0] * world_size
    fullest_first = sorted(bins, key=load, reverse=True)
    for start in range(0, len(bins), world_size):
        ranks = sorted(range(world_size), key=totals.__getitem__)
        for rank, bin in zip(ranks, fullest_first[start : start + world_size], strict=True):
            shares[rank].append(bin)
            totals[rank] += load(bin)
    return shares


def build_micro_batch(sequences: Sequence[TrainSequence]) -> MicroBatch:
    """Concatenate sequences without padding. No sequences: a harmless stand-in that keeps the collectives aligned."""
    if not sequences:
        return _stand_in()
    lengths = [seq.length for seq in sequences]
    scored = [len(seq.scored) for seq in sequences]
    starts = np.cumsum([0, *lengths])
    return MicroBatch(
        input_ids_T=_joined([seq.token_ids for seq in sequences]),
        position_ids_T=_joined([np.arange(length) for length in lengths]),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        max_seqlen=max(lengths),
        source_N=_joined([seq.scored + (start - 1) for seq, start in zip(sequences, starts, strict=False)]),
        targets_N=_joined([seq.token_ids[seq.scored] for seq in sequences]),
        temperature_N=_repeated(np.array([seq.temperature for seq in sequences], np.float32), scored),
        sequence_N=_repeated(np.arange(len(sequences)), scored),
        num_sequences=len(sequences),
        loss_mask_N=_repeated(np.array([seq.trained for seq in sequences]), scored),
        advantages_N=_joined([seq.advantages for seq in sequences]),
        sampling_logprobs_N=_joined([seq.sampling_logprobs for seq in sequences]),
        ref_logprobs_N=_given_ref_logprobs(sequences),
    )


def _given_ref_logprobs(sequences: Sequence[TrainSequence]) -> Tensor | None:
    if all(seq.ref_logprobs is None for seq in sequences):
        return None
    return _joined([_at(seq.scored, None) if seq.ref_logprobs is None else seq.ref_logprobs for seq in sequences])


def _joined(arrays: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))


def _repeated(values: np.ndarray, counts: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.repeat(values, counts))


def _stand_in() -> MicroBatch:
    nothing = torch.zeros(1)
    return MicroBatch(
        input_ids_T=torch.tensor(PADDING_TOKENS),
        position_ids_T=torch.arange(2),
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
        max_seqlen=2,
        source_N=torch.tensor([0]),
        targets_N=torch.tensor([0]),
        temperature_N=torch.ones(1),
        sequence_N=torch.tensor([0]),
        num_sequences=1,
        loss_mask_N=torch.tensor([False]),
        advantages_N=nothing,
        sampling_logprobs_N=nothing,
    )
