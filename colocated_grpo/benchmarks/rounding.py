"""How much of an adapter survives its merge into bfloat16 weights: `python -m colocated_grpo.benchmarks.rounding`.

Simulates adapters after few optimizer steps, merges them into a random base by rounding to nearest and with a dither,
and compares both with the base plus the adapter in float32. No model and no engine are needed.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from colocated_grpo.benchmarks.harness import main_here
from colocated_grpo.benchmarks.roofline import Roofline
from colocated_grpo.policy.lora.merge import merge
from colocated_grpo.types import JsonObject

BASE_STD = 0.02
KEY = 1
"""Selects the random numbers of the dither."""


def main(arguments: Sequence[str] | None = None) -> int:
    return main_here("rounding", arguments, parser(), measure)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048, help="outputs of the layer")
    parser.add_argument("--columns", type=int, default=2048, help="inputs of the layer")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--alpha", type=float, default=32.0)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-5, 1e-4])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 10, 100], help="optimizer steps before a merge")
    parser.add_argument("--noise", type=float, default=1.0, help="of the gradients, relative to their constant part")
    parser.add_argument("--tokens", type=int, default=256, help="inputs whose outputs are compared")
    parser.add_argument("--json", type=Path, help="result file to write")
    return parser


def measure(options: argparse.Namespace, device: torch.device, _roofline: Roofline) -> JsonObject:
    torch.manual_seed(0)
    base = (torch.randn(options.rows, options.columns, device=device) * BASE_STD).bfloat16()
    x_TI = torch.randn(options.tokens, options.columns, device=device).bfloat16().float()
    scale = options.alpha / options.rank
    rows = []
    for lr in options.lr:
        for step, left, right in trained(options, lr, device):
            change = left @ right * scale
            for rounding, weight in {
                "nearest": nearest(base, left, right, scale),
                "dither": merged(base, left, right, scale, KEY),
            }.items():
                rows.append({"lr": lr, "steps": step, "rounding": rounding, **compare(base, change, weight, x_TI)})
    sizes = {name: getattr(options, name) for name in ("rows", "columns", "rank", "alpha", "noise", "tokens")}
    return {"sizes": sizes, "rows": rows}


def trained(options: argparse.Namespace, lr: float, device: torch.device) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield step, B [rows, rank] and A [rank, columns] after each number of Adam steps in --steps.

    The gradients are those of a loss that is linear in the weight, which moves both factors steadily, plus noise.
    """
    torch.manual_seed(1)
    slope = torch.randn(options.rows, options.columns, device=device)
    right = nn.Parameter(torch.empty(options.rank, options.columns, device=device))
    nn.init.kaiming_uniform_(right, a=math.sqrt(5))  # as in PEFT
    left = nn.Parameter(torch.zeros(options.rows, options.rank, device=device))
    optimizer = torch.optim.Adam([left, right], lr=lr)
    for step in range(1, max(options.steps) + 1):
        with torch.no_grad():
            left.grad = noisy(slope @ right.T, options.noise)
            right.grad = noisy(left.T @ slope, options.noise)
        optimizer.step()
        if step in options.steps:
            yield step, left.detach(), right.detach()


def noisy(gradient: Tensor, noise: float) -> Tensor:
    """Add noise whose standard deviation is `noise` times the root mean square of the gradient."""
    return gradient + noise * gradient.square().mean().sqrt() * torch.randn_like(gradient)


def nearest(base: Tensor, left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return base + scale * left @ right, rounded to the nearest bfloat16."""
    return torch.addmm(base.float(), left, right, alpha=scale).bfloat16()


def merged(base: Tensor, left: Tensor, right: Tensor, scale: float, key: int) -> Tensor:
    """Return base + scale * left @ right, rounded to bfloat16 with the trainer's dither that `key` selects."""
    weight = torch.empty_like(base)
    merge(weight, base, left, right, scale, key)
    return weight


def compare(base: Tensor, change: Tensor, weight: Tensor, x_TI: Tensor) -> dict[str, float]:
    """Return the share of the adapter that is kept, and relative distances between outputs.

    change: the adapter's product in float32. weight: the merged weight. Outputs are relative to those of base + change:
    'merged_distance' of the merged weight, 'adapter_distance' of the base alone, and 'activation_distance' of the same
    outputs rounded to bfloat16, which every layer does to its activations.
    """
    kept = (weight.double() - base.double()).mul(change).sum() / change.double().square().sum()
    outputs = x_TI @ (base.float() + change).T
    size = outputs.norm()
    return {
        "kept": kept.item(),
        "merged_distance": ((x_TI @ weight.float().T - outputs).norm() / size).item(),
        "adapter_distance": ((x_TI @ base.float().T - outputs).norm() / size).item(),
        "activation_distance": ((outputs.bfloat16().float() - outputs).norm() / size).item(),
    }


if __name__ == "__main__":
    sys.exit(main())
