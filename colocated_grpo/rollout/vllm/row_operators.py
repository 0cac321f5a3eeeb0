"""The engine's operators with `numerics: exact`: the result of a token does not depend on the tokens computed with it.

vLLM's own batch-invariant mode is not used. It replaces operators of torch for the whole process, so the trainer's
backward pass would pay for it, and attention with heads of 64 still picks other tiles for decoding than for prompts.
What needs no replacement: embeddings, rotation and the sampler's log-probabilities compute each token separately.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from colocated_grpo.runtime.norm_kernels import normalize
from colocated_grpo.runtime.row_kernels import gated, logits, matmul
from colocated_grpo.runtime.rows import SEQUENCES, exceeds, fixed_tiles, single_queries

Count = Callable[[], None]


def _make_linear(product: Callable[..., Tensor], _original: object, count_use: Count) -> Callable[..., Tensor]:
    def apply(_method: object, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        count_use()
        return product(x, layer.weight, bias)

    return apply


make_linear, make_head = partial(_make_linear, matmul), partial(_make_linear, logits)
"""The output layer in float32: vLLM 0.26 would divide 16-bit logits by the temperature in place, later releases convert
them to float32 first."""


def _make_norm(offset: float, _original: object, count_use: Count) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    def forward(layer: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        count_use()
        out = normalize(x, layer.weight, layer.variance_epsilon, offset, residual=residual)
        return out if residual is None else (out, residual)

    return forward


make_norm, make_gemma_norm = partial(_make_norm, 0.0), partial(_make_norm, 1.0)


def _make_gated(gelu: bool, _original: object, count_use: Count) -> Callable[..., Tensor]:
    def forward(_layer: object, x: Tensor) -> Tensor:
        count_use()
        gate, up = x.chunk(2, dim=-1)
        return gated(gate, up, gelu=gelu)

    return forward


make_silu, make_gelu = partial(_make_gated, False), partial(_make_gated, True)


def make_attention(vllm_attention: Callable[..., object], count_use: Count) -> Callable[..., object]:
    """Return the backend's `flash_attn_varlen_func` with one order of summation for all batches."""

    def attend(**arguments: Any) -> object:
        count_use()
        left, _ = arguments.get("window_size") or (-1, -1)
        longest_q, longest_k = arguments["max_seqlen_q"], arguments["max_seqlen_k"]
        if longest_q > 1 and exceeds(longest_k, left):
            singles = single_queries(*(arguments[name] for name in SEQUENCES), queries=len(arguments["q"]))
            arguments |= dict(zip(SEQUENCES, singles, strict=True))
        # The schedule was made for other lengths. Scales are those of an fp8 cache, which exact numerics exclude.
        unused = dict.fromkeys(("scheduler_metadata", "q_descale", "k_descale", "v_descale"))
        tiles = fixed_tiles(longest_q, longest_k, left, arguments["q"].shape[-1])
        return vllm_attention(**{**arguments, **unused, **tiles})

    return attend
