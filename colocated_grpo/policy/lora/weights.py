"""Adapters of a model: the layers that get one by PEFT's rules, and their masters beside a frozen base.

The masters are the factors in float32, replicated on every rank. The model computes with merged weights, which the
weight sync copies to the engine like any other weights. Trainer and engine therefore use the same bytes. Device
memory, summed over all ranks: 2 bytes per parameter for the model, and 2 bytes per adapted parameter for the base
(bfloat16). A 4-bit base has 9/16 bytes per parameter of a linear layer, and is merged at each use. On each rank,
also 16 bytes per parameter of the factors (AdamW).
"""

import json
import math
import subprocess
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from colocated_grpo.errors import ConfigError
from colocated_grpo.policy.checkpoint_files import CheckpointReader
from colocated_grpo.policy.lora import nf4
from colocated_grpo.policy.lora.linear import ADAPTED, FACTORS, AdaptedLinear, merge, merged, product
from colocated_grpo.policy.masters import Weights, read_parameters
from colocated_grpo.policy.model import PackedLM, checkpoint_name, reshard, transformer_blocks
from colocated_grpo.runtime.distributed import Computed, derive_seed, first_row, local_part, with_rows
from colocated_grpo.settings.base import DEFAULT_INIT
from colocated_grpo.settings.training import ALL_LINEAR, LoRAConfig

FULL_MATCHES = """\
import json, re, sys
rule, *names = json.load(sys.stdin)
print(json.dumps([name for name in names if re.fullmatch(rule, name)]))
"""
"""Program that reads a regular expression and names, and prints the names that it matches."""
REGEX_SECONDS = 5.0


def insert_adapters(lm: PreTrainedModel, config: LoRAConfig) -> None:
    """Replace the targeted layers of `lm` by layers with adapters, in place.

    Parameters are on the meta device. Raises ConfigError if a target does not exist or is not a linear layer.
    """
    targets, in_4_bits = target_names(lm, config), config.base_dtype == "nf4"
    for name in _in_4_bits(lm) if in_4_bits else targets:
        parent, _, leaf = name.rpartition(".")
        rank = config.rank if name in targets else 0
        layer = AdaptedLinear(lm.get_submodule(name), rank, config.scale, in_4_bits=in_4_bits)
        setattr(lm.get_submodule(parent), leaf, layer)


def _in_4_bits(lm: PreTrainedModel) -> list[str]:
    """Return the names of all linear layers. Raises ConfigError if their weights cannot be stored in 4 bits."""
    names, parameters = list(linear_names(lm)), dict(lm.named_parameters())
    rule = "policy.lora.base_dtype=nf4: must be auto for this model"
    for name in names:
        if parameters[f"{name}.weight"].shape[1] % nf4.BLOCK:
            raise ConfigError(f"{rule}: {name} has rows whose length is no multiple of 64")
    for name, parameter in parameters.items():
        if _is_expert(name, parameter):
            raise ConfigError(f"{rule}: {name} is a fused expert, which stays in 16 bits")
    return names


def target_names(lm: PreTrainedModel, config: LoRAConfig) -> list[str]:
    """Return the names of the targeted layers, in the model's order. Raises ConfigError as `insert_adapters` does."""
    linear = list(linear_names(lm))
    everything = isinstance(config.target_modules, str) and config.target_modules.lower() == ALL_LINEAR
    wanted = linear if everything else config.target_modules
    selected = _selected("target_modules", wanted, lm) - _selected("exclude_modules", config.exclude_modules, lm)
    matched = [name for name, _ in lm.named_modules() if name in selected]
    known = f"linear layers of this model: {_kinds(linear)}"
    # A loaded adapter may also name absent layers.
    named = wanted if config.init == DEFAULT_INIT and isinstance(wanted, list) and not everything else []
    for one in named:
        if not _selected("target_modules", [one], lm):
            raise ConfigError(f"policy.lora.target_modules: no module is called {one!r}; {known}")
    if config.layers is not None:
        blocks = transformer_blocks(lm)
        chosen = {id(module) for index in config.layers for module in blocks[index].modules()}
        matched = [name for name in matched if id(lm.get_submodule(name)) in chosen]
    if not matched:
        rule = f"matches no layer; {known}; text is a regular expression for whole names"
        raise ConfigError(f"policy.lora.target_modules={config.target_modules!r}: {rule}")
    for name in matched:
        if name not in linear:
            kind = "the output layer" if lm.get_submodule(name) is lm.get_output_embeddings() else "no linear layer"
            limit = f"only linear layers inside the model can have an adapter: {_kinds(linear)}"
            raise ConfigError(f"policy.lora.target_modules={config.target_modules!r}: {name} is {kind}; {limit}")
    return matched


def _selected(setting: str, rule: str | Sequence[str] | None, lm: nn.Module) -> set[str]:
    """Return the names of the modules that a rule selects. Raises ConfigError if a regular expression takes too long.

    As in PEFT, text is a regular expression for whole names, and a list has names or last parts of names.
    """
    names = [name for name, _ in lm.named_modules() if name]
    if not isinstance(rule, str):
        return {name for name in names for one in rule or () if name == one or name.endswith(f".{one}")}
    command = [sys.executable, "-I", "-S", "-c", FULL_MATCHES]
    given = json.dumps([rule, *names]).encode()
    try:
        # In a process: a match may take years, and cannot be interrupted.
        found = subprocess.run(command, input=given, capture_output=True, check=True, timeout=REGEX_SECONDS)
    except subprocess.TimeoutExpired:
        limit = f"takes more than {REGEX_SECONDS:g} s to match the names of the modules"
        raise ConfigError(f"policy.lora.{setting}={rule!r}: {limit}; write it without nested repetitions") from None
    return set(json.loads(found.stdout))


def linear_names(lm: PreTrainedModel) -> Iterator[str]:
    """Yield the names of the layers that `all-linear` selects: every linear layer except the output layer."""
    head = lm.get_output_embeddings()
    for name, module in lm.named_modules():
        if type(module) in ADAPTED and module is not head:
            yield name


def _kinds(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))


Factors = tuple[Tensor, Tensor]
"""lora_A [R, I] and lora_B [O, R], float32."""
EXPERT_DIMENSIONS = 3
"""transformers stacks the weights of a block's experts in one tensor [experts, O, I]."""
PREFIX = "base_model.model."
"""PEFT's prefix of tensor names."""


class AdapterWeights(Weights):
    """Weights of a model with adapters, sharded by FSDP2 or on one rank."""

    def __init__(
        self, model: PackedLM, factors: Mapping[str, Tensor], device: torch.device, seed: int, *, base_on_host: bool
    ) -> None:
        """model: a model with adapters inserted, with the parameters of the base's checkpoint; the factors are on meta.

        factors: initial values by PEFT's names. If empty, the factors are initialized as in PEFT: A is uniform with
        variance 1 / (3 I) for I inputs, and B is zero. A is drawn from `seed` and the layer's name, so that it is equal
        on all ranks. base_on_host: keep the base in host memory, pinned if the device is a GPU.
        """
        self.model = model
        self._device = device
        self._layers = _layers(model)
        self._bases: dict[str, Tensor] = {}
        """This rank's rows of the bases in 16 bits."""
        for name, layer in self._layers.items():
            _initialize(layer, device, derive_seed(seed, "adapter", name))
            layer.key = torch.tensor(derive_seed(seed, "dither", name))
            if not layer.in_4_bits:
                self._bases[name] = _copy(local_part(layer.weight), on_host=base_on_host)
        self._masters = factors_of(model)
        if factors:
            with torch.no_grad():
                for name, master in self._masters.items():
                    master.copy_(factors[name])
        self.publish()

    def masters(self) -> dict[str, nn.Parameter]:
        """Return the factors under PEFT's names."""
        return self._masters

    def published(self) -> Computed:
        in_4_bits = {f"{name}.weight": layer for name, layer in self._layers.items() if layer.in_4_bits}
        packed = {name: layer.packed for name, layer in in_4_bits.items()}
        return Computed(self.model.hf_parameters(), packed, lambda names: [_merged_rows(in_4_bits[n]) for n in names])

    def reduce_gradients(self) -> None:
        """Sum the factors' gradients over ranks in one all-reduce."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        gradients = []
        for master in self._masters.values():
            if master.grad is None:  # no token of this rank has reached the layer; other ranks may have its gradient
                master.grad = torch.zeros_like(master)
            gradients.append(master.grad)
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        parts = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])

    def release(self) -> None:
        reshard(self.model)

    @torch.no_grad()
    def publish(self) -> None:
        """Merge the current factors into the model's weights. Weights in 4 bits are merged whenever they are used."""
        for name, base in self._bases.items():
            layer = self._layers[name]
            merge(local_part(layer.weight).data, base.to(self._device, non_blocking=True), *_own_rows(layer))

    @contextmanager
    def with_factors(self, factors: Mapping[str, Factors]) -> Generator[Weights]:
        """Compute with `factors`, by layer name, inside the context. Layers without an entry use the base weight."""
        own = {
            name: (layer.lora_A.detach().clone() if name in factors else layer.lora_A, layer.lora_B.detach().clone())
            for name, layer in self._layers.items()
        }
        self._set(factors)
        try:
            yield self
        finally:
            self._set(own)

    def nonzero_factors(self) -> dict[str, Factors]:
        """Return a copy of the factors of each layer whose adapter is not zero."""
        return {
            name: (layer.lora_A.detach().clone(), layer.lora_B.detach().clone())
            for name, layer in self._layers.items()
            if layer.lora_B.any()
        }

    @torch.no_grad()
    def _set(self, factors: Mapping[str, Factors]) -> None:
        for name, layer in self._layers.items():
            a, b = factors.get(name, (layer.lora_A, torch.zeros_like(layer.lora_B)))
            layer.lora_A.copy_(a)
            layer.lora_B.copy_(b)
        self.publish()


def _own_rows(layer: AdaptedLinear) -> tuple[Tensor, Tensor, float, Tensor, int]:
    """Return the arguments of `merge` after the base, for this rank's rows."""
    base = layer.base()
    left, right = product(layer.lora_A.detach(), layer.lora_B.detach(), layer.is_transposed)
    row = first_row(base)
    return left[row : row + len(local_part(base))], right, layer.scale, layer.key, row * right.shape[1]


def _merged_rows(layer: AdaptedLinear) -> Tensor:
    """Return this rank's rows of the merged weight of a 4-bit base."""
    rows = local_part(layer.packed.detach())
    return merged(rows, *_own_rows(layer), rows.new_empty(0, dtype=layer.compute_dtype))


@torch.no_grad()
def read_4_bits(model: PackedLM, folder: Path, device: torch.device) -> None:
    """Read the weights that are stored in 4 bits from the checkpoint in `folder`, one at a time."""
    reader = CheckpointReader(folder)
    for name, layer in _layers(model).items():
        if layer.in_4_bits:
            packed = local_part(layer.packed)
            rows = torch.empty(len(packed), nf4.weight_columns(packed), device=device)
            read_parameters(reader, {f"{name}.weight": with_rows(layer.packed, rows)}, model.lm.base_model_prefix)
            packed.copy_(nf4.pack(rows))


def _layers(model: PackedLM) -> dict[str, AdaptedLinear]:
    return {
        checkpoint_name(name): module for name, module in model.named_modules() if isinstance(module, AdaptedLinear)
    }


def adapted_layers(model: PackedLM) -> dict[str, AdaptedLinear]:
    """Return the layers with adapters by their names in the checkpoint, without '.weight'."""
    return {name: layer for name, layer in _layers(model).items() if layer.lora_A.requires_grad}


def factors_of(model: PackedLM) -> dict[str, nn.Parameter]:
    """Return the factors of all adapters under PEFT's names."""
    return {
        f"{PREFIX}{name}.{factor}.weight": layer.get_parameter(factor)
        for name, layer in adapted_layers(model).items()
        for factor in FACTORS
    }


def frozen_experts(model: PackedLM) -> int:
    """Return the number of parameters of fused experts, which are not linear layers and get no adapter."""
    return sum(p.numel() for name, p in model.hf_parameters().items() if _is_expert(name, p))


def _is_expert(name: str, parameter: Tensor) -> bool:
    return parameter.dim() == EXPERT_DIMENSIONS and ".experts." in name


def _initialize(layer: AdaptedLinear, device: torch.device, seed: int) -> None:
    a, b = layer.lora_A, layer.lora_B
    values = torch.empty(a.shape)
    if a.requires_grad:
        nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=torch.Generator().manual_seed(seed))
    layer.lora_A = nn.Parameter(values.to(device), requires_grad=a.requires_grad)
    layer.lora_B = nn.Parameter(torch.zeros(b.shape, device=device), requires_grad=b.requires_grad)


def _copy(weight: Tensor, *, on_host: bool) -> Tensor:
    device = "cpu" if on_host else weight.device
    return torch.empty_like(weight, device=device, pin_memory=on_host and weight.is_cuda).copy_(weight.detach())
