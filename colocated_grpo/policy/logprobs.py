"""Log-probabilities and entropies directly from hidden states; the full logits are never stored.

Shapes: N scored tokens, H hidden size, V vocabulary, C tokens of one chunk.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

PerRow = tuple[Tensor, Tensor, Tensor, Tensor]
"""(targets_C, temperature_C, logsumexp_C, grad_C) of a chunk. grad_C: of the log-probabilities."""
Logits = Callable[[Tensor, Tensor, float | None], Tensor]
"""(hidden_CH, weight_VH, softcap) -> float32 logits [C, V], soft-capped and not divided by the temperature."""


def head_logits(hidden_CH: Tensor, weight_VH: Tensor, softcap: float | None) -> Tensor:
    if hidden_CH.is_cuda and hidden_CH.dtype != torch.float32:
        logits_CV = torch.mm(hidden_CH, weight_VH.t(), out_dtype=torch.float32)
    else:
        logits_CV = torch.mm(hidden_CH, weight_VH.t()).float()
    return logits_CV if softcap is None else logits_CV.div_(softcap).tanh_().mul_(softcap)


def linear_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    *,
    temperature_N: Tensor,
    chunk_tokens: int,
    softcap: float | None = None,
    logits: Logits = head_logits,
) -> tuple[Tensor, Tensor]:
    """Return log p(target) and entropy of softmax(hidden @ weight.T / temperature) per token, both [N] float32.

    Gradients flow through the log-probabilities only; the entropy is for metrics. Logits are float32 and stored for
    `chunk_tokens` tokens at a time; the backward pass computes them again.
    softcap: final logits are softcap * tanh(logits / softcap) before the temperature (gemma2, gemma3).
    """
    head = _Head(logits, *_operators_on(hidden_NH.device), chunk_tokens, softcap)
    return _LinearLogprobs.apply(hidden_NH, weight_VH, targets_N, temperature_N, head)


def linear_loss(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    *,
    loss_of: Callable[[slice, Tensor], Tensor],
    temperature_N: Tensor,
    chunk_tokens: int,
    softcap: float | None = None,
    logits: Logits = head_logits,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, and as constants the log-probabilities and entropies of `linear_logprobs`, both [N].

    loss_of(token range, logprobs of that range) -> that range's part of the loss, a scalar; the parts are summed.
    The forward pass computes the gradients of hidden states and weight while a chunk's logits exist. The backward pass
    then does not recompute the logits. Together, they take three matrix products of the logits' size instead of four.
    """
    head = _Head(logits, *_operators_on(hidden_NH.device), chunk_tokens, softcap)
    return _LinearLoss.apply(hidden_NH, weight_VH, targets_N, temperature_N, head, loss_of)


class _Head(NamedTuple):
    """Computes logits of a chunk of tokens, their statistics and their gradient."""

    logits: Logits
    statistics: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    """(logits_CV, targets_C, temperature_C) -> log p(target), entropy, log-sum-exp."""
    gradient: Callable[[Tensor, PerRow, torch.dtype, float | None], Tensor]
    """(logits_CV, per_row, dtype, softcap) -> gradient of the logits [C, V]."""
    chunk_tokens: int
    softcap: float | None


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperature_N: Tensor, head: _Head
    ) -> tuple[Tensor, Tensor]:
        ctx.head = head
        # Separate tensors instead of rows of one tensor: FSDP warns about outputs that are views.
        logprobs_N = hidden_NH.new_empty(len(hidden_NH), dtype=torch.float32)
        entropy_N, logsumexp_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        for chunk in _chunks(len(hidden_NH), head.chunk_tokens):
            logits_CV = head.logits(hidden_NH[chunk], weight_VH, head.softcap)
            logprobs_N[chunk], entropy_N[chunk], logsumexp_N[chunk] = head.statistics(
                logits_CV, targets_N[chunk], temperature_N[chunk]
            )
            del logits_CV  # before the next chunk's logits are allocated, or both exist at once
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, temperature_N, logsumexp_N)
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    # pyrefly: ignore[bad-override]  (torch declares *grad_outputs, but passes one argument per output)
    def backward(ctx: Any, grad_N: Tensor, _grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, targets_N, temperature_N, logsumexp_N = ctx.saved_tensors
        head = ctx.head
        gradients = _Gradients(hidden_NH, weight_VH, head, of_weight=ctx.needs_input_grad[1])
        for chunk in _chunks(len(hidden_NH), head.chunk_tokens):
            logits_CV = head.logits(hidden_NH[chunk], weight_VH, head.softcap)
            per_row = targets_N[chunk], temperature_N[chunk], logsumexp_N[chunk], grad_N[chunk]
            gradients.add(chunk, logits_CV, per_row)
            del logits_CV
        return gradients.hidden_NH, gradients.weight(), None, None, None


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        targets_N: Tensor,
        temperature_N: Tensor,
        head: _Head,
        loss_of: Callable[[slice, Tensor], Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs_N = hidden_NH.new_empty(len(hidden_NH), dtype=torch.float32)
        entropy_N = torch.empty_like(logprobs_N)
        loss = hidden_NH.new_zeros((), dtype=torch.float32)
        gradients = _Gradients(hidden_NH, weight_VH, head, of_weight=ctx.needs_input_grad[1])
        for chunk in _chunks(len(hidden_NH), head.chunk_tokens):
            rows = targets_N[chunk], temperature_N[chunk]
            logits_CV = head.logits(hidden_NH[chunk], weight_VH, head.softcap)
            logprobs_N[chunk], entropy_N[chunk], logsumexp_C = head.statistics(logits_CV, *rows)
            with torch.enable_grad():
                logprobs_C = logprobs_N[chunk].detach().requires_grad_()
                part = loss_of(chunk, logprobs_C)
                (grad_C,) = torch.autograd.grad(part, logprobs_C)
            loss += part.detach()
            gradients.add(chunk, logits_CV, (*rows, logsumexp_C, grad_C))
            del logits_CV
        ctx.save_for_backward(gradients.hidden_NH, gradients.weight())
        ctx.mark_non_differentiable(logprobs_N, entropy_N)
        return loss, logprobs_N, entropy_N

    @staticmethod
    # pyrefly: ignore[bad-override]  (torch declares *grad_outputs, but passes one argument per output)
    def backward(ctx: Any, grad: Tensor, *_constants: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_NH, grad_weight_VH = ctx.saved_tensors
        of_weight = None if grad_weight_VH is None else grad_weight_VH * grad
        return grad_hidden_NH * grad, of_weight, None, None, None, None


class _Gradients:
    """Gradients of the hidden states and, unless the weight is frozen, of the weight, filled chunk by chunk.

    `add` overwrites the logits.
    """

    def __init__(self, hidden_NH: Tensor, weight_VH: Tensor, head: _Head, *, of_weight: bool) -> None:
        self._inputs = hidden_NH, weight_VH
        self._head = head
        self.hidden_NH = torch.empty_like(hidden_NH)
        # Chunks accumulate in float32: a 16-bit sum would lose digits that a single matmul keeps.
        self._weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if of_weight else None

    def add(self, chunk: slice, logits_CV: Tensor, per_row: PerRow) -> None:
        hidden_NH, weight_VH = self._inputs
        grad_CV = self._head.gradient(logits_CV, per_row, hidden_NH.dtype, self._head.softcap)
        torch.mm(grad_CV, weight_VH, out=self.hidden_NH[chunk])
        if self._weight_VH is not None:
            _add_product(self._weight_VH, grad_CV.t(), hidden_NH[chunk])

    def weight(self) -> Tensor | None:
        return None if self._weight_VH is None else self._weight_VH.to(self._inputs[1].dtype)


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _add_product(total_VH: Tensor, left_VC: Tensor, right_CH: Tensor) -> None:
    """total += left @ right in float32, without a 16-bit intermediate."""
    if left_VC.is_cuda and left_VC.dtype != torch.float32:
        torch.addmm(total_VH, left_VC, right_CH, out_dtype=torch.float32, out=total_VH)
    else:
        total_VH.addmm_(left_VC.float(), right_CH.float())


def _operators_on(device: torch.device) -> tuple[Callable[..., Any], Callable[..., Tensor]]:
    """Return the fastest `_Head.statistics` and `_Head.gradient` on the device."""
    if device.type == "cuda":
        from colocated_grpo.runtime import logit_kernels  # CPU builds of torch may lack Triton

        return logit_kernels.row_statistics, logit_kernels.logit_gradient
    return plain_row_statistics, plain_logit_gradient


def plain_row_statistics(logits_CV: Tensor, targets_C: Tensor, temperature_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same as `logit_kernels.row_statistics`, in plain torch; log p has the bits of vLLM's sampler for CPUs."""
    scaled_CV = logits_CV / temperature_C[:, None]
    logprobs_CV = scaled_CV.log_softmax(-1)
    logsumexp_C = scaled_CV.amax(-1) - logprobs_CV.amax(-1)
    entropy_C = -logprobs_CV.exp().mul_(logprobs_CV).sum(-1)
    return logprobs_CV.gather(1, targets_C[:, None])[:, 0], entropy_C, logsumexp_C


def plain_logit_gradient(logits_CV: Tensor, per_row: PerRow, dtype: torch.dtype, softcap: float | None) -> Tensor:
    """The same as `logit_kernels.logit_gradient`: d logp / d logits = (onehot - softmax) / temperature, in torch."""
    targets_C, temperature_C, logsumexp_C, grad_C = per_row
    probs_CV = (logits_CV / temperature_C[:, None]).sub_(logsumexp_C[:, None]).exp_()
    scale_C1 = (grad_C / temperature_C)[:, None]
    grad_CV = probs_CV.mul_(-scale_C1).scatter_add_(1, targets_C[:, None], scale_C1)
    if softcap is not None:
        grad_CV *= 1 - (logits_CV / softcap).square()  # derivative of the cap, in terms of its value
    return grad_CV.to(dtype)
