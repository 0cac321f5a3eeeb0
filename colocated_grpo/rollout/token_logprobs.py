"""The sampled token's log-probability, reading the logits once.

vLLM's own kernel walks over each row twice in short blocks: 174 us a decode step at 230 sequences of 152k logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
import vllm.v1.worker.gpu.sample.logprob as sampling
from torch import Tensor

LANES = 4096


def install() -> None:
    sampling.compute_token_logprobs = compute_token_logprobs


def compute_token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """log softmax(logits)[token], float32 of the shape of token_ids: [B, k] over logits [B, V]."""
    logsumexp_B = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _logsumexp[(len(logits),)](logits, logsumexp_B, logits.shape[1], logits.stride(0), LANES=LANES, num_warps=8)
    return logits.gather(1, token_ids.long()).float() - logsumexp_B[:, None]


@triton.jit
def _logsumexp(logits, out, vocabulary, stride, LANES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    # Every lane keeps its own running maximum and sum; lanes meet once, at the end.
    top = tl.full([LANES], float("-inf"), tl.float32)
    mass = tl.zeros([LANES], tl.float32)
    for start in range(0, vocabulary, LANES):
        x = tl.load(logits + row * stride + start + lane, mask=start + lane < vocabulary, other=float("-inf"))
        x = x.to(tl.float32)
        new_top = tl.maximum(top, x)
        # Lanes that have seen nothing but -inf (masked tokens) would give NaN.
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        mass = mass * tl.exp(top - safe) + tl.exp(x - safe)
        top = new_top
    peak = tl.max(top, 0)
    total = tl.sum(mass * tl.exp(top - peak), 0)
    tl.store(out + row, peak + tl.log(total))
