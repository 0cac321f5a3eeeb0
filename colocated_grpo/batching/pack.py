"""Packing of groups and advantages into micro-batches, equally many on every rank.

Every rank has all groups and computes the same plan, so nothing is communicated here. Tensors are built on the host.
"""

import math
import random
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import numpy as np

from colocated_grpo.batching.micro_batch import PADDING_TOKENS, MicroBatch, TrainSequence, build_micro_batch, local_rows
from colocated_grpo.batching.plan import Outline, computed_tokens, plan
from colocated_grpo.errors import RunError
from colocated_grpo.losses.inputs import Counts
from colocated_grpo.metrics import Stat
from colocated_grpo.settings.training import BatchConfig
from colocated_grpo.types import CUT_REASONS, ContextGroup, Group, Rollout


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Trained tokens of a minibatch that are not in the forward pass, over all ranks."""

    tokens: int = 0
    known: int = 0
    """Tokens of rollouts with log-probabilities from the sampler."""
    surprisal: float = 0.0
    """Sum of the negative log-probabilities of the `known` tokens."""

    def stats(self, names: Iterable[str], world_size: int) -> dict[str, Stat]:
        """Return one rank's part of what the left-out tokens add to the metrics in `names`.

        The metrics thus count every trained token, as in TRL. The mean of -log p over tokens sampled from p is an
        unbiased estimate of the entropy of p. No token of a group with advantage 0 is clipped.
        """
        entropy = Stat.mean(self.surprisal / world_size, self.known / world_size)
        unclipped = Stat.mean(0.0, self.tokens / world_size)
        clipped = (name for name in names if name.startswith("clip_fraction/"))
        return {"entropy": entropy} | dict.fromkeys(clipped, unclipped)


class LazyMicroBatches:
    """Micro-batches built on access: the host builds a micro-batch while the device runs the previous micro-batch."""

    def __init__(self, bins: Sequence[Sequence[Outline]], build: Callable[[Sequence[Outline]], MicroBatch]) -> None:
        self._bins = bins
        self._build = build

    def __len__(self) -> int:
        return len(self._bins)

    def __getitem__(self, index: int) -> MicroBatch:
        return self._build(self._bins[index])


@dataclass(frozen=True, kw_only=True)
class Minibatch:
    """Input of one optimizer step on this rank."""

    micro_batches: Sequence[MicroBatch] | LazyMicroBatches
    counts: Counts
    """Over all ranks, including rollouts that were dropped before packing."""
    left_out: LeftOut = field(default_factory=LeftOut)
    """Tokens of the rollouts that were dropped before packing."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """This rank's part of one rollout phase, and statistics over all ranks."""

    minibatches: list[Minibatch]
    num_tokens: int
    """Tokens of the trained rollouts over all ranks and minibatches, one epoch."""
    computed_tokens: int
    """Rows that the model computes for these tokens: a common prefix of siblings is computed once per micro-batch."""
    imbalance: float
    """Computed tokens of the fullest rank, or context-parallel group, over the mean, minus one."""
    padding: float
    """Tokens of padding micro-batches, as a fraction of num_tokens."""
    lacks_sampling_logprobs: bool = False
    """True if any rank has NaN in sampling_logprobs_N."""

    def map(self, change: Callable[[MicroBatch], MicroBatch]) -> "Batch":
        """Return the batch with every micro-batch built and replaced by `change(micro_batch)`."""
        parts = [replace(part, micro_batches=[change(m) for m in part.micro_batches]) for part in self.minibatches]
        return replace(self, minibatches=parts)


def pack(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[float]],
    without_gradient: Sequence[bool],
    config: BatchConfig,
    *,
    rank: int,
    world_size: int,
    context: ContextGroup | None = None,
    shuffle_seed: int,
    share_prefixes: bool = True,
) -> Batch:
    """Split groups into minibatches, and pack this rank's rollouts of each minibatch.

    advantages: [group][sibling], for every token that the sibling sampled; a rollout's own advantages take precedence.
    without_gradient: [group], True where no token has a gradient; config.drop_constant_groups drops these groups.
    config: its max_tokens_per_micro_batch is a number, not 'auto'.
    context: group of consecutive ranks that each micro-batch is split over; None: every rank has its own micro-batches.
    share_prefixes: compute each common prefix of siblings once per micro-batch.
    Siblings stay in one minibatch; groups are shuffled over minibatches by `shuffle_seed`.
    An episode of several sequences counts as that many siblings, each with the episode's advantage.
    """
    size = 1 if context is None else context.size
    assert config.max_tokens_per_micro_batch != "auto"
    budget = config.max_tokens_per_micro_batch * size
    data_ranks, data_rank = world_size // size, rank // size
    groups, advantages = _all_sequences(groups, advantages)
    order = list(range(len(groups)))
    if config.minibatches > 1:
        random.Random(shuffle_seed).shuffle(order)
    outlines = [_outlines(index, group, config, share_prefixes) for index, group in enumerate(groups)]
    batch_tokens = sum(outline.loss_tokens for siblings in outlines for outline in siblings)
    sequence = partial(_sequence, groups=groups, advantages=advantages)

    def build(bin: Sequence[Outline]) -> MicroBatch:
        return local_rows(build_micro_batch([sequence(outline) for outline in bin], size), context)

    minibatches, loads, num_tokens, num_padding = [], [0] * data_ranks, 0, 0
    count = min(config.minibatches, len(groups))  # a source may return fewer groups, even none
    for part in range(count):
        members = order[part::count]
        chosen = [outline for g in members for outline in outlines[g]]
        kept = [g for g in members if not (without_gradient[g] and config.drop_constant_groups)]
        # An episode that fails before the policy has sampled anything has no scored tokens.
        packed = [outline for g in kept for outline in outlines[g] if outline.scored]
        _check_lengths(packed, budget, size)
        assignment = plan(packed, budget, data_ranks)
        loads = [load + sum(map(computed_tokens, bins)) for load, bins in zip(loads, assignment, strict=True)]
        num_tokens += sum(outline.length for outline in packed)
        num_padding += sum(not bin for bins in assignment for bin in bins)
        counts = Counts(
            tokens=sum(outline.loss_tokens for outline in chosen),
            sequences=len(chosen),
            batch_tokens=batch_tokens,
            minibatches=count,
        )
        dropped = left_out(groups, (outline for g in members if g not in kept for outline in outlines[g]))
        micro_batches = LazyMicroBatches(assignment[data_rank], build)
        minibatches.append(Minibatch(micro_batches=micro_batches, counts=counts, left_out=dropped))
    total = sum(loads)
    return Batch(
        minibatches=minibatches,
        num_tokens=num_tokens,
        computed_tokens=total,
        imbalance=max(loads) * data_ranks / total - 1 if total else 0.0,
        padding=num_padding * len(PADDING_TOKENS) / num_tokens if num_tokens else 0.0,
        lacks_sampling_logprobs=any(r.sampling_logprobs is None for group in groups for r in group.rollouts),
    )


def _check_lengths(outlines: Iterable[Outline], budget: int, ranks: int) -> None:
    if (longest := max((outline.length for outline in outlines), default=0)) > budget:
        problem = f"a rollout of {longest} tokens, sampled before the run was resumed, does not fit"
        least = -(-longest // ranks)
        raise RunError(f"batch.max_tokens_per_micro_batch={budget // ranks}: {problem}; set it to at least {least}")


def _all_sequences(
    groups: Sequence[Group], advantages: Sequence[Sequence[float]]
) -> tuple[list[Group], list[list[float]]]:
    """Return the groups with one rollout per sequence of each episode, and the advantage of each sequence.

    All sequences of an episode have the episode's advantage.
    """
    whole, values = [], []
    for group, rewarded in zip(groups, advantages, strict=True):
        pairs = zip(group.rollouts, rewarded, strict=True)
        siblings = [(one, value) for episode, value in pairs for one in episode.sequences]
        whole.append(replace(group, rollouts=[one for one, _ in siblings]))
        values.append([value for _, value in siblings])
    return whole, values


def _outlines(index: int, group: Group, config: BatchConfig, share_prefixes: bool) -> list[Outline]:
    rollouts = group.rollouts
    order = _tree(rollouts) if share_prefixes else [(sibling, 0) for sibling in range(len(rollouts))]
    return [
        Outline(
            group=index,
            sibling=sibling,
            length=len(rollouts[sibling].token_ids),
            scored=rollouts[sibling].loss_mask.count(True),
            trained=not (config.mask_truncated and rollouts[sibling].finish_reason in CUT_REASONS),
            prefix_length=prefix_length,
        )
        for sibling, prefix_length in order
    ]


def _tree(rollouts: Sequence[Rollout]) -> list[tuple[int, int]]:
    """Return the siblings depth first in the tree of their tokens, each with the length of its prefix.

    The prefix is in common with the sibling before, which is the one with the longest. The tree has all prompts, and
    the sampled tokens with which another prompt continues; rollouts of one prompt come longest first. Those that have
    no sampled token are not packed and come last.
    """
    # No prefix is longer than the longest prompt. Bytes, big-endian, have the order of their tokens.
    longest = max(rollout.prompt_length for rollout in rollouts)
    leading = [np.array(rollout.token_ids[:longest], ">i4").tobytes() for rollout in rollouts]
    prompts = sorted(own[: 4 * rollout.prompt_length] for own, rollout in zip(leading, rollouts, strict=True))
    paths = []
    for own in leading:
        place = bisect(prompts, own)  # after its own prompt
        paths.append(own[: 4 * max(_common_length(own, prompt) for prompt in prompts[place - 1 : place + 1])])
    unsampled = [True not in rollout.loss_mask for rollout in rollouts]
    order = sorted(range(len(rollouts)), key=lambda i: (unsampled[i], paths[i], -len(rollouts[i].token_ids)))
    prefixes = [_common_length(paths[before], paths[after]) for before, after in pairwise([*order[:1], *order])]
    # At least one token of each sequence is computed.
    return [(i, min(prefix, len(rollouts[i].token_ids) - 1)) for i, prefix in zip(order, prefixes, strict=True)]


def _common_length(first: bytes, second: bytes) -> int:
    """Return the number of leading tokens, of 4 bytes each, that are equal."""
    shorter = min(len(first), len(second)) // 4
    equal = np.frombuffer(first, np.int32, shorter) == np.frombuffer(second, np.int32, shorter)
    return shorter if equal.all() else int(equal.argmin())


def _sequence(outline: Outline, groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> TrainSequence:
    rollout = groups[outline.group].rollouts[outline.sibling]
    scored = np.flatnonzero(rollout.loss_mask)
    own_advantages, ref_logprobs = rollout.advantages, rollout.ref_logprobs
    value = advantages[outline.group][outline.sibling]
    return TrainSequence(
        token_ids=np.array(rollout.token_ids, np.int64),
        scored=scored,
        sampling_logprobs=_at(scored, rollout.sampling_logprobs),
        advantages=np.array([value] * len(scored) if own_advantages is None else own_advantages, np.float32),
        temperature=rollout.temperature,
        trained=outline.trained,
        plain=rollout.plain,
        ref_logprobs=None if ref_logprobs is None else _at(scored, ref_logprobs),
        routes=rollout.routes,
        group=outline.group,
        prefix_length=outline.prefix_length,
    )


def _at(positions: np.ndarray, values: Sequence[float] | None) -> np.ndarray:
    """Return the float32 values at `positions`; NaN if `values` is None."""
    if values is None:
        return np.full(len(positions), math.nan, np.float32)
    return np.array(values, np.float32)[positions]


def left_out(groups: Sequence[Group], outlines: Iterable[Outline]) -> LeftOut:
    """Sum over the rollouts of `outlines`. groups: all groups of the batch, indexed by Outline.group."""
    tokens = known = 0
    surprisal = 0.0
    for outline in outlines:
        logprobs = groups[outline.group].rollouts[outline.sibling].sampling_logprobs
        tokens += outline.loss_tokens
        # Use the built-in sum, because there may be millions of tokens. Tokens that were not sampled have 0.0.
        if outline.trained and logprobs is not None and math.isfinite(total := sum(logprobs)):
            known += outline.loss_tokens
            surprisal -= total
    return LeftOut(tokens=tokens, known=known, surprisal=surprisal)
