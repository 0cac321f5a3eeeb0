"""Ulysses context parallelism: a micro-batch is split over ranks, by rows outside attention and by heads inside it.

Only attention mixes tokens. An all-to-all before attention gives each rank all rows of its heads. The usual kernels run
on these rows. A second all-to-all after attention gives each rank all heads of its rows again (DeepSpeed Ulysses,
Jacobs et al. 2023, arXiv 2309.14509).

Shapes: P ranks of the group, R rows of one rank, T = P * R rows of all ranks, H query heads, K key-value heads, D head
size, V head size of values, S completions.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from colocated_grpo.batching.micro_batch import MicroBatch


def rows_to_heads(query: Tensor, key: Tensor, value: Tensor, group: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return all rows of this rank's heads: [T, H / P, D], [T, max(1, K / P), D] and [T, max(1, K / P), V]. Collective.

    query: [R, H, D], key: [R, K, D], value: [R, K, V]. P must divide H, and must divide K or be a multiple of K. If P
    is a multiple of K, several ranks get the same key-value head. One all-to-all moves all three tensors: in a compiled
    block, three all-to-alls could run in a different order on each rank.
    """
    _, ranks = _place_in(group)
    tensors = [query, *(_with_head_for_each(tensor, ranks) for tensor in (key, value))]
    by_rank = [tensor.unflatten(1, (ranks, -1)) for tensor in tensors]  # [R, P, own heads, D]
    columns = torch.cat([tensor.flatten(2) for tensor in by_rank], dim=2)
    received = all_to_all(columns.transpose(0, 1), group).flatten(0, 1)
    parts = received.split([tensor[0, 0].numel() for tensor in by_rank], dim=1)
    return cast(
        "tuple[Tensor, Tensor, Tensor]",
        tuple(part.unflatten(1, tensor.shape[2:]).contiguous() for part, tensor in zip(parts, by_rank, strict=True)),
    )


def heads_to_rows(heads: Tensor, group: str) -> Tensor:
    """Return all heads of this rank's rows, [R, H, V]. Collective.

    heads: all rows of this rank's heads, [T, H / P, V].
    """
    _, ranks = _place_in(group)
    received = all_to_all(heads.unflatten(0, (ranks, -1)), group)
    return received.transpose(0, 1).flatten(1, 2)


def own_heads(values_H: Tensor, group: str) -> Tensor:
    """Return the elements of this rank's heads, [H / P]."""
    rank, ranks = _place_in(group)
    return values_H.unflatten(0, (ranks, -1))[rank]


def _with_head_for_each(tensor: Tensor, ranks: int) -> Tensor:
    heads = tensor.shape[1]
    return tensor if heads >= ranks else tensor.repeat_interleave(ranks // heads, dim=1)


@torch.compiler.assume_constant_result
def _place_in(group: str) -> tuple[int, int]:
    """Return this rank's number in the group, and the size of the group."""
    ranks = _ranks_of(group)
    return ranks.rank(), ranks.size()


def _ranks_of(group: str) -> dist.ProcessGroup:
    return _resolve_process_group(cast(Any, group))  # newer torch has a separate type for group names


@torch.library.custom_op("colocated_grpo::all_to_all", mutates_args=())
def all_to_all(parts: Tensor, group: str) -> Tensor:
    """Send parts[p] to rank p of the group. Returns the parts received from each rank, [P, ...]. Collective.

    A custom operator, opaque to torch.compile.
    """
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=_ranks_of(group))
    return received


@all_to_all.register_fake
def _(parts: Tensor, group: str) -> Tensor:
    return torch.empty_like(parts, memory_format=torch.contiguous_format)


def _keep_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group = inputs[1]


all_to_all.register_autograd(lambda ctx, grad: (all_to_all(grad, ctx.group), None), setup_context=_keep_group)


def with_group_sums(micro_batch: MicroBatch) -> MicroBatch:
    """Return the micro-batch with per-completion sums taken over its context-parallel group."""
    if (context := micro_batch.tokens.context) is None:
        return micro_batch
    ranks = _ranks_of(context.name)
    return micro_batch.with_inputs(sum_over_group=lambda sums_S: _AllReduceSum.apply(sums_S, ranks))


class _AllReduceSum(torch.autograd.Function):
    """Sums over the ranks; the backward pass sums their gradients. Both passes are collective."""

    @staticmethod
    def forward(ctx: Any, sums_S: Tensor, ranks: dist.ProcessGroup) -> Tensor:
        ctx.ranks = ranks
        total_S = sums_S.clone()
        dist.all_reduce(total_S, group=ranks)
        return total_S

    @staticmethod
    # pyrefly: ignore[bad-override]  (torch declares *grad_outputs, but passes one argument per output)
    def backward(ctx: Any, grad_S: Tensor) -> tuple[Tensor, None]:
        return _AllReduceSum.apply(grad_S, ctx.ranks), None
