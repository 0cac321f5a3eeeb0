"""torch's FlashAttention 2 kernels over packed sequences, without autograd, for operators that build on them.

Shapes: T queries, E keys, N runs of queries, H query heads, K key-value heads, D head size. query: [T, H, D], key and
value: [E, K, D], 16-bit. left: number of earlier keys that a query sees, -1 for all. The last query of a run is at the
position of the run's last key.
"""

import torch
from torch import Tensor

Boundaries = tuple[Tensor, Tensor, int, int]
"""Boundaries of the runs of queries and of keys, both [N + 1] int32, and the length of the longest run of each."""


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: Boundaries,
    scale: float | None,
    left: int,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention of each run. Returns [T, H, D] and the logsumexps [H, T] in float32."""
    # As in torch.nn.attention.varlen: no dropout, no debug mask.
    out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, *runs, 0.0, left == -1, False, **_settings(scale, left)
    )
    return out, logsumexp


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    runs: Boundaries,
    scale: float | None,
    left: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value, laid out like them; grad and out: [T, H, D]."""
    # Required arguments of dropout, which is off.
    random_state, unused = query.new_zeros(2, dtype=torch.uint64), query.new_empty(0)
    return torch.ops.aten._flash_attention_backward(
        grad,
        query,
        key,
        value,
        out,
        logsumexp,
        *runs,
        0.0,
        left == -1,
        random_state,
        unused,
        **_settings(scale, left),
    )


def _settings(scale: float | None, left: int) -> dict[str, object]:
    """Return the arguments common to both kernels."""
    return {"scale": scale, "window_size_left": left, "window_size_right": 0}
