"""Weights that an engine stores in 8 bits: vLLM's fp8 numbers, and one float32 scale for each row.

Both are computed from this rank's rows, before they are gathered. They are named and passed on as integers, which are
never cast: numbers as int8 [R, C] under the weight's name, scales as int32 [R, 1] under that name and SCALE.
"""

from collections.abc import Collection, Mapping
from functools import partial

import torch
from torch import Tensor

from colocated_grpo.runtime.distributed import Computed, Rows, rows_in

SCALE = "_scale"
NUMBERS = torch.float8_e4m3fn
LARGEST = torch.finfo(NUMBERS).max
SMALLEST_SCALE = 1 / (LARGEST * 512)
"""Scale of a row of zeros, or of values that are nearly zero, in vLLM."""


def in_8_bits(
    parameters: Mapping[str, Tensor], names: Collection[str], dtype: torch.dtype, device: torch.device
) -> Computed:
    """Return the parameters as an engine stores them that has those of `names` in 8 bits.

    dtype: the engine's, to which weights are rounded first. Numbers are computed on `device` whenever they are read;
    scales are computed with them, so read a weight's numbers before its scales.
    """
    last: dict[str, Tensor] = {}

    def numbers(name: str, weight: Rows) -> Tensor:
        numbers_RC, last[name] = quantized(weight.compute().to(device, dtype))
        return numbers_RC

    others = {name: parameters[name] for name in parameters if name not in names}
    # In the same order on all ranks.
    weights = {name: rows_in(parameters, name) for name in parameters if name in names}
    rounded = {name: Rows(weight.sharded_as, partial(numbers, name, weight)) for name, weight in weights.items()}
    scales = {name + SCALE: Rows(weight.sharded_as, partial(last.pop, name)) for name, weight in weights.items()}
    return Computed(others, rounded | scales)


def quantized(weight_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers int8 [R, C] and scales int32 [R, 1] with the bits that vLLM's loader writes."""
    if weight_RC.is_cuda:
        from vllm._custom_ops import scaled_fp8_quant

        numbers_RC, scales_R1 = scaled_fp8_quant(weight_RC, use_per_token_if_dynamic=True)
    else:
        scales_R1 = (weight_RC.abs().amax(1, keepdim=True).float() / LARGEST).clamp_min(SMALLEST_SCALE)
        numbers_RC = (weight_RC / scales_R1).clamp(-LARGEST, LARGEST).to(NUMBERS)
    return numbers_RC.view(torch.int8), scales_R1.view(torch.int32)
