"""How many blocks recompute their activations: as few as fit, from a rehearsed optimizer step and the memory it left.

Measured, because it depends on the kernels, the compiler and what else lives on the device.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from math import ceil

import torch

from colocated_grpo.batching import MicroBatch, Minibatch, TrainSequence, build_micro_batch
from colocated_grpo.config.schema import Config
from colocated_grpo.distributed import World
from colocated_grpo.errors import RunError
from colocated_grpo.losses import Counts
from colocated_grpo.metrics import Metrics
from colocated_grpo.policy.blocks import blocks_of, set_checkpointed
from colocated_grpo.policy.policy import Policy

GIB = 1 << 30
USABLE = 0.92
"""Share of the free memory that may be planned with: the caching allocator loses some of it between tensors."""
SAMPLE_TOKENS = 256, 2048
"""A rehearsal's smallest and largest size."""
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


def fit_activations(policy: Policy, config: Config, world: World) -> None:
    """Let as few blocks recompute as this device, and every other, has to. CUDA only; collective.

    Call when all that stays on the device while the policy trains is there.
    """
    model, tokens = policy.model, config.batch.max_tokens_per_micro_batch
    blocks, saved_per_token = len(blocks_of(model)), 0.0
    try:
        footprint, free = measure(policy, config), usable_bytes(world.device)
        # Asked together, for the rehearsal is collective. It compiles the other kind of block: only where needed.
        if any(world.gather_objects(footprint.needed(tokens, blocks) > free)):
            set_checkpointed(model, blocks)
            saved_per_token = (footprint.per_token - measure(policy, config).per_token) / blocks
            free = usable_bytes(world.device)
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"batch.max_tokens_per_micro_batch={tokens}: not even {sample_sizes(config)[1]} tokens at a time fit into "
            "this device beside weights, optimizer state and engine; use policy.cpu_offload or more GPUs"
        ) from error
    # Every rank looks at all measurements, so that an error is raised by all and not waited for by some.
    measured = world.gather_objects((footprint, saved_per_token, free))
    counts = [fewest_blocks(seen, saved, tokens=tokens, free=room, blocks=blocks) for seen, saved, room in measured]
    set_checkpointed(model, max(counts))


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
    whole = config.batch.max_tokens_per_micro_batch
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
    """`tokens` in sequences as long as real ones may be, all scored."""
    longest = min(tokens, config.max_sequence_tokens)
    lengths = [longest] * (tokens // longest) + [tokens % longest] * (tokens % longest > 1)
    # Scored beside the sequences' own, so that samples of any size fill a chunk of logits as a real one does.
    extra = min(config.policy.logprob_chunk_tokens, config.batch.max_tokens_per_micro_batch)
    scored = [[1] * extra + list(range(1, lengths[0])), *(list(range(1, length)) for length in lengths[1:])]
    sequences = [
        TrainSequence(
            group=0,
            sibling=index,
            token_ids=[0] * length,
            scored=positions,
            sampling_logprobs=[-1.0] * len(positions),
            advantages=[1.0] * len(positions),
            temperature=1.0,
            trained=True,
        )
        for index, (length, positions) in enumerate(zip(lengths, scored, strict=True))
    ]
    micro_batch = build_micro_batch(sequences)
    logprobs_N = micro_batch.sampling_logprobs_N
    return replace(micro_batch, old_logprobs_N=logprobs_N, ref_logprobs_N=logprobs_N)


def usable_bytes(device: torch.device) -> float:
    """What the driver has left once torch has given back what it only caches."""
    gc.collect()
    torch.cuda.empty_cache()
    return USABLE * torch.cuda.mem_get_info(device)[0]
