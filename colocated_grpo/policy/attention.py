"""Attention over packed sequences: token t sees only the tokens before it in its own sequence.

Registered with transformers as attention implementations, one for each set of kernels; models built with them need no
mask. Shapes: T packed tokens, E keys that they see (T where no beginning is shared), U tokens of shared beginnings, R
readers of the most read one, N runs of consecutive queries, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from colocated_grpo.batching import SharedKeys
from colocated_grpo.config.errors import ConfigError
from colocated_grpo.policy.attention_kernels import (
    FEWEST_FOR_FA4,
    Attend,
    Runs,
    attend_fa4,
    attend_padded,
    attend_varlen,
    has_fa4,
)

PACKED = "packed"
PACKED_FA4 = "packed_fa4"


def implementation_for(config: PretrainedConfig, dtype: torch.dtype, device: torch.device, *, longest: int) -> str:
    """The name under which transformers knows the fastest one that this device has for such a model.

    longest: tokens of a sequence; FlashAttention 4 is not compiled where all are too short for it.
    """
    if longest < FEWEST_FOR_FA4:
        return PACKED
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or (heads and text.hidden_size // heads)
    known = isinstance(heads, int) and isinstance(kv_heads, int) and isinstance(size, int)
    return PACKED_FA4 if known and has_fa4(heads, kv_heads, size, dtype, device) else PACKED


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    shared_keys: SharedKeys | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    on_cuda: Attend = attend_varlen,
    **_: object,
) -> tuple[Tensor, None]:
    """query: [1, H, T, D], key and value: [1, K, T, D], cu_seq_lens_q: [N + 1] int32. Returns [1, T, H, D].

    shared_keys: of a micro-batch; None: the keys of a run are its own tokens'. Its last query sees all of them.
    """
    if softcap is not None:
        raise ConfigError("attention logit soft-capping (gemma2) is not supported by packed attention")
    if s_aux is not None:
        raise ConfigError("attention sinks (gpt_oss) are not supported by packed attention")
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if shared_keys is None:
        runs = Runs(cu_seq_lens_q, max_length_q, cu_seq_lens_q, max_length_q)
    else:
        key, value = (copied(tensor, shared_keys) for tensor in (key, value))
        runs = Runs(cu_seq_lens_q, max_length_q, shared_keys.cu_seqlens, shared_keys.max_seqlen)
    attend = on_cuda if query.is_cuda else attend_padded
    return attend(query, key, value, runs, scaling, sliding_window)[None], None


def copied(keys_TKD: Tensor, shared: SharedKeys) -> Tensor:
    """[E, K, D]: keys, or values, of the rows in `shared.rows_E`."""
    return CopiedKeys.apply(keys_TKD, shared.rows_E, shared.keys_of_T, shared.copies_UR)


class CopiedKeys(torch.autograd.Function):
    """Backwards, each copy's gradient goes to its row: summed in float32, and not by atomic additions in whatever order
    they come, so that gradients repeat bit for bit."""

    @staticmethod
    def forward(ctx, keys_TKD: Tensor, rows_E: Tensor, keys_of_T: Tensor, copies_UR: Tensor) -> Tensor:
        ctx.save_for_backward(keys_of_T, copies_UR)
        return keys_TKD[rows_E]

    @staticmethod
    def backward(ctx, grad_EKD: Tensor) -> tuple[Tensor | None, ...]:
        keys_of_T, copies_UR = ctx.saved_tensors
        own_TKD, shared = grad_EKD[keys_of_T], len(copies_UR)
        exact = torch.promote_types(grad_EKD.dtype, torch.float32)
        copies_URKD = torch.where((copies_UR >= 0)[:, :, None, None], grad_EKD[copies_UR.clamp(min=0)], 0)
        shared_UKD = own_TKD[:shared].to(exact) + copies_URKD.sum(1, dtype=exact)
        return torch.cat([shared_UKD.to(own_TKD.dtype), own_TKD[shared:]]), None, None, None


AttentionInterface.register(PACKED, packed_attention)
AttentionInterface.register(PACKED_FA4, partial(packed_attention, on_cuda=attend_fa4))
