"""How large a micro-batch is and how many blocks recompute their activations, from a rehearsed optimizer step.

Measured, because what fits depends on the kernels, the compiler and what else lives on the device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
import torch

from colocated_grpo.batching import MicroBatch, Minibatch, TrainSequence, build_micro_batch
from colocated_grpo.config.schema import Config
from colocated_grpo.errors import RunError
from colocated_grpo.losses import Counts
from colocated_grpo.metrics import Metrics
from colocated_grpo.policy.blocks import blocks_of, set_checkpointed
from colocated_grpo.policy.policy import Policy
from colocated_grpo.runtime.distributed import World

GIB = 1 << 30
AUTO_TOKENS = 24_576, 16_384, 8_192, 4_096, 2_048
"""Sizes to choose from where the settings leave it open. Every micro-batch costs the host the same, which larger ones
spread over more tokens, while memory grows in step."""
MOST_ON_CPU = 16_384
"""Host memory is not measured."""
LEAST_UNRECOMPUTED = 8_192
"""Before micro-batches get smaller than this, each with its fixed cost, blocks are recomputed."""
USABLE = 0.92
"""Share of the free memory that may be planned with: the caching allocator loses some of it between tensors."""
SAMPLE_TOKENS = 256, 2048
"""A rehearsal's smallest and largest size."""
LEAST_SHARED = 2
"""Tokens that the sequences of a rehearsal begin with in common: a size of one would be compiled for itself."""
SAMPLE_SHARE = 8
"""A rehearsal takes this part of a micro-batch. With nothing recomputed it then needs about what a whole micro-batch
needs with everything recomputed, so that it fits wherever training can be made to fit."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Device memory of a training step beside weights and optimizer state, in bytes, no block recomputed."""

    peak: int
    """Of a step with micro-batches of `tokens`."""
    tokens: int
    per_token: float
    """What the forward pass keeps for the backward pass of each token."""

    def needed(self, tokens: int, blocks: int) -> float:
        """Of micro-batches of `tokens`, in a model of so many blocks."""
        # A block's backward pass works on up to twice what the block keeps: gradients, and activations made again.
        # Small samples do not show it, for there the logits of one chunk are larger.
        return self.peak + (tokens - self.tokens) * self.per_token * (1 + 2 / blocks)


def fewest_blocks(footprint: Footprint, saved_per_token: float, *, tokens: int, free: float, blocks: int) -> int:
    """How many of `blocks` must recompute their activations so that `tokens` at a time fit into `free` bytes.

    saved_per_token: bytes that one recomputed block saves. Raises RunError where all of them are not enough.
    """
    needed = footprint.needed(tokens, blocks)
    if needed <= free:
        return 0
    least = needed - blocks * saved_per_token * tokens
    if least > free:
        raise RunError(
            f"batch.max_tokens_per_micro_batch={tokens}: a training step needs {least / GIB:.1f} GiB with every block "
            f"checkpointed and may use {free / GIB:.1f} GiB of what is free; lower it, or use more GPUs"
        )
    return min(blocks, ceil((needed - free) / (saved_per_token * tokens)))


def settle_micro_batches(policy: Policy, config: Config, world: World) -> Config:
    """The config with the size of micro-batches decided. On CUDA from measured memory, as is what must be recomputed.

    Call when all that stays on the device while the policy trains is there. Collective.
    """
    if world.device.type == "cpu":
        sizes = candidate_sizes(config)
        tokens = next((size for size in sizes if size <= MOST_ON_CPU), sizes[-1])
    else:
        tokens = fit_micro_batches(policy, config, world)
    batch = config.batch.model_copy(update={"max_tokens_per_micro_batch": tokens})
    return config.model_copy(update={"batch": batch})


def fit_micro_batches(policy: Policy, config: Config, world: World) -> int:
    """Tokens of a micro-batch that fits, after letting blocks recompute where the settings leave that open."""
    try:
        if config.policy.gradient_checkpointing == "auto":
            return fit_activations(policy, config, world)
        sizes = candidate_sizes(config)
        return sizes[0] if len(sizes) == 1 else fit_tokens(policy, config, world)
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"batch.max_tokens_per_micro_batch={config.batch.max_tokens_per_micro_batch}: not even "
            f"{sample_sizes(config)[1]} tokens at a time fit into this device beside weights, optimizer state and "
            "engine; use policy.cpu_offload or more GPUs"
        ) from error


def candidate_sizes(config: Config) -> list[int]:
    """Micro-batches to choose from, best first: the one that is set, or all that hold the longest sequence."""
    size, longest = config.batch.max_tokens_per_micro_batch, config.max_sequence_tokens
    if size != "auto":
        return [size]
    return [tokens for tokens in AUTO_TOKENS if tokens >= longest] or [longest]


def fit_tokens(policy: Policy, config: Config, world: World) -> int:
    """The best size that fits with the blocks as they are set; the smallest where none does. Collective."""
    sizes = candidate_sizes(config)
    return next(iter(_fitting(sizes, _everywhere(policy, config, world), policy)), sizes[-1])


def fit_activations(policy: Policy, config: Config, world: World) -> int:
    """The best size at which nothing is recomputed, or one with as few blocks recomputed as possible. Collective."""
    sizes, blocks = candidate_sizes(config), len(blocks_of(policy.model))
    set_checkpointed(policy.model, 0)
    kept = _everywhere(policy, config, world)
    # Asked of all together, for the rehearsal is collective. It compiles the other kind of block: only where needed.
    fitting = _fitting([s for s in sizes if s >= LEAST_UNRECOMPUTED] or sizes[:1], kept, policy)
    if fitting:
        return fitting[0]
    set_checkpointed(policy.model, blocks)
    recomputed = _everywhere(policy, config, world)
    saved = [(a.per_token - b.per_token) / blocks for (a, _), (b, _) in zip(kept, recomputed, strict=True)]
    rooms = [room for _, room in recomputed]

    def counts(size: int) -> list[int]:
        return [
            fewest_blocks(seen, saving, tokens=size, free=room, blocks=blocks)
            for (seen, _), saving, room in zip(kept, saved, rooms, strict=True)
        ]

    # Every rank looks at all measurements, so that an error is raised by all and not waited for by some.
    tokens, most = _first_that_fits([s for s in sizes if s <= LEAST_UNRECOMPUTED] or sizes, counts)
    set_checkpointed(policy.model, most)
    return tokens


def _first_that_fits(sizes: Sequence[int], counts: Callable[[int], list[int]]) -> tuple[int, int]:
    """(size, most blocks of any rank); raises the smallest size's complaint where none fits."""
    for size in sizes[:-1]:
        with suppress(RunError):
            return size, max(counts(size))
    return sizes[-1], max(counts(sizes[-1]))


def _everywhere(policy: Policy, config: Config, world: World) -> list[tuple[Footprint, float]]:
    """Footprint and usable bytes of every rank. Collective."""
    return world.gather_objects((measure(policy, config), usable_bytes(world.device)))


def _fitting(sizes: Sequence[int], measured: Sequence[tuple[Footprint, float]], policy: Policy) -> list[int]:
    """The sizes that fit on every rank with the blocks as they were measured."""
    blocks = len(blocks_of(policy.model))
    return [size for size in sizes if all(seen.needed(size, blocks) <= room for seen, room in measured)]


def measure(policy: Policy, config: Config) -> Footprint:
    """The footprint of the blocks as they are set now. Collective."""
    small, large = sample_sizes(config)
    # The first time compiles, tunes kernels and allocates workspaces, which stay and are not counted.
    rehearse(policy, config, small)
    _, kept_by_few = _memory_of(policy, config, small)
    peak, kept_by_many = _memory_of(policy, config, large)
    return Footprint(peak=peak, tokens=large, per_token=(kept_by_many - kept_by_few) / (large - small))


def sample_sizes(config: Config) -> tuple[int, int]:
    least, most = SAMPLE_TOKENS
    sizes = candidate_sizes(config)
    whole = sizes[len(sizes) // 2]
    large = min(whole, max(least, min(most, whole // SAMPLE_SHARE)))
    return large // 2, large


def _memory_of(policy: Policy, config: Config, tokens: int) -> tuple[int, int]:
    """Bytes beside those allocated before: at the peak, and as the last forward pass ends."""
    before, after_forward = torch.cuda.memory_allocated(policy.device), []
    torch.cuda.reset_peak_memory_stats(policy.device)
    hook = policy.model.register_forward_hook(
        lambda *_: after_forward.append(torch.cuda.memory_allocated(policy.device))
    )
    rehearse(policy, config, tokens)
    hook.remove()
    return torch.cuda.max_memory_allocated(policy.device) - before, after_forward[-1] - before


def rehearse(policy: Policy, config: Config, tokens: int) -> None:
    """Gradients of two micro-batches of `tokens`, as an optimizer step has them, thrown away. Collective.

    Two, because gradients that wait for the next micro-batch are whole and not sharded.
    """
    micro_batch = made_up_micro_batch(config, tokens)
    counts = Counts(tokens=2 * tokens, sequences=2, batch_tokens=2 * tokens, minibatches=1)
    with torch.random.fork_rng([policy.device] if policy.device.type == "cuda" else []):
        policy.forward_backward(Minibatch(micro_batches=[micro_batch] * 2, counts=counts), Metrics(policy.device))
    for parameter in policy.parameters().values():
        parameter.grad = None


def made_up_micro_batch(config: Config, tokens: int) -> MicroBatch:
    """`tokens` in two sequences or more, none longer than real ones may be, all scored."""
    # Siblings, as real ones are, share their beginning: sequences that share nothing run other kernels.
    longest = max(1, min(tokens // 2, config.max_sequence_tokens) - LEAST_SHARED)
    count, rest = divmod(tokens - LEAST_SHARED, longest)
    lengths = [LEAST_SHARED + own for own in [*[longest] * count, rest] if own]
    # Scored beside the sequences' own, so that samples of any size fill a chunk of logits as a real one does.
    extra = min(config.policy.logprob_chunk_tokens, candidate_sizes(config)[0])
    scored = [np.arange(LEAST_SHARED, length) for length in lengths]
    scored[0] = np.concatenate([np.full(extra, LEAST_SHARED), scored[0]])
    sequences = [
        TrainSequence(
            token_ids=np.zeros(length, np.int64),
            scored=positions,
            sampling_logprobs=np.full(len(positions), -1.0, np.float32),
            advantages=np.ones(len(positions), np.float32),
            temperature=1.0,
            trained=True,
            shared=LEAST_SHARED,
        )
        for length, positions in zip(lengths, scored, strict=True)
    ]
    micro_batch = build_micro_batch(sequences)
    logprobs_N = micro_batch.sampling_logprobs_N
    return replace(micro_batch, old_logprobs_N=logprobs_N, ref_logprobs_N=logprobs_N)


def usable_bytes(device: torch.device) -> float:
    """What the driver has left once torch has given back what it only caches."""
    gc.collect()
    torch.cuda.empty_cache()
    return USABLE * torch.cuda.mem_get_info(device)[0]
