"""The place of each checkpoint tensor in the engine: a view into vLLM's fused, padded and tensor-parallel parameters.

A plan is derived from the engine's module tree and then verified by `ColocatedSync`: after a full `load_weights` every
view must hold the loaded values. A model that fails this check keeps loading through `load_weights`.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from vllm._custom_ops import scaled_fp8_quant
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from colocated_grpo.policy.checkpoint_files import CheckpointReader
from colocated_grpo.policy.masters import read_parameters
from colocated_grpo.rollout.engine import LocalEngine
from colocated_grpo.runtime.distributed import Computed, held, own_rows
from colocated_grpo.runtime.text_part import OUTPUT_LAYER

EXPERTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
"""Stacked experts [experts, rows, columns]: transformers' parameter -> vLLM's, if vLLM's kernel reads this layout."""
SCALE = "_scale"
"""Ending of the names of scales: of vLLM's parameters, and of planned tensors."""
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
SMALLEST_SCALE = 1 / (LARGEST * 512)
"""vLLM's scale of a row of zeros, and of a row of smaller values."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The part of an engine parameter that one checkpoint tensor fills."""

    view: Tensor
    dim: int
    """Dimension along which tensor parallelism splits the checkpoint tensor."""
    start: int
    """First row (dim 0) or column (dim 1) of this rank's part of the checkpoint tensor."""


class Place(NamedTuple):
    """A parameter in its module, and its address."""

    module: nn.Module
    name: str
    parameter: nn.Parameter
    address: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Targets of all checkpoint tensors. Together with the padding they cover every engine parameter once."""

    targets: dict[str, Target]
    """By checkpoint name."""
    padding: list[Tensor]
    """Rows without a checkpoint tensor (vocabulary padding). Each sync zeroes them."""
    places: list[Place]
    """Every parameter of the engine, as it was when the plan was made."""
    in_8_bits: frozenset[str] = frozenset()
    """Checkpoint tensors that the engine stores as fp8 values. Each has a second target, for a scale of each row."""

    def is_current(self) -> bool:
        """Return False if the engine's parameters are no longer the tensors that the views point into."""
        return all(
            module._parameters.get(name) is parameter and parameter.data_ptr() == address
            for module, name, parameter, address in self.places
        )


def build_plan(model: nn.Module, shapes: Mapping[str, torch.Size], tensor_parallel_rank: int) -> Plan | None:
    """Return the plan for checkpoint tensors of these names and shapes; None if the engine's layout is unknown."""
    parameters = dict(model.named_parameters())
    fused = _fused_names(model)
    targets: dict[str, Target] = {}
    pending = list(shapes.items())
    for name, shape in pending:  # grows by the scales of weights in 8 bits
        target = _target(model, parameters, fused, name, tensor_parallel_rank)
        if target is None or not _fits(target, shape):
            return None
        targets[name] = target
        if target.view.dtype == torch.int8:
            pending.append((name + SCALE, torch.Size((shape[0], 1))))
    padding = list(_padding(model))
    covered = sum(target.view.numel() for target in targets.values()) + sum(rows.numel() for rows in padding)
    if covered != sum(parameter.numel() for parameter in parameters.values()):
        return None
    places = [
        Place(module, name, parameter, parameter.data_ptr())
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
    ]
    in_8_bits = frozenset(name for name in shapes if targets[name].view.dtype == torch.int8)
    return Plan(targets=targets, padding=padding, places=places, in_8_bits=in_8_bits)


def _fused_names(model: nn.Module) -> dict[str, tuple[str, int]]:
    """Checkpoint module name -> (engine module name, position), for example k_proj -> (qkv_proj, 1)."""
    packed = cast("Mapping[str, Sequence[str]]", getattr(model, "packed_modules_mapping", {}))
    return {part: (whole, i) for whole, parts in packed.items() if len(parts) > 1 for i, part in enumerate(parts)}


def _target(
    model: nn.Module, parameters: Mapping[str, Tensor], fused: Mapping[str, tuple[str, int]], name: str, rank: int
) -> Target | None:
    path, _, leaf = name.rpartition(".")
    parent, _, module_name = path.rpartition(".")
    if module_name == "experts" and leaf in EXPERTS:
        stacked = parameters.get(f"{path}.routed_experts.{EXPERTS[leaf]}")
        return None if stacked is None else Target(view=stacked.data, dim=0, start=0)
    whole, position = fused.get(module_name, (module_name, None))
    engine_path = f"{parent}.{whole}" if parent else whole
    if (parameter := parameters.get(f"{engine_path}.{leaf}")) is None:
        return None
    module, stored = model.get_submodule(engine_path), _as_rows(parameter.data, leaf)
    if isinstance(module, QKVParallelLinear | MergedColumnParallelLinear):
        if position is None:  # fused in the checkpoint as well
            return Target(view=stored, dim=0, start=0) if module.tp_size == 1 else None
        if isinstance(module, QKVParallelLinear):
            return _qkv_target(module, stored, "qkv"[position], rank)
        return _merged_target(module, stored, position, rank)
    if isinstance(module, VocabParallelEmbedding):
        start, end = module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index
        return Target(view=stored[: end - start], dim=0, start=start)
    if isinstance(module, RowParallelLinear):
        if leaf != "weight":
            return Target(view=stored, dim=0, start=0)
        if stored.dtype == torch.int8 and module.tp_size > 1:
            return None  # each rank would have scales of its own columns
        return Target(view=stored, dim=1, start=rank * stored.shape[1])
    if position is not None:
        return None
    sharded = cast("int", getattr(module, "tp_size", 1)) > 1
    return Target(view=stored, dim=0, start=rank * stored.shape[0] if sharded else 0)


def _as_rows(stored: Tensor, leaf: str) -> Tensor:
    """Return a parameter in the checkpoint's layout. fp8 values, which vLLM transposes, and scales become integers."""
    if stored.dtype == FP8 and stored.dim() == 2:
        return stored.t().view(torch.int8)
    return stored.view(torch.int32) if leaf == f"weight{SCALE}" else stored


def _qkv_target(module: QKVParallelLinear, parameter: Tensor, part: str, rank: int) -> Target:
    offset, size = module._get_shard_offset_mapping(part), module._get_shard_size_mapping(part)
    assert offset is not None and size is not None  # None for parts other than q, k and v
    # With fewer key-value heads than ranks, each head is replicated on several ranks.
    source = rank if part == "q" else rank // module.num_kv_head_replicas
    return Target(view=parameter.narrow(0, offset, size), dim=0, start=source * size)


def _merged_target(module: MergedColumnParallelLinear, parameter: Tensor, position: int, rank: int) -> Target:
    sizes = [size // module.tp_size for size in module.output_sizes]
    view = parameter.narrow(0, sum(sizes[:position]), sizes[position])
    return Target(view=view, dim=0, start=rank * sizes[position])


def _fits(target: Target, shape: torch.Size) -> bool:
    """True if the view is contiguous and has the checkpoint tensor's shape, or a part of it along `target.dim`."""
    if target.view.dim() != len(shape) or not target.view.is_contiguous():
        return False
    return all(
        have == want if dim != target.dim else target.start + have <= want
        for dim, (have, want) in enumerate(zip(target.view.shape, shape, strict=True))
    )


def _padding(model: nn.Module) -> Iterable[Tensor]:
    """Yield the rows of vocabulary padding of each embedding. Tied embeddings are one tensor."""
    seen: set[int] = set()
    for module in model.modules():
        if not isinstance(module, VocabParallelEmbedding):
            continue
        weight = module.get_parameter("weight").data
        used = module.shard_indices.org_vocab_end_index - module.shard_indices.org_vocab_start_index
        if weight.data_ptr() not in seen and used < len(weight):
            seen.add(weight.data_ptr())
            yield weight[used:]


def verified_plan(engine: LocalEngine, shapes: Mapping[str, torch.Size], prefix: str, folder: Path) -> Plan | None:
    """Return a plan whose views hold, bit for bit, the values of the checkpoint in `folder`; None if not found.

    shapes: shapes by checkpoint name. prefix: prefix of the base model's names, such as "model". The engine must have
    the folder's weights.
    """
    if engine.transforms_weights:
        return None
    plan = build_plan(engine.model, shapes, engine.tensor_parallel_rank)
    if plan is None or plan.in_8_bits:  # the checkpoint has other bits
        return None
    reader = CheckpointReader(folder)
    loaded = all(_is_loaded(plan.targets[name], name, shape, prefix, reader) for name, shape in shapes.items())
    return plan if loaded else None


def _is_loaded(target: Target, name: str, shape: torch.Size, prefix: str, reader: CheckpointReader) -> bool:
    whole = torch.empty(shape, dtype=target.view.dtype, device=target.view.device)
    read_parameters(reader, {name: whole}, prefix)
    part = whole.narrow(target.dim, target.start, target.view.shape[target.dim])
    return torch.equal(target.view, part)


def checkpoint_shapes(folder: Path, *, tied: bool) -> dict[str, torch.Size]:
    """Return the shapes of a checkpoint's tensors. tied: leave out the output layer, which repeats the embedding."""
    shapes = CheckpointReader(folder).shapes
    return {name: shape for name, shape in shapes.items() if not (tied and name == OUTPUT_LAYER)}


def in_8_bits(
    parameters: Mapping[str, Tensor], names: Collection[str], dtype: torch.dtype, device: torch.device
) -> Computed:
    """Return the parameters as the engine stores them: those in `names` as fp8 values and, under name + SCALE, scales.

    Both are integers, which no sync casts. Each access to values computes them on `device`, together with their scales,
    which can be read once, in the same call or later. dtype: the engine's, to which weights are rounded first.
    """
    unread: dict[str, Tensor] = {}

    @torch.no_grad()
    def compute(wanted: Sequence[str]) -> list[Tensor]:
        weights = [name for name in wanted if name in names]
        groups: dict[int, dict[str, Tensor]] = defaultdict(dict)
        for name, rows in zip(weights, own_rows(parameters, weights), strict=True):
            groups[rows.shape[1]][name] = rows
        # One kernel for all rows of one length: launches and allocations for each weight take the host longer.
        for columns, group in groups.items():
            counts = [len(rows) for rows in group.values()]
            weights_RC = torch.empty(sum(counts), columns, dtype=dtype, device=device)
            torch._foreach_copy_(weights_RC.split(counts), list(group.values()))
            values_RC, scales_R1 = quantized(weights_RC)
            unread.update(zip(group, values_RC.split(counts), strict=True))
            unread.update(zip([name + SCALE for name in group], scales_R1.split(counts), strict=True))
        return [unread.pop(name) for name in wanted]

    sharded_as = {**held(parameters), **parameters.sharded_as} if isinstance(parameters, Computed) else parameters
    others = {name: parameters[name] for name in parameters if name not in names}
    weights = {name: sharded_as[name] for name in parameters if name in names}  # in the same order on all ranks
    return Computed(others, weights | {name + SCALE: weight for name, weight in weights.items()}, compute)


def quantized(weight_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp8 values as int8 [R, C], and float32 scales as int32 [R, 1], with the bits that vLLM's loader writes."""
    if weight_RC.is_cuda:
        values_RC, scales_R1 = scaled_fp8_quant(weight_RC, use_per_token_if_dynamic=True)
    else:
        scales_R1 = (weight_RC.abs().amax(1, keepdim=True).float() / LARGEST).clamp_min(SMALLEST_SCALE)
        values_RC = (weight_RC / scales_R1).clamp(-LARGEST, LARGEST).to(FP8)
    return values_RC.view(torch.int8), scales_R1.view(torch.int32)
