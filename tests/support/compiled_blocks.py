"""Compiled blocks on CPUs, where AOTAutograd compiles them without Inductor, and the number of their graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from colocated_grpo.policy import attention_kernels
from colocated_grpo.policy.attention_kernels import Runs
from colocated_grpo.policy.blocks import Block


def graph_counter(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that returns the number of graphs compiled from now on. A block that is not one graph fails."""
    monkeypatch.setattr(
        Block, "compile", lambda block, **_: nn.Module.compile(block, backend="aot_eager", dynamic=True, fullgraph=True)
    )
    # Padded attention reads the boundaries of runs from a tensor, which is no part of a graph. Kernels of GPUs do not.
    monkeypatch.setattr(attention_kernels, "attend_padded", attend_masked)
    torch._dynamo.reset()  # graphs of other tests could serve these blocks as well
    counters.clear()
    return lambda: counters["stats"]["unique_graphs"]


def attend_masked(
    query: Tensor, key: Tensor, value: Tensor, runs: Runs, scaling: float | None, window: int | None, **_: object
) -> Tensor:
    """Attend as `attend_padded` does, by a mask over all queries and keys."""
    assert window is None
    row_T, column_E = torch.arange(len(query)), torch.arange(len(key))
    run_T = torch.searchsorted(runs.cu_q, row_T.int(), right=True) - 1
    last_T = row_T + runs.cu_k[run_T + 1] - runs.cu_q[run_T + 1]
    mask_TE = (runs.cu_k[run_T][:, None] <= column_E) & (column_E <= last_T[:, None])
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_TE, scale=scaling, enable_gqa=True)
    return out[0].transpose(0, 1)
