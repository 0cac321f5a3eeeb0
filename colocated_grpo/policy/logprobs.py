"""Log-probabilities and entropies straight from hidden states; the full logits never exist.

Shapes: N scored tokens, H hidden size, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor


def linear_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    *,
    temperature_N: Tensor,
    chunk_tokens: int,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """log p(target) and entropy of softmax(hidden @ weight.T / temperature), each token at its own temperature,, both [N] float32.

    Gradients flow through the log-probabilities only; the entropy is for metrics. Logits are float32 and exist for
    `chunk_tokens` tokens at a time; the backward pass computes them again.
    softcap: final logits are softcap * tanh(logits / softcap) before the temperature (gemma2, gemma3).
    """
    return _LinearLogprobs.apply(hidden_NH, weight_VH, targets_N, temperature_N, chunk_tokens, softcap)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, targets_N, temperature_N, chunk_tokens, softcap):
        logprobs_N = hidden_NH.new_empty(len(hidden_NH), dtype=torch.float32)
        entropy_N = torch.empty_like(logprobs_N)
        logsumexp_N = torch.empty_like(logprobs_N)
        for chunk in _chunks(len(hidden_NH), chunk_tokens):
            logits_CV, _ = _logits(hidden_NH[chunk], weight_VH, temperature_N[chunk, None], softcap)
            logsumexp_C = torch.logsumexp(logits_CV, dim=-1)
            logprobs_N[chunk] = logits_CV.gather(1, targets_N[chunk, None])[:, 0] - logsumexp_C
            probs_CV = (logits_CV - logsumexp_C[:, None]).exp_()
            entropy_N[chunk] = logsumexp_C - (probs_CV.mul_(logits_CV)).sum(-1)
            logsumexp_N[chunk] = logsumexp_C
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, temperature_N, logsumexp_N)
        ctx.settings = chunk_tokens, softcap
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx, grad_N, _grad_entropy):
        hidden_NH, weight_VH, targets_N, temperature_N, logsumexp_N = ctx.saved_tensors
        chunk_tokens, softcap = ctx.settings
        grad_hidden_NH = torch.empty_like(hidden_NH)
        # One accumulator for all chunks: float32, or the sum over chunks would lose what a single matmul keeps.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        for chunk in _chunks(len(hidden_NH), chunk_tokens):
            logits_CV, slope_CV = _logits(hidden_NH[chunk], weight_VH, temperature_N[chunk, None], softcap)
            # d logp / d logits = onehot - softmax
            grad_CV = logits_CV.sub_(logsumexp_N[chunk, None]).exp_().mul_(-grad_N[chunk, None])
            grad_CV.scatter_add_(1, targets_N[chunk, None], grad_N[chunk, None])
            grad_CV.div_(temperature_N[chunk, None])
            if slope_CV is not None:
                grad_CV.mul_(slope_CV)
            grad_CV = grad_CV.to(hidden_NH.dtype)
            torch.mm(grad_CV, weight_VH, out=grad_hidden_NH[chunk])
            grad_weight_VH += grad_CV.t() @ hidden_NH[chunk]
        return grad_hidden_NH, grad_weight_VH.to(weight_VH.dtype), None, None, None, None


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _logits(hidden_CH: Tensor, weight_VH: Tensor, temperature_C1: Tensor, softcap: float | None):
    """Float32 logits at the temperature, and the slope of the soft cap (None without one)."""
    if hidden_CH.is_cuda and hidden_CH.dtype != torch.float32:
        logits_CV = torch.mm(hidden_CH, weight_VH.t(), out_dtype=torch.float32)
    else:
        logits_CV = torch.mm(hidden_CH, weight_VH.t()).float()
    if softcap is None:
        return logits_CV.div_(temperature_C1), None
    capped_CV = logits_CV.div_(softcap).tanh_()
    slope_CV = 1 - capped_CV * capped_CV
    return capped_CV.mul_(softcap).div_(temperature_C1), slope_CV
