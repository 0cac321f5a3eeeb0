"""Gated delta rule and its causal convolution over packed sequences, for transformers' hybrid models.

Layers of linear attention (Qwen3-Next, Qwen 3.5) carry a convolution window and a recurrent state from token to token.
transformers' implementations in torch run both through all packed tokens, so that a sequence would see the sequence
before it. `pack_linear_attention` replaces the two functions that these layers call.

Shapes: T packed tokens, N sequences, L tokens of the longest sequence, C channels, W width of the convolution, H heads,
D size of a head.
"""

import inspect
import os
import sys
from collections.abc import Callable
from functools import cache, lru_cache, partial, wraps
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch
from packaging.version import Version
from torch import Tensor
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from colocated_grpo.batching.micro_batch import PrefixKeys
from colocated_grpo.errors import ConfigError, in_one_line
from colocated_grpo.policy.attention_kernels import padded_runs
from colocated_grpo.policy.flash_attention import HOPPER

CONVOLUTION, DELTA_RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
"""Functions of transformers' modules (since 5.16) that layers of linear attention call by these names."""

LAYER_TYPES = {"linear_attention", "full_attention"}
DeltaRule = Callable[..., tuple[Tensor, Tensor | None]]
WRONG_TRITON = Version("3.4"), Version("3.7.1")
"""Triton releases with wrong gradients on Hopper GPUs: from the first release up to, but not including, the second."""


def pack_linear_attention(model: PreTrainedModel) -> bool:
    """Make the model's layers of linear attention respect the boundaries of packed sequences.

    Returns False if the model has no such layers, or also has layers with other states. The functions are replaced in
    the modules of transformers that define the layers. Calls without boundaries, from models that are not packed, still
    reach the original functions. Raises ConfigError if this version of transformers lacks the two functions.
    """
    if not LAYER_TYPES.issuperset(getattr(model.config, "layer_types", None) or [None]):
        return False
    layers = [module for module in model.modules() if type(module).__name__.endswith("GatedDeltaNet")]
    for layer in layers:
        _replace(sys.modules[type(layer).__module__])
    return bool(layers)


@cache  # once for each module
def _replace(source: ModuleType) -> None:
    try:
        convolution, delta_rule = getattr(source, CONVOLUTION), getattr(source, DELTA_RULE)
    except AttributeError as error:
        raise ConfigError(f"transformers: {error}; training linear attention needs release 5.16 or later") from error
    packed_rule = partial(packed_delta_rule, original=delta_rule)
    setattr(source, CONVOLUTION, _choose("cu_seq_lens_q", packed_convolution, convolution))
    setattr(source, DELTA_RULE, _choose("cu_seqlens", packed_rule, delta_rule))


def _choose(boundaries: str, packed: Callable[..., object], original: Callable[..., object]) -> Callable[..., object]:
    """Return a function that calls `packed` if it gets the argument that `boundaries` names, else `original`."""

    @wraps(original)
    def call(*arguments: object, **options: object) -> object:
        return (original if options.get(boundaries) is None else packed)(*arguments, **options)

    return call


def packed_convolution(
    hidden_1CT: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None = None,
    activation: str | None = None,
    *,
    cu_seq_lens_q: Tensor,
    prefix_keys: PrefixKeys | None = None,
    **_: object,
) -> Tensor:
    """Convolve each sequence along its tokens; a token sees itself and the W - 1 tokens before it. Returns [1, C, T].

    cu_seq_lens_q: [N + 1] int32. Raises ValueError for common prefixes: a sequence would then begin without its prompt.
    """
    if prefix_keys is not None:
        raise ValueError("linear attention needs each sequence whole, not behind a common prefix")
    tokens_T = torch.arange(hidden_1CT.shape[-1], dtype=cu_seq_lens_q.dtype, device=hidden_1CT.device)
    steps_T = tokens_T - cu_seq_lens_q[torch.searchsorted(cu_seq_lens_q, tokens_T, right=True) - 1]
    width = weight_CW.shape[-1]
    out_1CT = hidden_1CT.float() * weight_CW[:, -1:].float()
    for back in range(1, width):
        earlier_1CT = torch.roll(hidden_1CT, back, -1).masked_fill(steps_T < back, 0)
        out_1CT = out_1CT + earlier_1CT.float() * weight_CW[:, width - 1 - back, None].float()
    if bias_C is not None:
        out_1CT = out_1CT + bias_C[:, None]
    return (ACT2FN[activation](out_1CT) if activation else out_1CT).to(hidden_1CT.dtype)


@torch.compiler.disable  # the number of chunks would be compiled as a constant
def packed_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    max_length_q: int,
    original: DeltaRule,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[Tensor, None]:
    """Apply the gated delta rule to each sequence. query, key, value: [1, T, H, D]. Returns [1, T, H, D].

    g: decay in log space, [1, T, H]. beta: rate of update, [1, T, H]. cu_seqlens: [N + 1] int32. max_length_q: L.
    original: transformers' function. Its torch code runs on CPUs; on GPUs, `kernel` runs instead.
    """
    options = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
    if query.is_cuda:
        # Call fla's function directly: transformers' function drops the boundaries when it falls back to its own code.
        out, _state = kernel()(query, key, value, g=g, beta=beta, cu_seqlens=int64_boundaries(cu_seqlens), **options)
        return out, None
    tensors = (query[0], key[0], value[0], g[0], beta[0])
    (query, valid_NL), *others = (padded_runs(tensor, cu_seqlens, max_length_q) for tensor in tensors)
    key, value, g, beta = (tensor for tensor, _ in others)
    # Padding comes after a sequence's tokens, which therefore never see it.
    out, _state = inspect.unwrap(original)(query, key, value, g=g, beta=beta, **options)
    return out[valid_NL][None], None


@lru_cache(maxsize=1)
def int64_boundaries(cu_seqlens: Tensor) -> Tensor:
    """Return the boundaries as int64, the same tensor for all layers of a forward pass.

    fla caches derived values by the identity of this tensor: with new tensors, each layer would wait for the device.
    """
    return cu_seqlens.long()


@cache
def kernel() -> DeltaRule:
    """Return the delta rule for packed sequences on GPUs. Raises ConfigError if it is not installed or cannot train."""
    try:
        # pyrefly: ignore[missing-import]  (installed only with CUDA)
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        advice = f"pip install 'colocated-grpo[linear-attention]' ({in_one_line(error)})"
        raise ConfigError(f"training linear attention on GPUs needs flash-linear-attention: {advice}") from error
    _check_triton()
    return chunk_gated_delta_rule


def _check_triton() -> None:
    """Raise ConfigError for a Triton with which fla's gradients are wrong on Hopper GPUs (fla's issue 640).

    fla itself raises an error only in the first backward pass. The TileLang kernels of fla compute correct gradients.
    """
    if torch.cuda.get_device_capability() != HOPPER or _uses_tilelang():
        return
    import triton  # imported by fla already; not installed where there is no GPU

    first_wrong, first_right = WRONG_TRITON
    if first_wrong <= Version(triton.__version__) < first_right:
        raise ConfigError(
            f"training linear attention on Hopper GPUs needs Triton {first_right} or later, which torch 2.13 has, or "
            f"tilelang with nvcc: with Triton {triton.__version__} flash-linear-attention computes wrong gradients"
        )


def _uses_tilelang() -> bool:
    """Return True if fla uses its TileLang kernels on Hopper GPUs.

    vLLM's CUDA builds install tilelang, but tilelang compiles with nvcc, which many machines lack.
    """
    from torch.utils.cpp_extension import CUDA_HOME  # imports setuptools

    if find_spec("tilelang") is None or os.environ.get("FLA_TILELANG") == "0":
        return False
    return CUDA_HOME is not None and (Path(CUDA_HOME) / "bin" / "nvcc").exists()
