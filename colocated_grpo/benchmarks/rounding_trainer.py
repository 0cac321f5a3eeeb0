"""One rank of the trainer with a chosen rounding to bfloat16, for the comparison of `rounding_learning`.

`python -m colocated_grpo.benchmarks.rounding_trainer ROUNDING SEED FILE STEPS [the trainer's arguments]`

The trainer has no such setting: its functions are replaced in this process alone.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from colocated_grpo.launch.cli import main as train
from colocated_grpo.metrics import Metrics
from colocated_grpo.policy.lora import merge
from colocated_grpo.policy.lora.weights import adapted_layers
from colocated_grpo.policy.masters import UnshardedWeights
from colocated_grpo.policy.policy import Policy
from colocated_grpo.runtime.distributed import derive_seed
from colocated_grpo.runtime.verdict import RUN_ERROR
from colocated_grpo.types import JsonObject

Tensors = dict[str, Tensor]
NEAREST, DITHER = ROUNDINGS = ("nearest", "dither")
dithered = merge.dithered
"""The trainer's own function, kept because `use_rounding` replaces the name in its module."""


def main(arguments: Sequence[str]) -> int:
    rounding, seed, file, steps, *rest = arguments
    use_rounding(rounding, int(seed))
    record_weights(Path(file), [int(step) for step in steps.split(",")])
    return train([*rest, "--seed", seed])


def use_rounding(rounding: str, seed: int) -> None:
    """Round both merged weights and the compute copy of full training as named. seed: of the dither of full training.

    Adapters round with a dither and full training to nearest unless their function is replaced.
    """
    if rounding == NEAREST:
        merge.dithered = lambda exact, key, first=0: exact.bfloat16()
    else:
        # pyrefly: ignore[bad-assignment]  (a method is replaced by a function)
        UnshardedWeights.publish = dithered_publish(seed)


def dithered_publish(seed: int) -> Callable[[UnshardedWeights], None]:
    """Return a replacement of `UnshardedWeights.publish` whose dither depends on the seed, the name and the index."""

    @torch.no_grad()
    def publish(weights: UnshardedWeights) -> None:
        masters = weights.masters()
        for name, parameter in weights.model.hf_parameters().items():
            if name in masters:
                parameter.data.copy_(dithered(masters[name].data, derive_seed(seed, "dither", name)))

    return publish


def record_weights(file: Path, steps: Sequence[int]) -> None:
    """Write to `file`, as JSON lines, what the compute copy has of the changes after these numbers of steps."""
    update = Policy.optimizer_step
    start: dict[str, tuple[Tensors, Tensors]] = {}

    def recorded(policy: Policy, metrics: Metrics) -> None:
        if not start:
            copies = {name: weight.clone() for name, weight in rounded(policy).items()}
            start["weights"] = copies, {name: value.clone() for name, value in exact(policy, copies).items()}
        update(policy, metrics)
        if policy.version in steps:
            copies, values = start["weights"]
            row = {"step": policy.version, **compare(copies, values, rounded(policy), exact(policy, copies))}
            with file.open("a") as lines:
                lines.write(json.dumps(row) + "\n")

    Policy.optimizer_step = recorded  # pyrefly: ignore[bad-assignment]  (a method is replaced by a function)


def rounded(policy: Policy) -> Tensors:
    """Return the weights that the model computes with: those with an adapter, or all trained ones."""
    layers = adapted_layers(policy.model)
    if layers:
        return {name: layer.get_parameter("weight").data for name, layer in layers.items()}
    return {name: p.data for name, p in policy.model.hf_parameters().items() if name in policy.parameters()}


def exact(policy: Policy, base: Tensors) -> Tensors:
    """Return the same weights in float32. base: the rounded ones before the first step, where adapters are zero."""
    layers = adapted_layers(policy.model)
    if not layers:
        return {name: master.data for name, master in policy.parameters().items()}
    values = {}
    for name, layer in layers.items():
        left, right = layer.product(layer.lora_A.data, layer.lora_B.data)
        values[name] = torch.addmm(base[name].float(), left, right, alpha=layer.scale)
    return values


def compare(copies: Tensors, values: Tensors, now: Tensors, exact_now: Tensors) -> JsonObject:
    """Compare rounded weights with exact ones after some steps. copies, values: of both before the first step.

    'moved': share of float32 weights that have changed. 'changed': the same of rounded ones. 'kept': share of the
    change that rounding kept, along its direction. 'error': of rounding, relative to the weights' norm.
    """
    before, after, exact_before, exact_after = (
        torch.cat([tensors[name].float().flatten() for name in copies]) for tensors in (copies, now, values, exact_now)
    )
    change = (exact_after - exact_before).double()
    return {
        "moved": (change != 0).double().mean().item(),
        "changed": (after != before).double().mean().item(),
        "kept": ((after - before).double().mul(change).sum() / change.square().sum()).item(),
        "mean_change": change.abs().mean().item(),
        "error": ((after - exact_after).norm() / exact_after.norm()).item(),
    }


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        code = RUN_ERROR
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as the trainer's own entry point: interpreter shutdown could block
