"""Operators of `numerics: exact`: the policy's forward pass computes the bits that the engine computed while decoding.

Both call the kernels of `runtime/row_kernels.py`, `row_attention.py`, `norm_kernels.py` and `logit_kernels.py`.
transformers' modules keep their parameters and structure; `use_exact_operators` replaces the functions that compute.
Backward passes use the same matrix products and attention kernels as with `numerics: fast`, but attention adds in one
order.

On CPUs, in float32, matrix products and attention are in `runtime/rows.py`, because their results depend on the number
of rows there. Rotations use vLLM's operator. All others are plain torch, with the engine's results.

Shapes: T tokens, E keys, N runs, H query heads, K key-value heads, D head size, I input features, O output features,
C tokens of one chunk, V vocabulary.
"""

from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from colocated_grpo.policy.attention import packed_attention
from colocated_grpo.policy.attention_kernels import MIN_RUN_FOR_FA4, Runs, attend_padded, has_fa4
from colocated_grpo.policy.flash_attention import NEVER, deterministic_kernels, flash_backward
from colocated_grpo.policy.lora.linear import AdaptedLinear
from colocated_grpo.policy.model import PackedLM
from colocated_grpo.policy.routing import RouterOutput, softmax_weights
from colocated_grpo.runtime import rows

Rotary = tuple[Tensor, Tensor, Tensor]
"""Positions [T], the table of cosines and sines, and that of the inverse rotation, both [positions, D]."""


def use_exact_operators(model: PackedLM) -> None:
    """Replace the operators of a model of one of the `EXACT_TYPES`, in place."""
    config = model.lm.config
    gelu = getattr(config, "hidden_activation", None) == "gelu_pytorch_tanh"
    # Gemma stores the weights of its norms minus one.
    offset = 1.0 if config.model_type == "gemma3_text" else 0.0
    for name, module in model.lm.named_modules():
        kind = type(module).__name__
        if isinstance(module, AdaptedLinear):
            module.multiply = matmul
        elif isinstance(module, nn.Linear):
            module.forward = partial(_linear, module)
        elif kind.endswith("RMSNorm"):
            module.forward = partial(_norm, module, offset)
        elif kind.endswith("TopKRouter"):
            module.forward = partial(_route, module)
        elif kind.endswith("Experts"):
            module.forward = partial(_mix, module, module.forward)
        elif kind.endswith("MLP"):
            module.forward = partial(_mlp, module, gelu)
        elif kind.endswith("RotaryEmbedding"):
            module.forward = RotaryTables(config)
        elif name.endswith(".self_attn"):
            module.forward = partial(_attention, module)
    model.head_logits = _head_logits


def matmul(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return _kernels().matmul(x, weight_OI, bias_O) if x.is_cuda else rows.linear(x, weight_OI, bias_O)


@cache
def _kernels() -> ModuleType:
    from colocated_grpo.runtime import row_kernels  # CPU builds of torch may lack Triton

    return row_kernels


def _normalize(*arguments: Any) -> Tensor:
    from colocated_grpo.runtime.norm_kernels import Normalize

    return Normalize.apply(*arguments)


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    return _Linear.apply(x, module.weight, module.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        return matmul(x, weight_OI, bias_O)

    @staticmethod
    # pyrefly: ignore[bad-override]  (torch declares *grad_outputs, but passes one argument per output)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        grad_TO = grad.flatten(0, -2)
        return (
            grad @ weight_OI if of_x else None,
            grad_TO.t() @ x.flatten(0, -2) if of_weight else None,
            grad_TO.sum(0) if of_bias else None,
        )


class _ByKernel(torch.autograd.Function):
    """Computes with a kernel, and differentiates the same formula in plain torch."""

    @staticmethod
    def forward(ctx: Any, kernel: Callable[..., Tensor], plain: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.plain = plain
        return kernel(*tensors)

    @staticmethod
    # pyrefly: ignore[bad-override]  (torch declares *grad_outputs, but passes one argument per output)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            inputs = [
                saved.detach().requires_grad_(need) for saved, need in zip(ctx.saved_tensors, needed, strict=True)
            ]
            out = ctx.plain(*inputs)
        gradients = iter(torch.autograd.grad(out, [tensor for tensor in inputs if tensor.requires_grad], grad))
        return None, None, *(next(gradients) if need else None for need in needed)


@cache
def _compiled(function: Any) -> Any:
    """Return the function as few kernels: without a compiler, each operation would read and write all activations."""
    return torch.compile(function, dynamic=True)


def _norm(module: Any, offset: float, x: Tensor, rotation: Rotary | None = None) -> Tensor:
    """Normalise hidden states [1, T, I], or normalise and rotate heads [T, H, D]."""
    epsilon = module.eps if hasattr(module, "eps") else module.variance_epsilon
    if x.is_cuda:
        if rotation is None:
            return _normalize(x.squeeze(0), module.weight, epsilon, offset, None, None).view(x.shape)
        return _normalize(x, module.weight, epsilon, offset, *rotation[:2])
    normalised = plain_norm(x, module.weight, epsilon, offset)
    return normalised if rotation is None else _rotated(normalised, rotation)


def plain_norm(x: Tensor, weight: Tensor, epsilon: float, offset: float) -> Tensor:
    exact = torch.promote_types(x.dtype, torch.float32)
    return (F.rms_norm(x.to(exact), x.shape[-1:], eps=epsilon) * (weight.to(exact) + offset)).to(x.dtype)


def _mlp(module: Any, gelu: bool, x: Tensor) -> Tensor:
    gate, up = module.gate_proj(x), module.up_proj(x)
    if not x.is_cuda:
        return module.down_proj(plain_gated(gate, up, gelu=gelu))
    plain, kernel = (partial(each, gelu=gelu) for each in (_compiled(plain_gated), _kernels().gated))
    return module.down_proj(_ByKernel.apply(kernel, plain, gate, up))


def plain_gated(gate: Tensor, up: Tensor, *, gelu: bool) -> Tensor:
    exact = torch.promote_types(gate.dtype, torch.float32)
    activated = F.gelu(gate.to(exact), approximate="tanh") if gelu else F.silu(gate.to(exact))
    return (activated * up.to(exact)).to(gate.dtype)


def _route(router: Any, hidden_TH: Tensor) -> RouterOutput:
    logits_TE = _Linear.apply(hidden_TH, router.weight, None)
    weights_TK, experts_TK = _kernels().choose_experts(logits_TE, router.top_k, normalised=router.norm_topk_prob)
    experts_TK = experts_TK.long()
    plain = partial(softmax_weights, router, experts_TK=experts_TK)
    return logits_TE, _ByKernel.apply(lambda _: weights_TK, plain, logits_TE), experts_TK


def _mix(module: Any, plain: Callable[..., Tensor], x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    return _Mixture.apply(module, plain, experts_TK, x_TH, weights_TK, module.gate_up_proj, module.down_proj)


class _Mixture(torch.autograd.Function):
    """Computes with the engine's kernels. The backward pass computes the outputs again, as transformers does."""

    @staticmethod
    def forward(
        ctx: Any, module: Any, plain: Callable[..., Tensor], experts_TK: Tensor, x_TH: Tensor, weights_TK: Tensor,
        gate_up_EOH: Tensor, down_EHI: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(experts_TK, x_TH, weights_TK)
        ctx.module, ctx.plain = module, plain
        return rows.mix_experts(x_TH, weights_TK, experts_TK.int(), gate_up_EOH, down_EHI)

    @staticmethod
    # pyrefly: ignore[bad-override]  (torch declares *grad_outputs, but passes one argument per output)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        experts_TK, *saved = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        with torch.enable_grad():
            x_TH, weights_TK = (tensor.detach().requires_grad_() for tensor in saved)
            out = ctx.plain(x_TH, experts_TK, weights_TK.to(x_TH.dtype))
        inputs = x_TH, weights_TK, ctx.module.gate_up_proj, ctx.module.down_proj
        found = iter(torch.autograd.grad(out, [each for each, need in zip(inputs, needed, strict=True) if need], grad))
        return None, None, None, *(next(found) if need else None for need in needed)


class RotaryTables:
    """Replaces the rotary module's forward: returns positions, and the engine's table of cosines and sines.

    transformers computes the frequencies on the CPU, vLLM on the GPU, and the results differ in the last bit.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self._config = config
        self._tables: dict[str | None, tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Rotary:
        if layer_type not in self._tables:
            cos, sin = rotary_table(self._config, layer_type, x.device, x.dtype).chunk(2, dim=-1)
            self._tables[layer_type] = torch.cat([cos, sin], -1), torch.cat([cos, -sin], -1)
        return position_ids[0], *self._tables[layer_type]


@torch.inference_mode(False)
def rotary_table(config: PretrainedConfig, layer_type: str | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the table that vLLM builds for the layers of this type, [positions, D]."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    # vLLM returns one object for equal arguments, but the engine's table is unmapped while the engine sleeps.
    rope = {**rope, "owner": "policy"}
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # as in vLLM's worker; the table is an outer product
    try:
        with set_current_vllm_config(VllmConfig()), device:
            return get_rope(size, config.max_position_embeddings, rope_parameters=rope, dtype=dtype).cos_sin_cache
    finally:
        torch.set_float32_matmul_precision(precision)


def _rotated(heads_THD: Tensor, rotation: Rotary) -> Tensor:
    if heads_THD.is_cuda:
        return _normalize(heads_THD, None, 0.0, 0.0, *rotation[:2])
    return _Rotation.apply(heads_THD, *rotation)


class _Rotation(torch.autograd.Function):
    """vLLM's operator for CPUs."""

    @staticmethod
    def forward(ctx: Any, heads_THD: Tensor, positions_T: Tensor, table: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(positions_T, inverse)
        return _rotate(heads_THD, positions_T, table)

    @staticmethod
    # pyrefly: ignore[bad-override]  (torch declares *grad_outputs, but passes one argument per output)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _rotate(grad, *ctx.saved_tensors), None, None, None


def _rotate(heads_THD: Tensor, positions_T: Tensor, table: Tensor) -> Tensor:
    from vllm import _custom_ops as ops

    heads_THD = heads_THD.clone(memory_format=torch.contiguous_format)
    ops.rotary_embedding(positions_T, heads_THD.flatten(1), None, heads_THD.shape[-1], table, True)  # in place
    return heads_THD


def _attention(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: Rotary,
    attention_mask: None = None,
    past_key_values: None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Replaces the forward of transformers' attention modules; the arguments are theirs."""
    query, key, value = (project(hidden_states) for project in (module.q_proj, module.k_proj, module.v_proj))
    has_norms = hasattr(module, "q_norm")
    if is_wide := has_norms and module.q_norm.weight.shape[0] > module.head_dim:  # OLMoE: a norm over all heads
        query, key = module.q_norm(query), module.k_norm(key)
    query, key, value = (each.squeeze(0).unflatten(-1, (-1, module.head_dim)) for each in (query, key, value))
    if has_norms and not is_wide:
        query, key = module.q_norm(query, position_embeddings), module.k_norm(key, position_embeddings)
    else:
        query, key = (_rotated(heads, position_embeddings) for heads in (query, key))
    window = getattr(module, "sliding_window", getattr(module.config, "sliding_window", None))
    query, key, value = (heads.transpose(0, 1)[None] for heads in (query, key, value))
    settings = {"scaling": module.scaling, "sliding_window": window, "kernel": _attend}
    out, _ = packed_attention(module, query, key, value, None, **arguments, **settings)
    return module.o_proj(out.flatten(-2)), None


def _attend(query: Tensor, key: Tensor, value: Tensor, runs: Runs, scaling: float | None, window: int | None) -> Tensor:
    """Attend with the engine's kernel."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if not query.is_cuda:
        kernel = partial(rows.attend_packed, cu_q=runs.cu_q, cu_k=runs.cu_k, scale=scale, window=window)
        return _ByKernel.apply(
            kernel, partial(attend_padded, runs=runs, scaling=scale, window=window), query, key, value
        )
    return _Attention.apply(query, key, value, runs, scale, -1 if window is None else window - 1)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, runs: Runs, scale: float, left: int) -> Tensor:
        from colocated_grpo.runtime.row_attention import attend_packed  # CPU builds of torch may lack Triton

        out, logsumexp = attend_packed(query, key, value, runs.cu_q, runs.cu_k, runs.longest_q, scale, left)
        ctx.save_for_backward(query, key, value, out, logsumexp, runs.cu_q, runs.cu_k)
        heads = query.shape[1], key.shape[1], query.shape[2]
        fits_fa4 = left < 0 and runs.longest_q >= MIN_RUN_FOR_FA4 and has_fa4(*heads, query.dtype, query.device)
        ctx.settings = runs.longest_q, runs.longest_k, scale, left, MIN_RUN_FOR_FA4 if fits_fa4 else NEVER
        return out

    @staticmethod
    # pyrefly: ignore[bad-override]  (torch declares *grad_outputs, but passes one argument per output)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with deterministic_kernels(True):
            gradients = flash_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.settings)
        return *gradients, None, None, None


def _head_logits(hidden_CH: Tensor, weight_VH: Tensor, softcap: float | None) -> Tensor:
    assert softcap is None  # no model of EXACT_TYPES caps its logits
    return _kernels().logits(hidden_CH, weight_VH) if hidden_CH.is_cuda else rows.linear(hidden_CH, weight_VH)
