"""Load a checkpoint onto this rank: for training all weights, some blocks or an adapter, or for scoring only."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from transformers import PretrainedConfig

from colocated_grpo.policy import linear_attention
from colocated_grpo.policy.attention import implementation_for
from colocated_grpo.policy.blocks import blocks_of
from colocated_grpo.policy.checkpoint_files import CheckpointReader
from colocated_grpo.policy.load_balancing import LoadBalancing
from colocated_grpo.policy.masters import ShardedWeights, UnshardedWeights, Weights, allocate
from colocated_grpo.policy.model import (
    PackedLM,
    build_empty,
    freeze,
    prepare_blocks,
    read_model_config,
    require_input_gradients,
    shard,
    transformer_blocks,
)
from colocated_grpo.policy.routing import RoutingReplay
from colocated_grpo.policy.shards import load_shards, read_from, read_parameters, stored_names
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.training import LoRAConfig


def dtype_of(setting: Literal["auto", "bfloat16", "float16", "float32"], *, auto: torch.dtype) -> torch.dtype:
    """Return the torch dtype of a setting. auto: the dtype for 'auto'."""
    return auto if setting == "auto" else getattr(torch, setting)


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Return the type of weights and activations in forward and backward passes."""
    return dtype_of(config.policy.compute_dtype, auto=torch.bfloat16 if device.type == "cuda" else torch.float32)


def engine_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Return the type of the engine's weights and computation."""
    return dtype_of(config.engine.dtype, auto=compute_dtype(config, device))


def check_model(config: Config, folder: Path) -> None:
    """Raise ConfigError if the model in `folder` cannot be built, or if a local checkpoint does not fit it.

    Allocates no parameters. folder: may lack the weights of a Hub model, which are not downloaded.
    """
    model = build_empty(
        read_model_config(config.model, folder),
        config.policy.logprob_chunk_tokens,
        trust_remote_code=config.model.trust_remote_code,
    )
    transformer_blocks(model.lm)
    if Path(config.model.name).is_dir():
        stored_names(CheckpointReader(folder), model.hf_parameters(), model.lm.base_model_prefix)


def build_weights(config: Config, hf_config: PretrainedConfig, folder: Path, world: World) -> Weights:
    """Load the checkpoint in `folder` for training. Collective."""
    if config.policy.lora is not None:
        return _build_adapter(config, config.policy.lora, hf_config, folder, world)
    model = _build_empty(config, hf_config, folder, world)
    if config.policy.train_layers is not None:
        freeze(model, compute_dtype(config, world.device), config.policy.train_layers)
    _prepare_blocks(config, model, world)
    if coefficient := config.policy.load_balancing:  # an adapter has none: it freezes the routers
        model.balancing = LoadBalancing(model, model.lm.config.model_type, coefficient, world.device)
    if _without_fsdp(config, world):
        return UnshardedWeights(model, folder, world.device, compute_dtype(config, world.device))
    _load_sharded(config, model, folder, world, offloaded=config.policy.cpu_offload)
    return ShardedWeights(model)


def build_model(
    config: Config, hf_config: PretrainedConfig, folder: Path, world: World, *, offloaded: bool
) -> PackedLM:
    """Load the checkpoint in `folder` with FSDP2. offloaded: keep it in host memory between uses. Collective."""
    model = _build_empty(config, hf_config, folder, world)
    _prepare_blocks(config, model, world)
    _load_sharded(config, model, folder, world, offloaded=offloaded)
    return model


def _build_adapter(
    config: Config, lora: LoRAConfig, hf_config: PretrainedConfig, folder: Path, world: World
) -> Weights:
    """Load the base with adapters. Raises ConfigError before allocating device memory if the adapter does not fit."""
    # Imported here: PEFT takes seconds to import, and only adapters need it.
    from colocated_grpo.policy.lora.files import read_factors
    from colocated_grpo.policy.lora.targets import insert_adapters
    from colocated_grpo.policy.lora.weights import AdapterWeights

    dtype = compute_dtype(config, world.device)
    model = _build_empty(config, hf_config, folder, world)
    freeze(model, dtype)
    insert_adapters(model.lm, transformer_blocks(model.lm), lora)
    factors = read_factors(lora, model)
    _prepare_blocks(config, model, world)
    if _without_fsdp(config, world):
        allocate(model, world.device, dtype)
        read_parameters(model.hf_parameters(), model.lm.base_model_prefix, folder)
    else:
        _load_sharded(config, model, folder, world, offloaded=False)
    return AdapterWeights(model, factors, world.device, config.seed, base_on_host=lora.base_on_host)


def _without_fsdp(config: Config, world: World) -> bool:
    """Return True if one rank trains without FSDP2, which would hold frozen weights twice: sharded and gathered."""
    partly_frozen = config.policy.lora is not None or config.policy.train_layers is not None
    return config.shares_weights is not None or (partly_frozen and world.size == 1 and not config.policy.cpu_offload)


def _build_empty(config: Config, hf_config: PretrainedConfig, folder: Path, world: World) -> PackedLM:
    """Build the model with its buffers, and with parameters without storage.

    Raises ConfigError, before device memory is allocated, if the checkpoint lacks tensors or has other shapes.
    """
    dtype = compute_dtype(config, world.device)
    model = build_empty(
        hf_config,
        config.policy.logprob_chunk_tokens,
        trust_remote_code=config.model.trust_remote_code,
        attention=implementation_for(
            hf_config,
            dtype,
            world.device,
            longest=config.max_sequence_tokens,
            context_parallel=config.policy.context_parallel,
        ),
    )
    if world.device.type == "cuda" and not model.shares_prefixes:
        linear_attention.kernel()  # raises before device memory is allocated
    reader, prefix = CheckpointReader(folder), model.lm.base_model_prefix
    stored_names(reader, model.hf_parameters(), prefix)
    read_from(reader, model.hf_buffers(), prefix)
    return model


def _prepare_blocks(config: Config, model: PackedLM, world: World) -> None:
    """Prepare the blocks for checkpointing, compilation and routing replay as configured."""
    policy = config.policy
    compiled = world.device.type == "cuda" if policy.compile == "auto" else policy.compile
    checkpointed = policy.gradient_checkpointing is True
    prepare_blocks(model, checkpointed=checkpointed, compiled=compiled)
    if policy.routing_replay:
        model.replay = RoutingReplay(blocks_of(model), model.lm.config, world.device)
    if compiled and policy.lora is not None and (policy.lora.layers is None or 0 in policy.lora.layers):
        require_input_gradients(model)


def _load_sharded(config: Config, model: PackedLM, folder: Path, world: World, *, offloaded: bool) -> None:
    shard(model, world.mesh, compute_dtype(config, world.device), offloaded=offloaded)
    load_shards(model, folder, world.device, offloaded=offloaded)
