"""The slice of a micro-batch that one rank of a context-parallel group computes.

Shapes: T packed tokens, N scored tokens, P ranks of the group.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from colocated_grpo.batching.micro_batch import MicroBatch, PackedRoutes, PackedTokens, PrefixKeys
from colocated_grpo.types import ContextGroup

MIN_ROWS = 2
"""Minimum rows per rank: torch.compile specializes on sizes of 1."""


def local_rows(micro_batch: MicroBatch, context: ContextGroup | None) -> MicroBatch:
    """Return this rank's ceil(T / P) consecutive rows, and the scored tokens that these rows predict.

    The last ranks are padded. `cu_seqlens` and `prefix_keys` still index all rows. A rank whose rows predict no token
    gets one token without loss. Returns the whole micro-batch if `context` is None.
    """
    if context is None:
        return micro_batch
    tokens, inputs = micro_batch.tokens, micro_batch.loss_inputs
    count = max(MIN_ROWS, -(-len(tokens.input_ids_T) // context.size))
    tokens = _padded(tokens, count * context.size - len(tokens.input_ids_T))
    rows = slice(context.rank * count, (context.rank + 1) * count)
    own = torch.nonzero(tokens.source_N // count == context.rank).flatten()
    if len(own) == 0:
        own = torch.zeros(1, dtype=torch.int64)
        inputs = replace(inputs, loss_mask_N=torch.zeros_like(inputs.loss_mask_N))
    routes = tokens.routes
    return MicroBatch(
        tokens=replace(
            tokens,
            input_ids_T=tokens.input_ids_T[rows],
            position_ids_T=tokens.position_ids_T[rows],
            source_N=tokens.source_N[own] % count,
            targets_N=tokens.targets_N[own],
            temperature_N=tokens.temperature_N[own],
            # A copy: a view would keep the routes of all rows.
            routes=routes and PackedRoutes(routes.experts_LTK[:, rows].clone(), routes.recorded_T[rows]),
            context=context,
        ),
        loss_inputs=inputs.at(own),
    )


def _padded(tokens: PackedTokens, count: int) -> PackedTokens:
    """Append a run of `count` tokens that no other run sees."""
    if count == 0:
        return tokens
    rows, routes = len(tokens.input_ids_T), tokens.routes
    return replace(
        tokens,
        input_ids_T=F.pad(tokens.input_ids_T, (0, count)),
        position_ids_T=torch.cat([tokens.position_ids_T, torch.arange(count)]),
        cu_seqlens=_with_run(tokens.cu_seqlens, count),
        max_seqlen=max(tokens.max_seqlen, count),
        prefix_keys=_with_keys(tokens.prefix_keys, rows, count),
        routes=routes
        and PackedRoutes(F.pad(routes.experts_LTK, (0, 0, 0, count)), F.pad(routes.recorded_T, (0, count))),
    )


def _with_run(boundaries: Tensor, count: int) -> Tensor:
    return torch.cat([boundaries, boundaries[-1:] + count])


def _with_keys(keys: PrefixKeys | None, first: int, count: int) -> PrefixKeys | None:
    """Append the keys of `count` rows from row `first` on."""
    if keys is None:
        return None
    added, total = torch.arange(count), len(keys.rows_E)
    starts = torch.cat([keys.starts_E[:first], total + added])
    return keys._replace(
        rows_E=torch.cat([keys.rows_E, first + added]),
        keys_E=torch.cat([keys.keys_E, total + added]),
        starts_E=F.pad(starts, (0, total - first + 1), value=total + count),
        cu_seqlens=_with_run(keys.cu_seqlens, count),
        max_seqlen=max(keys.max_seqlen, count),
    )
