"""From groups and advantages to packed micro-batches, the same number on every rank.

Every rank holds the same groups and computes the same plan, so nothing is communicated here. Pure: arrays and tensors.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from colocated_grpo.batching.micro_batch import PADDING_TOKENS, MicroBatch, TrainSequence, build_micro_batch
from colocated_grpo.batching.plan import Outline, computed_tokens, plan
from colocated_grpo.config.schema import BatchConfig
from colocated_grpo.losses import Counts
from colocated_grpo.types import Group


@dataclass(frozen=True, kw_only=True)
class Minibatch:
    """What one optimizer step consumes on this rank."""

    micro_batches: Sequence[MicroBatch]
    counts: Counts
    """Over all ranks; rollouts that were dropped before packing are counted."""


class OnDemand(Sequence[MicroBatch]):
    """Micro-batches that are built as they are asked for: the host builds the next while the device runs the last."""

    def __init__(self, bins: Sequence[Sequence[Outline]], build: Callable[[Sequence[Outline]], MicroBatch]) -> None:
        self._bins = bins
        self._build = build

    def __len__(self) -> int:
        return len(self._bins)

    def __getitem__(self, index: int) -> MicroBatch:
        return self._build(self._bins[index])


@dataclass(frozen=True, kw_only=True)
class Batch:
    minibatches: list[Minibatch]
    num_tokens: int
    """Of the trained rollouts over all ranks and minibatches, one epoch."""
    computed_tokens: int
    """Rows that the model computes for them: a beginning that siblings of a micro-batch share is computed once."""
    imbalance: float
    """Computed tokens of the fullest rank over the mean, minus one."""
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
    build = lambda bin: build_micro_batch([_sequence(outline, groups, advantages) for outline in bin])  # noqa: E731
    minibatches, loads, num_tokens, stand_ins = [], [0] * world_size, 0, 0
    count = min(config.minibatches, len(groups))  # groups may be held back, all of them too
    for part in range(count):
        members = order[part::count]
        chosen = [outline for g in members for outline in outlines[g]]
        kept = [g for g in members if not (idle[g] and config.drop_constant_groups)]
        # An episode may fail before the policy said anything: nothing of it is scored.
        packed = [outline for g in kept for outline in outlines[g] if outline.scored]
        shares = plan(packed, config.max_tokens_per_micro_batch, world_size)
        loads = [load + sum(map(computed_tokens, share)) for load, share in zip(loads, shares, strict=True)]
        num_tokens += sum(outline.length for outline in packed)
        stand_ins += sum(not bin for share in shares for bin in share)
        counts = Counts(
            tokens=sum(outline.loss_tokens for outline in chosen),
            sequences=len(chosen),
            batch_tokens=batch_tokens,
            minibatches=count,
        )
        minibatches.append(Minibatch(micro_batches=OnDemand(shares[rank], build), counts=counts))
    total = sum(loads)
    return Batch(
        minibatches=minibatches,
        num_tokens=num_tokens,
        computed_tokens=total,
        imbalance=max(loads) * world_size / total - 1 if total else 0.0,
        padding=stand_ins * len(PADDING_TOKENS) / num_tokens if num_tokens else 0.0,
        lacks_sampling_logprobs=any(r.sampling_logprobs is None for group in groups for r in group.rollouts),
    )


def _outlines(group: int, siblings: Group, config: BatchConfig) -> list[Outline]:
    shared = _shared_tokens(siblings)
    return [
        Outline(
            group=group,
            sibling=sibling,
            length=len(rollout.token_ids),
            scored=rollout.loss_mask.count(True),
            shared=shared,
            trained=not (config.mask_truncated and rollout.finish_reason == "length"),
        )
        for sibling, rollout in enumerate(siblings.rollouts)
    ]


def _shared_tokens(siblings: Group) -> int:
    """Tokens before the first sampled one that all rollouts begin with."""
    beginnings = [rollout.token_ids[: rollout.prompt_length] for rollout in siblings.rollouts]
    first, last = min(beginnings), max(beginnings)  # in their order: what these two have in common all have
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))


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
        group=outline.group,
        shared=outline.shared,
    )


def _at(positions: np.ndarray, values: Sequence[float] | None) -> np.ndarray:
    """Values at these positions; NaN where there are none."""
    if values is None:
        return np.full(len(positions), math.nan, np.float32)
    return np.array(values, np.float32)[positions]
