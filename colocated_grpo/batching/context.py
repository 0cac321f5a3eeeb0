"""The slice of a micro-batch that one rank of a context-parallel group computes.

Shapes: T packed tokens, N scored tokens, P ranks of the group.
"""

from dataclasses import replace

import torch

from colocated_grpo.batching.micro_batch import MicroBatch, PackedRoutes
from colocated_grpo.types import ContextGroup


def local_rows(micro_batch: MicroBatch, context: ContextGroup | None) -> MicroBatch:
    """Return this rank's T / P consecutive rows, and the scored tokens that these rows predict.

    `cu_seqlens` and `prefix_keys` still index all rows. A rank whose rows predict no token gets one token without loss.
    Returns the whole micro-batch if `context` is None. T must be a multiple of P: `build_micro_batch` pads to one.
    """
    if context is None:
        return micro_batch
    tokens, inputs = micro_batch.tokens, micro_batch.loss_inputs
    count, remainder = divmod(len(tokens.input_ids_T), context.size)
    assert remainder == 0
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
