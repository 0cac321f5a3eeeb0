"""A plan for an engine that has loaded a checkpoint, verified against the checkpoint's values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from colocated_grpo.policy.checkpoint_files import CheckpointReader
from colocated_grpo.policy.shards import read_from
from colocated_grpo.rollout.engine import LocalEngine
from colocated_grpo.runtime.text_part import OUTPUT_LAYER
from colocated_grpo.weights.plan import Plan, Target, build_plan


def verified_plan(engine: LocalEngine, shapes: Mapping[str, torch.Size], prefix: str, folder: Path) -> Plan | None:
    """Return a plan whose views hold, bit for bit, the values of the checkpoint in `folder`; None if there is none.

    shapes: by checkpoint name. prefix: the base model's, such as "model". The engine must have the folder's weights.
    """
    if engine.transforms_weights:
        return None
    plan = build_plan(engine.model, shapes, engine.tensor_parallel_rank)
    if plan is None:
        return None
    reader = CheckpointReader(folder)
    loaded = all(_is_loaded(plan.targets[name], name, shape, prefix, reader) for name, shape in shapes.items())
    return plan if loaded else None


def _is_loaded(target: Target, name: str, shape: torch.Size, prefix: str, reader: CheckpointReader) -> bool:
    whole = torch.empty(shape, dtype=target.view.dtype, device=target.view.device)
    read_from(reader, {name: whole}, prefix)
    part = whole.narrow(target.dim, target.start, target.view.shape[target.dim])
    return torch.equal(target.view, part)


def checkpoint_shapes(folder: Path, *, tied: bool) -> dict[str, torch.Size]:
    """Return the shapes of a checkpoint's tensors. tied: without the output layer, which repeats the embedding."""
    shapes = CheckpointReader(folder).shapes
    return {name: shape for name, shape in shapes.items() if not (tied and name == OUTPUT_LAYER)}
