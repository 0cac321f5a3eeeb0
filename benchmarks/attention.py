"""Attention of packed sequences, forward and backward: `python -m benchmarks.attention`.

Times every kernel that this device supports, at each sequence length, beside a floor: the FLOP of causal attention
divided by the measured matmul rate. Times are device seconds, because training queues its work far ahead of the device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from benchmarks.harness import main_here
from benchmarks.kernels import busy_seconds, kernel_rows
from benchmarks.roofline import Roofline
from colocated_grpo.policy.attention_kernels import Attend, Runs, attend_fa4, attend_padded, attend_varlen, has_fa4
from colocated_grpo.types import JsonObject


class Problem(NamedTuple):
    """Packed sequences under causal self-attention: T tokens, H query heads, K key-value heads, D head size."""

    query_THD: Tensor
    key_TKD: Tensor
    value_TKD: Tensor
    grad_THD: Tensor
    runs: Runs

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query_THD, self.key_TKD, self.value_TKD


def main(arguments: Sequence[str] | None = None) -> int:
    return main_here("attention", arguments, parser(), measure_lengths)


def measure_lengths(options: argparse.Namespace, device: torch.device, roofline: Roofline) -> JsonObject:
    rows = []
    for length in options.lengths:
        problem = make_problem(options, length, device)
        floors = [roofline.seconds_for_flops(products * product_flops(problem)) for products in (2, 5)]
        floor = dict(zip(("forward_floor_seconds", "backward_floor_seconds"), floors, strict=True))
        rows += [
            {"length": length, "kernel": name, **measure(problem, attend, options.repeats), **floor}
            for name, attend in kernels_for(problem).items()
        ]
    sizes = {name: getattr(options, name) for name in ("tokens", "heads", "kv_heads", "head_size")}
    return {**sizes, "rows": rows}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=24576, help="tokens of a micro-batch")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 64, 96, 128, 192, 256, 512, 2048, 8192])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path, help="result file to write")
    return parser


class KernelSeconds(TypedDict):
    """Device seconds of one call of a kernel."""

    forward_seconds: float
    backward_seconds: float


def make_problem(options: argparse.Namespace, length: int, device: torch.device) -> Problem:
    """Return sequences of one length in the training dtype: bf16 on CUDA, fp32 on CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    count = max(1, options.tokens // length)
    torch.manual_seed(0)
    heads = [options.heads, options.kv_heads, options.kv_heads, options.heads]
    query, key, value, grad = (
        torch.randn(count * length, number, options.head_size, device=device, dtype=dtype) for number in heads
    )
    cu = torch.arange(count + 1, dtype=torch.int32, device=device) * length
    for tensor in (query, key, value):
        tensor.requires_grad_()
    return Problem(query, key, value, grad, Runs(cu, cu, length, length))


def kernels_for(problem: Problem) -> dict[str, Attend]:
    """Return the attention kernels that run on the problem's device, by name."""
    query = problem.query_THD
    if not query.is_cuda:
        return {"padded": attend_padded}
    usable = has_fa4(query.shape[1], problem.key_TKD.shape[1], query.shape[2], query.dtype, query.device)
    kernels: dict[str, Attend] = {"varlen": attend_varlen}
    if usable:
        kernels["fa4"] = partial(attend_fa4, min_run=0)  # on short runs as well
    return kernels


def product_flops(problem: Problem) -> float:
    """Return the FLOP of one matrix product over the causal attention scores, below the diagonal only.

    The forward pass takes two such products, the backward pass five.
    """
    tokens, heads, size = problem.query_THD.shape
    return 2 * tokens * heads * size * (problem.runs.longest_q + 1) / 2


def measure(problem: Problem, attend: Attend, repeats: int) -> KernelSeconds:
    """Time the forward and the backward pass of one kernel."""
    forward = partial(attend, *problem.inputs, problem.runs, None, None)
    backward = partial(torch.autograd.grad, forward(), problem.inputs, problem.grad_THD, retain_graph=True)
    device = problem.query_THD.device
    return {
        "forward_seconds": device_seconds(forward, device, repeats),
        "backward_seconds": device_seconds(backward, device, repeats),
    }


def device_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the device seconds of one call of `work`, without the gaps between its kernels."""

    def all_repeats() -> None:
        for _ in range(repeats):
            work()

    work()
    return busy_seconds(kernel_rows(all_repeats, device)) / repeats


if __name__ == "__main__":
    sys.exit(main())
