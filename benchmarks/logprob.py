"""The log-probability operator against its own matrix products: `python -m benchmarks.logprob`.

Times forward plus backward of both forms of the operator, and of the plain path, which holds all logits at once. The
floor is three matrix products of the same sizes: logits, gradient of the hidden states, gradient of the weights.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.harness import main_here
from benchmarks.roofline import Roofline, median_seconds
from colocated_grpo.policy.logprobs import linear_logprobs, linear_loss
from colocated_grpo.settings.training import PolicyConfig
from colocated_grpo.types import JsonObject

GIB = 1 << 30


class Problem(NamedTuple):
    """N scored tokens, H hidden size, V vocabulary."""

    hidden_NH: Tensor
    weight_VH: Tensor
    targets_N: Tensor
    temperature_N: Tensor
    grad_N: Tensor
    """Gradient of the loss with respect to the log-probabilities."""


Operator = Callable[[Problem], Tensor]
"""Returns a scalar whose gradient is that of sum(grad * log p(target)). Computes entropies as well."""


def main(arguments: Sequence[str] | None = None) -> int:
    return main_here("logprob", arguments, parser(), measure_sizes)


def measure_sizes(options: argparse.Namespace, device: torch.device, roofline: Roofline) -> JsonObject:
    rows = []
    for hidden in options.hidden:
        problem = make_problem(options.tokens, options.vocab, hidden, device)
        floor = roofline.seconds_for_flops(3 * 2 * options.tokens * options.vocab * hidden)
        for row in measure(problem, options.chunk, options.repeats):
            rows.append(
                {"tokens": options.tokens, "vocab": options.vocab, "hidden": hidden, **row, "floor_seconds": floor}
            )
    return {"chunk_tokens": options.chunk, "rows": rows}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--chunk", type=int, default=PolicyConfig().logprob_chunk_tokens, help="logprob_chunk_tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="result file to write")
    return parser


def make_problem(tokens: int, vocab: int, hidden: int, device: torch.device) -> Problem:
    """Return random inputs in the training dtype: bf16 on CUDA, fp32 on CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    return Problem(
        hidden_NH=torch.randn(tokens, hidden, device=device).to(dtype).requires_grad_(),
        weight_VH=torch.randn(vocab, hidden, device=device).mul_(0.02).to(dtype).requires_grad_(),
        targets_N=torch.randint(vocab, (tokens,), device=device),
        temperature_N=torch.ones(tokens, device=device),
        grad_N=torch.randn(tokens, device=device) / tokens,
    )


def fused_loss(problem: Problem, chunk_tokens: int) -> Tensor:
    """Compute the loss inside the operator, so that logits are computed once."""
    loss, _, _ = linear_loss(
        problem.hidden_NH,
        problem.weight_VH,
        problem.targets_N,
        loss_of=lambda tokens, logprobs_C: (logprobs_C * problem.grad_N[tokens]).sum(),
        temperature_N=problem.temperature_N,
        chunk_tokens=chunk_tokens,
    )
    return loss


def recomputed(problem: Problem, chunk_tokens: int) -> Tensor:
    """Compute the loss outside the operator, so that the backward pass recomputes the logits."""
    logprobs_N, _ = linear_logprobs(
        problem.hidden_NH,
        problem.weight_VH,
        problem.targets_N,
        temperature_N=problem.temperature_N,
        chunk_tokens=chunk_tokens,
    )
    return (logprobs_N * problem.grad_N).sum()


def full_logits(problem: Problem) -> Tensor:
    """Compute the loss without the operator, with all logits in memory."""
    logits_NV = (problem.hidden_NH @ problem.weight_VH.t()).float() / problem.temperature_N[:, None]
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    with torch.no_grad():
        _entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return (logprobs_NV.gather(1, problem.targets_N[:, None])[:, 0] * problem.grad_N).sum()


def forward_backward(problem: Problem, operator: Operator) -> None:
    """Run the operator and its backward pass, into fresh gradients."""
    problem.hidden_NH.grad = problem.weight_VH.grad = None
    operator(problem).backward()


def measure(problem: Problem, chunk_tokens: int, repeats: int) -> list[JsonObject]:
    """Return one row per operator: seconds, extra memory, and the seconds of the three products.

    The seconds of an operator that does not fit into memory are None.
    """
    products = matmul_seconds(problem, repeats)
    operators: dict[str, Operator] = {
        "linear_loss": partial(fused_loss, chunk_tokens=chunk_tokens),
        "linear_logprobs": partial(recomputed, chunk_tokens=chunk_tokens),
        "full_logits": full_logits,
    }
    rows: list[JsonObject] = []
    for name, operator in operators.items():
        try:
            seconds, extra = seconds_and_memory(problem, operator, repeats)
        except torch.OutOfMemoryError:
            rows.append({"operator": name, "seconds": None, "matmul_seconds": products})
            continue
        ratio = seconds / products
        rows.append(
            {"operator": name, "seconds": seconds, "matmul_seconds": products, "ratio": ratio, "extra_gib": extra}
        )
    return rows


def seconds_and_memory(problem: Problem, operator: Operator, repeats: int) -> tuple[float, float | None]:
    """Return median seconds, and peak GiB beyond inputs and gradients.

    The peak is None on CPU, whose allocator has no statistics.
    """
    device = problem.hidden_NH.device
    seconds = median_seconds(lambda: forward_backward(problem, operator), device, repeats=repeats, warmup=2)
    if device.type != "cuda":
        return seconds, None
    problem.hidden_NH.grad = problem.weight_VH.grad = None
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    forward_backward(problem, operator)
    gradients = problem.hidden_NH.nbytes + problem.weight_VH.nbytes
    return seconds, (torch.cuda.max_memory_allocated(device) - before - gradients) / GIB


@torch.no_grad()
def matmul_seconds(problem: Problem, repeats: int) -> float:
    """Return the summed seconds of the three products that every implementation needs, each timed alone."""
    hidden_NH, weight_VH = problem.hidden_NH, problem.weight_VH
    logits_NV = hidden_NH @ weight_VH.t()  # also used as the logits' gradient below
    grad_hidden_NH, grad_weight_VH = torch.empty_like(hidden_NH), torch.empty_like(weight_VH)
    products = [
        lambda: torch.mm(hidden_NH, weight_VH.t(), out=logits_NV),
        lambda: torch.mm(logits_NV, weight_VH, out=grad_hidden_NH),
        lambda: torch.mm(logits_NV.t(), hidden_NH, out=grad_weight_VH),
    ]
    return sum(median_seconds(product, hidden_NH.device, repeats=repeats) for product in products)


if __name__ == "__main__":
    sys.exit(main())
