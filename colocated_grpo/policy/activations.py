"""Choose the micro-batch size and the number of checkpointed blocks from measured memory.

Memory is measured in trial steps, because it depends on kernels, the compiler and other processes on the device.
"""

import gc
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import ceil
from typing import Literal, NamedTuple

import numpy as np
import torch

from colocated_grpo.batching.micro_batch import MicroBatch, TrainSequence, build_micro_batch, local_rows
from colocated_grpo.batching.pack import Minibatch
from colocated_grpo.errors import RunError, in_one_line
from colocated_grpo.losses.inputs import Counts
from colocated_grpo.metrics import Metrics
from colocated_grpo.policy.blocks import blocks_of, set_checkpointed
from colocated_grpo.policy.policy import Policy
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.training import PolicyConfig

GIB = 1 << 30
AUTO_TOKENS = 24_576, 16_384, 8_192, 4_096, 2_048
"""Candidate sizes for max_tokens_per_micro_batch='auto', largest first. Larger micro-batches spread a fixed host cost
over more tokens, and their memory grows linearly."""
MAX_TOKENS_ON_CPU = 16_384
"""Largest automatic size on CPU, where memory is not measured."""
MIN_TOKENS_WITHOUT_CHECKPOINTS = 8_192
"""Smallest size to try without checkpointing. If this size does not fit, checkpointing blocks is cheaper than smaller
micro-batches, each of which has a fixed cost."""
USABLE_FRACTION = 0.92
"""Fraction of the free memory to plan with: the caching allocator loses some of it to fragmentation."""
TRIAL_TOKENS = 256, 2048
"""Bounds of the number of tokens in the larger trial micro-batch. The smaller one has about half as many tokens."""
TRIAL_PREFIX = 7
"""Length of the common prefix of a trial's sequences. torch.compile assumes that sizes that are equal in its
first call are always equal, and that a size of 1 is constant. This length therefore differs from 1, from a trial's
usual number of sequences (3), and from usual numbers of experts per token."""
TRIAL_DIVISOR = 8
"""A trial has 1/8 of a micro-batch's tokens. Without checkpointing, a trial needs about as much memory as a full
micro-batch with every block checkpointed. A trial therefore fits wherever training can fit."""
TO_HOST = "use policy.cpu_offload (with an adapter: policy.lora.base_on_host) or more GPUs"


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Device memory of a training step in bytes, in addition to weights and optimizer state."""

    peak: int
    """Peak with micro-batches of `tokens`."""
    tokens: int
    per_token: float
    """Bytes of activations per token that are kept for the backward pass."""

    def bytes_needed(self, tokens: int, blocks: int) -> float:
        """Return the peak with micro-batches of `tokens`, in a model of `blocks` blocks."""
        # A block's backward pass needs up to twice what the block keeps: gradients, and recomputed activations.
        # Small trials do not show this extra memory, because their peak is the logits of one chunk.
        return self.peak + (tokens - self.tokens) * self.per_token * (1 + 2 / blocks)


def min_checkpointed_blocks(
    footprint: Footprint, saved_per_token: float, *, tokens: int, free: float, blocks: int
) -> int:
    """Return how many of `blocks` must be checkpointed so that micro-batches of `tokens` fit into `free` bytes.

    footprint: measured without checkpointing. saved_per_token: bytes that one checkpointed block saves.
    Raises RunError if checkpointing every block is not enough.
    """
    if (needed := footprint.bytes_needed(tokens, blocks)) <= free:
        return 0
    least = needed - blocks * saved_per_token * tokens
    if least > free:
        needs = f"needs {least / GIB:.1f} GiB with every block checkpointed, and {free / GIB:.1f} GiB are usable"
        advice = "lower it, raise policy.context_parallel, or use more GPUs"
        raise RunError(f"batch.max_tokens_per_micro_batch={tokens}: a training step {needs}; {advice}")
    return min(blocks, ceil((needed - free) / (saved_per_token * tokens)))


@dataclass(frozen=True)
class StepSettings:
    """Settings that decide the memory of a training step."""

    max_tokens: int | Literal["auto"]
    """batch.max_tokens_per_micro_batch."""
    longest: int
    """Tokens of the longest sequence."""
    policy: PolicyConfig

    @classmethod
    def of(cls, config: Config) -> "StepSettings":
        return cls(config.batch.max_tokens_per_micro_batch, config.max_sequence_tokens, config.policy)

    def candidate_sizes(self) -> list[int]:
        """Return the candidate sizes, best first: the configured size, or all sizes that hold the longest sequence.

        Sizes count the tokens of one rank. With policy.context_parallel, a sequence is split over several ranks.
        """
        longest = ceil(self.longest / self.policy.context_parallel)
        if self.max_tokens != "auto":
            return [self.max_tokens]
        return [tokens for tokens in AUTO_TOKENS if tokens >= longest] or [longest]

    def trial_sizes(self) -> tuple[int, int]:
        """Return the tokens of the two trial micro-batches."""
        least, most = TRIAL_TOKENS
        sizes = self.candidate_sizes()
        full = sizes[len(sizes) // 2]
        large = max(4, min(full, max(least, min(most, full // TRIAL_DIVISOR))))
        # Blocks are compiled with the smaller size. It is odd, so it never equals a model width (see TRIAL_PREFIX).
        return max(3, (large // 2 - 1) | 1), large


@contextmanager
def out_of_memory_in_one_line(max_tokens: int | Literal["auto"]) -> Generator[None]:
    """Raise the OutOfMemoryError of a training step as RunError. max_tokens: batch.max_tokens_per_micro_batch.

    Trial steps cannot rule out this error: real batches have other shapes, and other processes may take memory later.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        why = in_one_line(error).partition(" If reserved ")[0]  # advice about torch's allocator follows
        problem = f"batch.max_tokens_per_micro_batch={max_tokens}: a training step does not fit into device memory"
        less = "lower it, set policy.gradient_checkpointing to true"
        room = f"free the engine's memory (engine.sleep true, sync_frequency 1), {TO_HOST}"
        raise RunError(f"{problem} ({why}); {less}, {room}") from error


class Fit(NamedTuple):
    """Decided size of micro-batches, and the device memory of their training steps on the fullest rank."""

    tokens: int
    needed: float = 0.0
    """Bytes of a training step, in addition to weights and optimizer state."""
    usable: float = 0.0
    """Bytes that training steps may use; 0 if nothing was measured."""

    def leaves_room(self, others: int) -> bool:
        """Return True if `others` bytes and a second training step fit beside a step into half of the memory."""
        return others + 2 * self.needed < self.usable / 2


def choose_micro_batch_size(policy: Policy, step: StepSettings, world: World) -> Fit:
    """Decide batch.max_tokens_per_micro_batch, and checkpoint the policy's blocks as needed.

    Call after everything that stays on the device during training has been allocated. Collective.
    """
    if world.device.type != "cpu":
        return fit_to_memory(policy, step, world)
    sizes = step.candidate_sizes()
    return Fit(next((size for size in sizes if size <= MAX_TOKENS_ON_CPU), sizes[-1]))


def fit_to_memory(policy: Policy, step: StepSettings, world: World) -> Fit:
    """Return a size that fits; with checkpointing 'auto' also choose the checkpointed blocks. Collective."""
    # No-op if this process has an engine: the state was allocated before the engine was sized.
    policy.update.init_state()
    try:
        if step.policy.gradient_checkpointing == "auto":
            return fit_tokens_and_blocks(policy, step, world)
        sizes = step.candidate_sizes()
        if len(sizes) == 1:
            return Fit(sizes[0])
        # The estimate is conservative: if no size fits by it, the smallest may still fit, or a step ends the run.
        return next(_sizes_that_fit(sizes, _measure_all_ranks(policy, step, world), policy), Fit(sizes[-1]))
    except torch.OutOfMemoryError as error:
        tried = f"batch.max_tokens_per_micro_batch={step.max_tokens}: a trial step of {step.trial_sizes()[1]} tokens"
        raise RunError(f"{tried} does not fit beside weights, optimizer state and engine; {TO_HOST}") from error


def fit_tokens_and_blocks(policy: Policy, step: StepSettings, world: World) -> Fit:
    """Return the best size without checkpointing, else a size with the fewest checkpointed blocks. Collective."""
    sizes, blocks = step.candidate_sizes(), len(blocks_of(policy.model))
    set_checkpointed(policy.model, 0)
    kept = _measure_all_ranks(policy, step, world)
    # All ranks decide from the same measurements, because the next trial is collective. The next trial also compiles
    # checkpointed blocks, so skip it if possible.
    fitting = _sizes_that_fit([s for s in sizes if s >= MIN_TOKENS_WITHOUT_CHECKPOINTS] or sizes[:1], kept, policy)
    if (fit := next(fitting, None)) is not None:
        return fit
    set_checkpointed(policy.model, blocks)
    checkpointed = _measure_all_ranks(policy, step, world)
    saved = [(a.per_token - b.per_token) / blocks for (a, _), (b, _) in zip(kept, checkpointed, strict=True)]
    usable = [usable for _, usable in checkpointed]

    def counts(size: int) -> list[int]:
        return [
            min_checkpointed_blocks(footprint, saving, tokens=size, free=free, blocks=blocks)
            for (footprint, _), saving, free in zip(kept, saved, usable, strict=True)
        ]

    # Every rank evaluates the measurements of all ranks, so an error is raised on every rank.
    tokens, count = _first_that_fits([s for s in sizes if s <= MIN_TOKENS_WITHOUT_CHECKPOINTS] or sizes, counts)
    set_checkpointed(policy.model, count)
    return Fit(tokens)


def _first_that_fits(sizes: Sequence[int], counts: Callable[[int], list[int]]) -> tuple[int, int]:
    """Return (first size that fits, largest count of any rank). Raises the last size's RunError if none fits."""
    for size in sizes[:-1]:
        with suppress(RunError):
            return size, max(counts(size))
    return sizes[-1], max(counts(sizes[-1]))


def _measure_all_ranks(policy: Policy, step: StepSettings, world: World) -> list[tuple[Footprint, float]]:
    """Return footprint and usable bytes of every rank. Collective."""
    return world.gather_objects((measure(policy, step), usable_bytes(world.device)))


def _sizes_that_fit(sizes: Sequence[int], measured: Sequence[tuple[Footprint, float]], policy: Policy) -> Iterator[Fit]:
    """Yield the sizes that fit on every rank with the checkpointing that was measured."""
    blocks = len(blocks_of(policy.model))
    for size in sizes:
        needed = [seen.bytes_needed(size, blocks) for seen, _ in measured]
        if all(own <= usable for own, (_, usable) in zip(needed, measured, strict=True)):
            yield Fit(size, max(needed), min(usable for _, usable in measured))


def measure(policy: Policy, step: StepSettings) -> Footprint:
    """Measure the footprint with the current checkpointing. Collective."""
    small, large = step.trial_sizes()
    # The first step compiles, tunes kernels and allocates workspaces, which stay allocated and are not counted.
    run_trial_step(policy, step, small)
    _, kept_by_small = _trial_memory(policy, step, small)
    peak, kept_by_large = _trial_memory(policy, step, large)
    return Footprint(peak=peak, tokens=large, per_token=(kept_by_large - kept_by_small) / (large - small))


def _trial_memory(policy: Policy, step: StepSettings, tokens: int) -> tuple[int, int]:
    """Return bytes allocated by a trial step: at its peak, and at the end of the last forward pass."""
    before, after_forward = torch.cuda.memory_allocated(policy.device), []
    torch.cuda.reset_peak_memory_stats(policy.device)
    hook = policy.model.register_forward_hook(
        lambda *_: after_forward.append(torch.cuda.memory_allocated(policy.device))
    )
    run_trial_step(policy, step, tokens)
    hook.remove()
    return torch.cuda.max_memory_allocated(policy.device) - before, after_forward[-1] - before


def run_trial_step(policy: Policy, step: StepSettings, tokens: int) -> None:
    """Compute and discard the gradients of two dummy micro-batches of `tokens` on each rank. Collective.

    Two micro-batches, because gradients stay unsharded between the micro-batches of an optimizer step.
    """
    rows = tokens * step.policy.context_parallel
    prefix = TRIAL_PREFIX if policy.model.shares_prefixes and rows > 2 * TRIAL_PREFIX else 0
    dummy = dummy_micro_batch(step, rows, prefix)
    micro_batch = local_rows(dummy, policy.context)
    counts = Counts(tokens=2 * rows, sequences=2, batch_tokens=2 * rows, minibatches=1)
    with torch.random.fork_rng([policy.device] if policy.device.type == "cuda" else []):
        policy.forward_backward(Minibatch(micro_batches=[micro_batch] * 2, counts=counts), Metrics(policy.device))
    for parameter in policy.parameters().values():
        parameter.grad = None


def dummy_micro_batch(step: StepSettings, tokens: int, prefix: int = TRIAL_PREFIX) -> MicroBatch:
    """Build a micro-batch of `tokens` in two or more sequences of allowed length. Tokens after the prefix are scored.

    prefix: length of the common prefix. Real siblings have one, and micro-batches without one run other kernels.
    """
    longest = max(1, min(ceil(tokens / 2), step.longest) - prefix)
    count, remainder = divmod(tokens - prefix, longest)
    first = max(1, prefix)  # a sequence's first token is never predicted
    lengths = [prefix + own for own in [*[longest] * count, remainder] if prefix + own > first]
    scored = _with_a_chunk([np.arange(first, length) for length in lengths], step)
    sequences = [
        TrainSequence(
            token_ids=np.zeros(length, np.int64),
            scored=positions,
            sampling_logprobs=np.full(len(positions), -1.0, np.float32),
            advantages=np.ones(len(positions), np.float32),
            temperature=1.0,
            trained=True,
            prefix_length=prefix,
        )
        for length, positions in zip(lengths, scored, strict=True)
    ]
    micro_batch = build_micro_batch(sequences, step.policy.context_parallel)
    logprobs_N = micro_batch.loss_inputs.sampling_logprobs_N
    return micro_batch.with_inputs(old_logprobs_N=logprobs_N, ref_logprobs_N=logprobs_N)


def _with_a_chunk(scored: Sequence[np.ndarray], step: StepSettings) -> list[np.ndarray]:
    """Repeat scored positions evenly, so that a trial of any size fills a chunk of logits as a full micro-batch does.

    In a context-parallel group, each rank fills a chunk.
    """
    chunk = min(step.policy.logprob_chunk_tokens, step.candidate_sizes()[0])
    ratio = step.policy.context_parallel * chunk / sum(map(len, scored))
    repeats = [(np.arange(int(len(own) * ratio)) / ratio).astype(np.int64) for own in scored]
    return [np.sort(np.concatenate([own, own[again]])) for own, again in zip(scored, repeats, strict=True)]


def usable_bytes(device: torch.device) -> float:
    """Return the bytes that training may use, after releasing torch's cache to the driver."""
    gc.collect()
    torch.cuda.empty_cache()
    return USABLE_FRACTION * torch.cuda.mem_get_info(device)[0]
