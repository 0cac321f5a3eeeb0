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
    """log p(target) and entropy of softmax(hidden @ weight.T / temperature) for every token, both [N] float32.

    Gradients flow through the log-probabilities only; the entropy is for metrics. Logits are float32 and exist for
    `chunk_tokens` tokens at a time; the backward pass computes them again.
    softcap: final logits are softcap * tanh(logits / softcap) before the temperature (gemma2, gemma3).
    """
    return _LinearLogprobs.apply(hidden_NH, weight_VH, targets_N, temperature_N, chunk_tokens, softcap)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, targets_N, temperature_N, chunk_tokens, softcap):
        statistics, _ = _row_operations(hidden_NH.device)
        # Not rows of one tensor: FSDP warns of an output that is a view.
        logprobs_N = hidden_NH.new_empty(len(hidden_NH), dtype=torch.float32)
        entropy_N, logsumexp_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        for chunk in _chunks(len(hidden_NH), chunk_tokens):
            logits_CV = _logits(hidden_NH[chunk], weight_VH, softcap)
            logprobs_N[chunk], entropy_N[chunk], logsumexp_N[chunk] = statistics(
                logits_CV, targets_N[chunk], temperature_N[chunk]
            )
            del logits_CV  # before the next chunk's are made, or two chunks exist at once
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, temperature_N, logsumexp_N)
        ctx.settings = chunk_tokens, softcap
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx, grad_N, _grad_entropy):
        hidden_NH, weight_VH, targets_N, temperature_N, logsumexp_N = ctx.saved_tensors
        chunk_tokens, softcap = ctx.settings
        _, gradient = _row_operations(hidden_NH.device)
        grad_hidden_NH = torch.empty_like(hidden_NH)
        # One accumulator for all chunks: float32, or the sum over chunks would lose what a single matmul keeps.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        for chunk in _chunks(len(hidden_NH), chunk_tokens):
            logits_CV = _logits(hidden_NH[chunk], weight_VH, softcap)
            grad_CV = gradient(
                logits_CV, targets_N[chunk], temperature_N[chunk], logsumexp_N[chunk], grad_N[chunk], hidden_NH.dtype
            )
            if softcap is not None:
                grad_CV *= 1 - (logits_CV / softcap).square()  # slope of the cap, from its own value
            del logits_CV
            torch.mm(grad_CV, weight_VH, out=grad_hidden_NH[chunk])
            _add_product(grad_weight_VH, grad_CV.t(), hidden_NH[chunk])
        return grad_hidden_NH, grad_weight_VH.to(weight_VH.dtype), None, None, None, None


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _logits(hidden_CH: Tensor, weight_VH: Tensor, softcap: float | None) -> Tensor:
    """Float32 logits [C, V], soft-capped where the model does so."""
    if hidden_CH.is_cuda and hidden_CH.dtype != torch.float32:
        logits_CV = torch.mm(hidden_CH, weight_VH.t(), out_dtype=torch.float32)
    else:
        logits_CV = torch.mm(hidden_CH, weight_VH.t()).float()
    return logits_CV if softcap is None else logits_CV.div_(softcap).tanh_().mul_(softcap)


def _add_product(total_VH: Tensor, left_VC: Tensor, right_CH: Tensor) -> None:
    """total += left @ right, in the accumulator's float32 without an intermediate in 16 bits."""
    if left_VC.is_cuda and left_VC.dtype != torch.float32:
        torch.addmm(total_VH, left_VC, right_CH, out_dtype=torch.float32, out=total_VH)
    else:
        total_VH.addmm_(left_VC.float(), right_CH.float())


def _row_operations(device: torch.device):
    if device.type == "cuda":
        from colocated_grpo.policy import softmax_kernels as kernels  # Triton exists beside CUDA only

        return kernels.row_statistics, kernels.logit_gradient
    return _row_statistics, _logit_gradient


def _row_statistics(logits_CV: Tensor, targets_C: Tensor, temperature_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The plain form of `softmax_kernels.row_statistics`. Like the next function, overwrites no argument."""
    scaled_CV = logits_CV / temperature_C[:, None]
    logsumexp_C = torch.logsumexp(scaled_CV, dim=-1)
    probs_CV = (scaled_CV - logsumexp_C[:, None]).exp_()
    logprobs_C = scaled_CV.gather(1, targets_C[:, None])[:, 0] - logsumexp_C
    return logprobs_C, logsumexp_C - probs_CV.mul_(scaled_CV).sum(-1), logsumexp_C


def _logit_gradient(
    logits_CV: Tensor, targets_C: Tensor, temperature_C: Tensor, logsumexp_C: Tensor, grad_C: Tensor, dtype: torch.dtype
) -> Tensor:
    """The plain form of `softmax_kernels.logit_gradient`: d logp / d logits = (onehot - softmax) / temperature."""
    probs_CV = (logits_CV / temperature_C[:, None]).sub_(logsumexp_C[:, None]).exp_()
    scale_C1 = (grad_C / temperature_C)[:, None]
    return probs_CV.mul_(-scale_C1).scatter_add_(1, targets_C[:, None], scale_C1).to(dtype)
