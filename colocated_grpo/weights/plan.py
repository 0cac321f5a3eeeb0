"""Where each checkpoint tensor lives inside the engine: views into vLLM's fused, padded and tensor-parallel parameters.

A plan is derived from the engine's module tree and then proven: after a full `load_weights` every view must hold the
values that were loaded. A model that fails keeps loading through `load_weights`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


@dataclass(frozen=True, kw_only=True)
class Target:
    """Part of an engine parameter that one checkpoint tensor fills."""

    view: Tensor
    dim: int
    """Dimension along which this rank's tensor-parallel share is cut from the checkpoint tensor."""
    start: int
    """First row (dim 0) or column (dim 1) of that share."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    targets: dict[str, Target]
    padding: list[Tensor]
    """Rows that no checkpoint tensor fills (vocabulary padding); they are zeroed with every sync."""


def build_plan(model: nn.Module, shapes: Mapping[str, torch.Size], tensor_parallel_rank: int) -> Plan | None:
    """A plan for checkpoint tensors of these names and shapes, or None where the engine's layout is not understood."""
    parameters = dict(model.named_parameters())
    fused = _fused_names(model)
    targets: dict[str, Target] = {}
    for name, shape in shapes.items():
        target = _target(model, parameters, fused, name, tensor_parallel_rank)
        if target is None or not _fits(target, shape):
            return None
        targets[name] = target
    padding = list(_padding(model))
    covered = sum(target.view.numel() for target in targets.values()) + sum(rows.numel() for rows in padding)
    if covered != sum(parameter.numel() for parameter in parameters.values()):
        return None
    return Plan(targets=targets, padding=padding)


def _fused_names(model: nn.Module) -> dict[str, tuple[str, int]]:
    """Checkpoint module name -> (engine module name, position), for example k_proj -> (qkv_proj, 1)."""
    packed = getattr(model, "packed_modules_mapping", {})
    return {
        part: (whole, index) for whole, parts in packed.items() if len(parts) > 1 for index, part in enumerate(parts)
    }


def _target(
    model: nn.Module, parameters: Mapping[str, Tensor], fused: Mapping[str, tuple[str, int]], name: str, rank: int
) -> Target | None:
    path, _, leaf = name.rpartition(".")
    parent, _, module_name = path.rpartition(".")
    whole, position = fused.get(module_name, (module_name, None))
    engine_path = f"{parent}.{whole}" if parent else whole
    parameter = parameters.get(f"{engine_path}.{leaf}")
    if parameter is None:
        return None
    module = model.get_submodule(engine_path)
    if isinstance(module, QKVParallelLinear):
        return None if position is None else _qkv_target(module, parameter.data, "qkv"[position], rank)
    if isinstance(module, MergedColumnParallelLinear):
        return None if position is None else _merged_target(module, parameter.data, position, rank)
    if isinstance(module, VocabParallelEmbedding):
        start, end = module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index
        return Target(view=parameter.data[: end - start], dim=0, start=start)
    if isinstance(module, RowParallelLinear):
        if leaf != "weight":
            return Target(view=parameter.data, dim=0, start=0)
        return Target(view=parameter.data, dim=1, start=rank * parameter.shape[1])
    if position is not None:
        return None
    sharded = getattr(module, "tp_size", 1) > 1
    return Target(view=parameter.data, dim=0, start=rank * parameter.shape[0] if sharded else 0)


def _qkv_target(module: QKVParallelLinear, parameter: Tensor, part: str, rank: int) -> Target:
    offset, size = module._get_shard_offset_mapping(part), module._get_shard_size_mapping(part)
    # Key and value heads are copied to several ranks where there are fewer heads than ranks.
    source = rank if part == "q" else rank // module.num_kv_head_replicas
    return Target(view=parameter.narrow(0, offset, size), dim=0, start=source * size)


def _merged_target(module: MergedColumnParallelLinear, parameter: Tensor, position: int, rank: int) -> Target:
    sizes = [size // module.tp_size for size in module.output_sizes]
    view = parameter.narrow(0, sum(sizes[:position]), sizes[position])
    return Target(view=view, dim=0, start=rank * sizes[position])


def _fits(target: Target, shape: torch.Size) -> bool:
    """Whether the view has the checkpoint tensor's shape, except that it may be a share of `target.dim`."""
    if target.view.dim() != len(shape):
        return False
    return all(
        have == want if dim != target.dim else target.start + have <= want
        for dim, (have, want) in enumerate(zip(target.view.shape, shape, strict=True))
    )


def _padding(model: nn.Module) -> Iterable[Tensor]:
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and module.weight.data_ptr() not in seen:
            seen.add(module.weight.data_ptr())
            used = module.shard_indices.org_vocab_end_index - module.shard_indices.org_vocab_start_index
            if used < len(module.weight):
                yield module.weight.data[used:]
