"""FlashAttention 2 or 4 over packed sequences, as an operator that is opaque to torch.compile.

FlashAttention 2 is torch's. `varlen_attn` is not used: its backward pass adds in one order only if deterministic
algorithms raise errors, and runs let them warn.

A sink is one more score per head, in addition to the scores of the keys. The sink enters the softmax but has no value,
so the sink only shrinks the output: with logsumexp L of the keys' scores and sink s, L' = log(exp L + exp s), out' =
out * exp(L - L'). FlashAttention's backward kernels compute weights as exp(score - L), and the gradients of scores from
sum(grad * out). If these kernels get L' and out' in place of L and out, they compute the exact gradients with a sink.
The sink's own gradient is -sum(exp(s - L') * sum(grad * out')).

On Hopper GPUs, FlashAttention 4 takes 0.7 x the time of torch's FlashAttention 2 for sequences of 512 tokens, and 0.5 x
for long sequences: docs/results/attention_1xh200.json. The kernels are bundled with vLLM. The first call compiles them,
which takes seconds, or reads them from vLLM's cache folder. For short runs, the operator itself calls FlashAttention 2:
a choice outside of the operator would compile each block twice.

Shapes: T queries, E keys, N runs of queries, H query heads, K key-value heads, D head size. query: [T, H, D], key and
value: [E, K, D], 16-bit. cu_q, cu_k: [N + 1] int32. left: number of earlier keys that a query sees, -1 for all. The
last query of a run is at the position of the run's last key.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Runs(NamedTuple):
    """Boundaries of the runs of consecutive queries, [N + 1] int32, and of the keys that each run sees."""

    cu_q: Tensor
    cu_k: Tensor
    longest_q: int
    longest_k: int


def fa2_forward(
    query: Tensor, key: Tensor, value: Tensor, runs: Runs, scale: float | None, left: int
) -> tuple[Tensor, Tensor]:
    """Compute causal attention of each run. Returns [T, H, D] and the logsumexps [H, T] in float32."""
    # As in torch.nn.attention.varlen: no dropout, no debug mask.
    out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, *runs, 0.0, left == -1, False, **_fa2_settings(scale, left)
    )
    return out, logsumexp


def fa2_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    runs: Runs,
    scale: float | None,
    left: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value, laid out like them; grad and out: [T, H, D]."""
    # Required arguments of dropout, which is off.
    random_state, unused = query.new_zeros(2, dtype=torch.uint64), query.new_empty(0)
    settings = _fa2_settings(scale, left)
    with deterministic_kernels(torch.are_deterministic_algorithms_enabled()):
        return torch.ops.aten._flash_attention_backward(
            grad, query, key, value, out, logsumexp, *runs, 0.0, left == -1, random_state, unused, **settings
        )


@contextmanager
def deterministic_kernels(enabled: bool) -> Iterator[None]:
    """Enable or disable deterministic algorithms, without warn_only, which FlashAttention 2 ignores."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if before == (enabled, False):
        yield
        return
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    # torch.use_deterministic_algorithms would change a setting of the compiler, too.
    torch._C._set_deterministic_algorithms(enabled, warn_only=False)
    memory.fill_uninitialized_memory = False  # kernels write all of their outputs
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled


def _fa2_settings(scale: float | None, left: int) -> dict[str, object]:
    return {"scale": scale, "window_size_left": left, "window_size_right": 0}


def add_sinks(out_THD: Tensor, logsumexp_HT: Tensor, sinks_H: Tensor) -> Tensor:
    """Shrink `out_THD` in place by the sinks' weight. Returns the logsumexps with sinks."""
    with_sinks_HT = torch.logaddexp(logsumexp_HT, sinks_H[:, None].to(logsumexp_HT.dtype))
    out_THD.mul_((logsumexp_HT - with_sinks_HT).exp().T[:, :, None])
    return with_sinks_HT


def sinks_gradient(grad_THD: Tensor, out_THD: Tensor, logsumexp_HT: Tensor, sinks_H: Tensor) -> Tensor:
    """Return the gradient of the sinks. out_THD, logsumexp_HT: results with sinks."""
    weights_HT = (sinks_H[:, None].to(logsumexp_HT.dtype) - logsumexp_HT).exp()
    products_TH = (grad_THD.to(logsumexp_HT.dtype) * out_THD).sum(-1)
    return -(weights_HT * products_TH.T).sum(1).to(sinks_H.dtype)


HOPPER = (9, 0)
FA4_HEAD_SIZES = (64, 128)
NEVER = 2**31 - 1
"""As `min_run`: FlashAttention 2 for runs of any length."""


@cache
def fa4() -> Any:
    """Import vLLM's module of FlashAttention 4. Raises ImportError if it, or its compiler, is not installed."""
    # nvidia-cutlass-dsl 4.6 warns once for each kernel about an argument that is not used here.
    warnings.filterwarnings("ignore", "Argument .* cannot be converted to a JitArgument", UserWarning)
    from vllm import envs

    # Read when the module is imported. The default folder is below /tmp, where another user could place code.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(Path(envs.VLLM_CACHE_ROOT) / "flash_attention_4"))
    with suppress(ImportError, AttributeError):  # a vLLM that writes its cache in another way
        from vllm.vllm_flash_attn.cute.cache_utils import JITPersistentCache

        JITPersistentCache._try_export_to_storage = _export_whole
    from vllm.vllm_flash_attn.cute import interface

    return interface


def _export_whole(cache: Any, key: Any, kernel: Any) -> None:
    """Write a compiled kernel to the cache folder in one step. vLLM's own method could leave a part of one."""
    path = cache.cache_path / f"{cache._key_to_hash(key)}.o"
    written = path.with_suffix(f".{os.getpid()}")
    # The compiler may raise any error, as on a full disk. This process has the kernel; the next compiles it again.
    with suppress(Exception):
        kernel.export_to_c(object_file_path=str(written), function_name=cache.EXPORT_FUNCTION_PREFIX)
        written.replace(path)
    written.unlink(missing_ok=True)


@torch.library.custom_op("colocated_grpo::packed_flash", mutates_args=())
def packed_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks_H: Tensor | None,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    left: int,
    min_run: int,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention of each run. Returns [T, H, D] and the logsumexps [H, T], which have no gradient.

    min_run: smallest mean number of queries per run for FlashAttention 4, which has no windows and sinks; or `NEVER`.
    """
    if _uses_fa2(query, cu_q, min_run):
        out, logsumexp = fa2_forward(query, key, value, Runs(cu_q, cu_k, longest_q, longest_k), scale, left)
        out = out.contiguous()
        return out, logsumexp if sinks_H is None else add_sinks(out, logsumexp, sinks_H)
    out, logsumexp, *_ = fa4()._flash_attn_fwd(
        query, key, value, **_fa4_settings(cu_q, cu_k, longest_q, longest_k, scale), return_lse=True
    )
    return out, logsumexp


@packed_flash.register_fake
def _(query, key, value, sinks_H, cu_q, cu_k, longest_q, longest_k, scale, left, min_run):
    tokens, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty((heads, tokens), dtype=torch.float32)


@torch.library.custom_op("colocated_grpo::packed_flash_backward", mutates_args=())
def flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    left: int,
    min_run: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value; grad and out: [T, H, D]. min_run: as in `packed_flash`."""
    if _uses_fa2(query, cu_q, min_run):
        runs = Runs(cu_q, cu_k, longest_q, longest_k)
        dq, dk, dv = fa2_backward(grad, query, key, value, out, logsumexp, runs, scale, left)
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    return fa4()._flash_attn_bwd(
        *(query, key, value, out, grad, logsumexp),
        **_fa4_settings(cu_q, cu_k, longest_q, longest_k, scale),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        # By default, FlashAttention 2 and 4 lay out gradients like the inputs. The fake declares contiguous ones.
        dq=query.new_empty(query.shape),
        dk=key.new_empty(key.shape),
        dv=value.new_empty(value.shape),
    )


@flash_backward.register_fake
def _(grad, query, key, value, out, logsumexp, cu_q, cu_k, longest_q, longest_k, scale, left, min_run):
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _uses_fa2(query: Tensor, cu_q: Tensor, min_run: int) -> bool:
    return len(query) < min_run * (len(cu_q) - 1)


def _fa4_settings(cu_q: Tensor, cu_k: Tensor, longest_q: int, longest_k: int, scale: float) -> dict[str, object]:
    return {
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
        "max_seqlen_q": longest_q,
        "max_seqlen_k": longest_k,
        "softmax_scale": scale,
        "causal": True,
    }


def _save_for_flash(ctx: Any, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sinks_H, cu_q, cu_k, *ctx.sizes = inputs
    ctx.save_for_backward(query, key, value, *output, cu_q, cu_k, sinks_H)


def _backward_of_flash(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, sinks_H = ctx.saved_tensors
    _, _, _, out, logsumexp, _, _ = tensors
    of_sinks = None if sinks_H is None else sinks_gradient(grad, out, logsumexp, sinks_H)
    return *flash_backward(grad, *tensors, *ctx.sizes), of_sinks, *[None] * 7


packed_flash.register_autograd(_backward_of_flash, setup_context=_save_for_flash)
