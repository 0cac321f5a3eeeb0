"""Packed linear attention: no sequence sees its neighbours, in values and gradients."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils import cpp_extension
from transformers.models.qwen3_next import modeling_qwen3_next as source

from colocated_grpo.policy import linear_attention
from colocated_grpo.policy.linear_attention import int64_boundaries, kernel, packed_convolution, packed_delta_rule
from colocated_grpo.policy.loading import ModelLoader
from colocated_grpo.policy.model import read_model_config
from colocated_grpo.settings.errors import ConfigError
from tests.support.families import SETTINGS
from tests.support.small_policy import config_of, pack_for, random_groups

LENGTHS = [3, 1, 70, 2]
"""One of them longer than a chunk of 64 tokens; the convolution is wider than others."""
BOUNDARIES = torch.tensor([0, 3, 4, 74, 76], dtype=torch.int32)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).requires_grad_()


def gradients(out: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return [out, *torch.autograd.grad((out * torch.linspace(0, 1, out.numel()).view_as(out)).sum(), inputs)]


@pytest.mark.parametrize("activation", ["silu", None])
def test_the_convolution_of_packed_sequences_equals_one_by_one(activation):
    hidden, weight, bias = random(1, 5, sum(LENGTHS)), random(5, 4), random(5)

    def one(part: torch.Tensor) -> torch.Tensor:
        out = F.conv1d(part, weight[:, None], bias, padding=3, groups=5)[..., : part.shape[-1]]
        return F.silu(out) if activation else out

    packed = packed_convolution(hidden, weight, bias, activation, cu_seq_lens_q=BOUNDARIES)
    expected = torch.cat([one(part) for part in hidden.split(LENGTHS, -1)], -1)
    for value, wanted in zip(
        gradients(packed, hidden, weight, bias), gradients(expected, hidden, weight, bias), strict=True
    ):
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-5)


def test_the_delta_rule_of_packed_sequences_equals_one_by_one():
    tokens = sum(LENGTHS)
    query, key, value = random(1, tokens, 2, 8), random(1, tokens, 2, 8), random(1, tokens, 2, 6)
    rate, decay = random(1, tokens, 2), random(1, tokens, 2)
    inputs = (query, key, value, decay, rate)
    options = {"use_qk_l2norm_in_kernel": True}
    rule = source.torch_chunk_gated_delta_rule

    packed, state = packed_delta_rule(
        query, key, value, g=-decay.exp(), beta=rate.sigmoid(), cu_seqlens=BOUNDARIES, max_length_q=70, original=rule,
        **options,
    )  # fmt: skip
    assert state is None
    parts = zip(*(tensor.split(LENGTHS, 1) for tensor in inputs), strict=True)
    expected = torch.cat([rule(q, k, v, g=-d.exp(), beta=r.sigmoid(), **options)[0] for q, k, v, d, r in parts], 1)
    for result, wanted in zip(gradients(packed, *inputs), gradients(expected, *inputs), strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)


def test_a_prompt_that_siblings_share_is_not_computed_once(world, model_folder):
    """Its state would be missing where the siblings go on."""
    folder = model_folder("qwen3_next", edits=SETTINGS["qwen3_next"])
    config = config_of(folder)
    model = ModelLoader(config, read_model_config(config.model, folder), folder, world).model(offloaded=False)
    assert not model.shares_prefixes
    (micro_batch,) = pack_for(world, random_groups(2, 3), config).minibatches[0].micro_batches
    assert micro_batch.tokens.prefix_keys is None
    (siblings,) = pack_for(world, random_groups(2, 3), config_of(model_folder())).minibatches[0].micro_batches
    keys = siblings.tokens.prefix_keys
    assert keys is not None
    with pytest.raises(ValueError, match="needs each sequence whole"):
        packed_convolution(random(1, 5, 4), random(5, 4), cu_seq_lens_q=BOUNDARIES, prefix_keys=keys)


@pytest.mark.parametrize(
    ("capability", "triton", "tilelang", "nvcc", "allowed", "trains"),
    [
        ((9, 0), "3.6.0", False, True, "1", False),
        ((9, 0), "3.7.0", False, True, "1", False),
        ((9, 0), "3.7.1", False, False, "1", True),
        ((9, 0), "3.3.1", False, False, "1", True),
        ((9, 0), "3.6.0", True, True, "1", True),
        ((9, 0), "3.6.0", True, False, "1", False),
        ((9, 0), "3.6.0", True, True, "0", False),
        ((8, 0), "3.6.0", False, False, "1", True),
    ],
)
def test_hopper_gpus_need_a_triton_with_right_gradients(
    monkeypatch, tmp_path, capability, triton, tilelang, nvcc, allowed, trains
):
    package = ModuleType("fla.ops.gated_delta_rule")
    package.chunk_gated_delta_rule = packed_delta_rule
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=triton))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(linear_attention, "find_spec", lambda name: object() if tilelang else None)
    monkeypatch.setenv("FLA_TILELANG", allowed)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    if nvcc:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvcc").touch()
    kernel.cache_clear()
    if trains:
        assert kernel() is packed_delta_rule
    else:
        with pytest.raises(ConfigError, match=rf"needs Triton 3.7.1 or later.* with Triton {triton} .*wrong gradients"):
            kernel()
    kernel.cache_clear()


def test_the_layers_of_one_forward_pass_share_a_tensor_of_boundaries():
    """Equal boundaries of another micro-batch are another tensor, which may change on its own."""
    first = int64_boundaries(BOUNDARIES)
    assert first.dtype == torch.int64
    assert torch.equal(first, BOUNDARIES.long())
    assert int64_boundaries(BOUNDARIES) is first
    assert int64_boundaries(BOUNDARIES.clone()) is not first


def test_gpus_need_kernels_which_a_line_names(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"flash-linear-attention: pip install 'colocated-grpo\[linear-attention\]'"):
        kernel()
