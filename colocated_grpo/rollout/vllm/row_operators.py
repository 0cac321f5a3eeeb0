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
from colocated_grpo.runtime.row_attention import attend_pages
from colocated_grpo.runtime.row_kernels import choose_experts, gated, logits, matmul
from colocated_grpo.runtime.rows import mix_experts

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


def make_mixture(_original: object, count_use: Count) -> Callable[..., Tensor]:
    """Return the forward of a block of experts. vLLM would choose experts, and sum them, by other kernels."""

    def forward(block: Any, x: Tensor) -> Tensor:
        count_use()
        router, experts = block.experts.router, block.experts.routed_experts
        chosen = choose_experts(matmul(x, block.gate.weight), router.top_k, normalised=router.renormalize)
        return mix_experts(x, *chosen, experts.w13_weight, experts.w2_weight)

    return forward


def make_attention(_original: object, count_use: Count) -> Callable[..., Tensor]:
    """Return the backend's `flash_attn_varlen_func` with one order of summation for all batches."""

    def attend(**arguments: Any) -> Tensor:
        count_use()
        assert arguments["causal"]
        left, _ = arguments.get("window_size") or (-1, -1)
        names = ("q", "k", "v", "out", "cu_seqlens_q", "seqused_k", "block_table", "max_seqlen_q", "softmax_scale")
        return attend_pages(*(arguments[name] for name in names), left=left)

    return attend
