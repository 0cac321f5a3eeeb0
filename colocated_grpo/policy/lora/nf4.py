"""Weights in 4 bits: NF4 (QLoRA, Dettmers et al. 2023), whose levels are quantiles of a normal distribution.

Each block of 64 elements of a row is stored as 64 codes (indices of levels), two per byte, and one float32 scale. The
values are those of bitsandbytes without nested quantization. Shards by rows are whole blocks.

A row is stored as float32, first the codes, eight per number, and then the scales. No other type can be stored: FSDP2
of torch 2.11 rejects integers, and copies 16-bit types through float32 on GPUs, which changes the bits of NaNs.
"""

from functools import cache

import torch
from torch import Tensor

BLOCK = 64
STORED = 9
"""float32 numbers that hold one block."""
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def weight_columns(packed: Tensor) -> int:
    """Return the columns of the weight that `packed` holds."""
    return packed.shape[1] // STORED * BLOCK


def pack(weight_RC: Tensor) -> Tensor:
    """Quantize a float32 weight to the nearest levels. Returns float32 [R, STORED * C / BLOCK]."""
    blocks = weight_RC.view(len(weight_RC), weight_RC.shape[1] // BLOCK, BLOCK)
    scales = blocks.abs().amax(-1)
    middles = levels(weight_RC.device).unfold(0, 2, 1).mean(-1)
    relative = blocks / scales[..., None].clamp(min=torch.finfo(scales.dtype).tiny)
    codes = torch.bucketize(relative.flatten(1), middles, out_int32=True).to(torch.uint8)
    pairs = codes[:, 0::2] << 4 | codes[:, 1::2]
    return torch.cat([pairs.view(torch.float32), scales], dim=1)


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [R, C] in `dtype`."""
    rows, columns = len(packed), weight_columns(packed)
    if packed.is_cuda:
        from colocated_grpo.policy.lora.merge_kernel import unpack as unpack_on_gpu  # needs Triton

        out = packed.new_empty(rows, columns, dtype=dtype)
        unpack_on_gpu(out, packed, levels(packed.device), BLOCK)
        return out
    pairs, scales = packed[:, : columns // 8].view(torch.uint8).int(), packed[:, columns // 8 :]
    codes = torch.stack([pairs >> 4, pairs & 15], dim=-1).view(rows, columns // BLOCK, BLOCK)
    return levels(packed.device)[codes].mul_(scales[..., None]).view(rows, columns).to(dtype)


@cache
def levels(device: torch.device) -> Tensor:
    return torch.tensor(LEVELS, device=device)
