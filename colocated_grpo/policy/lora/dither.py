"""The rounding of merged weights to bfloat16.

Rounding to nearest would lose the adapter wherever it changes a weight by less than half a step of bfloat16, which
early in training is nearly everywhere. A fixed dither rounds away from zero with the probability that makes the
expected value exact. Values of bfloat16 stay as they are: the merged weight is the base while the adapter is zero.
Random numbers depend only on key and index, so weights do not jitter, and a resumed run has the same bytes.
"""

import torch
from torch import Tensor

MIX = 0x9E3779B9, 0x7FEB352D, 0x846CA68B
"""Multipliers of the hash; the last two are those of "lowbias32" (Ellis, prospecting for hash functions, 2018)."""
_MASK = 0xFFFFFFFF


def dithered(exact: Tensor, key: int, first: int = 0) -> Tensor:
    """Round float32 values to bfloat16: away from zero with the probability that makes the expected value exact."""
    # A bfloat16 is the upper half of a float32: a random lower half carries into it with the right probability.
    bits = exact.view(torch.int32) + random_16_bits(exact.numel(), key, first, exact.device).view(exact.shape)
    return (bits & -0x10000).view(torch.float32).to(torch.bfloat16)


def random_16_bits(count: int, key: int, first: int, device: torch.device) -> Tensor:
    """Return uniform numbers below 2**16 for the elements first, first + 1, ...; [count] int32."""
    x = torch.arange(first, first + count, dtype=torch.int64, device=device) * MIX[0] + key & _MASK
    x = (x ^ (x >> 16)) * MIX[1] & _MASK
    x = (x ^ (x >> 15)) * MIX[2] & _MASK
    return ((x ^ (x >> 16)) >> 16).to(torch.int32)
