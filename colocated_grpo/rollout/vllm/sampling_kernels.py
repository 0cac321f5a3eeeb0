"""A decode step outside the model: tokens are sampled, scored in the same pass, and made the inputs of the next step.

Times within a step: docs/results/decode_kernels_1xh200.json. Of single launches: logit_kernels_1xh200.json there.
"""

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors

from colocated_grpo.runtime.logit_kernels import sample
from colocated_grpo.runtime.triton_jit import jit

UNPLAIN = "max_per_req_token_ids", "logits_mode"
"""Options of vLLM's `compute_topk_scores` that ask for more than the sampled token's log-probability."""


class _LastSample:
    """Logits of the last sampling call, and the log-probability of each sampled token.

    vLLM scores the sampled tokens right after sampling, from the same tensor, so one entry is enough. The tensor is
    recognised by identity: vLLM samples under inference_mode, where tensors have no version counter that would show a
    change in place. Such a change would appear in mismatch/plain, which stops the run.
    """

    logits: weakref.ref[Tensor] | None = None
    logprobs_B: Tensor | None = None

    @classmethod
    def logprobs_of(cls, logits: Tensor) -> Tensor | None:
        """Return the log-probability of each token; None if the last sampling call used other logits."""
        return cls.logprobs_B if cls.logits is not None and cls.logits() is logits else None


def make_gumbel_sample(vllm_sample: Callable[..., object], count_use: Callable[[], None]) -> Callable[..., object]:
    """Return the sampler's `gumbel_sample` with this kernel. The logits are already divided by the temperature."""

    def gumbel_sample(
        logits: Tensor, rows: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, **options: object
    ) -> object:
        if any(isinstance(value, Tensor) or value for value in options.values()):  # speculative decoding, 64-bit noise
            return vllm_sample(logits, rows, temperature, seeds, positions, **options)
        count_use()
        sampled_B, logprobs_B = sample(logits, rows, temperature, seeds, positions)
        _LastSample.logits, _LastSample.logprobs_B = weakref.ref(logits), logprobs_B
        return sampled_B

    return gumbel_sample


def make_compute_topk_scores(
    vllm_scores: Callable[..., object], count_use: Callable[[], None]
) -> Callable[..., object]:
    """Return the sampler's `compute_topk_scores`, which then reuses the log-probabilities computed by sampling.

    Applies to requests for the sampled token's log-probability only. The token's rank is returned as 0; the trainer
    never reads the rank.
    """

    def compute_topk_scores(
        logits: Tensor, num_logprobs: int, sampled: Tensor, *others: object, **options: object
    ) -> object:
        logprobs_B = _LastSample.logprobs_of(logits)
        unplain = num_logprobs or others[:1] != (None,) or any(options.get(name) for name in UNPLAIN)
        if unplain or logprobs_B is None:
            return vllm_scores(logits, num_logprobs, sampled, *others, **options)
        count_use()
        return LogprobsTensors(sampled.view(-1, 1), logprobs_B.view(-1, 1), torch.zeros_like(sampled))

    return compute_topk_scores


class Requests(NamedTuple):
    """vLLM's record of all requests on the device, one entry or row for each."""

    computed: Tensor
    """Tokens in the KV cache."""
    last_token: Tensor
    tokens: Tensor
    """[requests, tokens of the longest]"""
    lengths: Tensor


class Inputs(NamedTuple):
    """Inputs that the model's CUDA graphs read, one entry for each request of a decode step."""

    token_ids: Tensor
    positions: Tensor
    lengths: Tensor


def advance(sampled_B: Tensor, rows: Tensor, requests: Requests, inputs: Inputs) -> None:
    """Append each sampled token to its request, and make it the request's input of the next decode step.

    rows: [B] indices of the requests.
    """
    _advance[(len(sampled_B),)](sampled_B, rows, *requests, *inputs, requests.tokens.stride(0), num_warps=1)


@jit
def _advance(sampled, rows, computed, last_token, tokens, lengths, token_ids, positions, input_lengths, stride):
    row = tl.program_id(0)
    request = tl.load(rows + row).to(tl.int64)
    token = tl.load(sampled + row)
    length = tl.load(lengths + request)
    tl.store(tokens + request * stride + length, token.to(tokens.dtype.element_ty))
    tl.store(lengths + request, length + 1)
    tl.store(last_token + request, token)
    position = tl.load(computed + request) + 1
    tl.store(computed + request, position)
    tl.store(token_ids + row, token.to(token_ids.dtype.element_ty))
    tl.store(positions + row, position.to(positions.dtype.element_ty))
    tl.store(input_lengths + row, position + 1)
