"""Load a checkpoint onto this rank: for training all weights, some blocks or an adapter, or for scoring only."""

from pathlib import Path
from typing import Literal

import torch
from transformers import PretrainedConfig

from colocated_grpo.policy import linear_attention, masters
from colocated_grpo.policy import model as models
from colocated_grpo.policy.attention import implementation_for
from colocated_grpo.policy.blocks import blocks_of
from colocated_grpo.policy.checkpoint_files import CheckpointReader
from colocated_grpo.policy.routing import LoadBalancing, RoutingReplay
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.generation import EngineConfig, ModelConfig
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.training import LoRAConfig, PolicyConfig

DtypeName = Literal["auto", "bfloat16", "float16", "float32"]


def dtype_of(setting: DtypeName, *, auto: torch.dtype) -> torch.dtype:
    """Return the torch dtype of a setting. auto: the dtype for 'auto'."""
    return auto if setting == "auto" else getattr(torch, setting)


def compute_dtype(setting: DtypeName, device: torch.device) -> torch.dtype:
    """Return the type of weights and activations in forward and backward passes. setting: policy.compute_dtype."""
    return dtype_of(setting, auto=torch.bfloat16 if device.type == "cuda" else torch.float32)


def engine_dtype(engine: EngineConfig, policy: PolicyConfig, device: torch.device) -> torch.dtype:
    """Return the type of the engine's weights and computation."""
    return dtype_of(engine.dtype, auto=compute_dtype(policy.compute_dtype, device))


def check_model(settings: ModelConfig, folder: Path) -> models.PackedLM:
    """Return the model in `folder`. Its parameters have no storage.

    folder: may lack the weights of a Hub model, which are not downloaded. Raises ConfigError if the model cannot be
    built, or if a local checkpoint does not fit it.
    """
    hf_config = models.read_model_config(settings, folder)
    model = models.build_empty(hf_config, chunk_tokens=1, trust_remote_code=settings.trust_remote_code)
    models.transformer_blocks(model.lm)
    if Path(settings.name).is_dir():
        masters.stored_names(CheckpointReader(folder), model.hf_parameters(), model.lm.base_model_prefix)
    return model


class ModelLoader:
    """Loads the checkpoint in a folder as a run trains or scores it. Collective."""

    def __init__(self, config: Config, hf_config: PretrainedConfig, folder: Path, world: World) -> None:
        self._config, self._policy = config, config.policy
        self._hf_config, self._folder, self._world = hf_config, folder, world
        self.dtype = compute_dtype(config.policy.compute_dtype, world.device)
        # One rank has nothing to gather or to reduce, and FSDP2 would hold frozen weights twice.
        self._without_fsdp = world.size == 1 and not config.policy.cpu_offload

    def weights(self) -> masters.Weights:
        """Return the weights that the run trains."""
        policy = self._policy
        if policy.lora is not None:
            return self._adapter(policy.lora)
        model = self._empty()
        if policy.train_layers is not None:
            models.freeze(model, self.dtype, policy.train_layers)
        self._prepare_blocks(model, replays=policy.routing_replay)
        if coefficient := policy.load_balancing:  # not with an adapter, which freezes the routers
            model.balancing = LoadBalancing(model, model.lm.config.model_type, coefficient, self._world.device)
        if self._without_fsdp:
            return masters.UnshardedWeights(model, self._folder, self._world.device, self.dtype)
        self._load_sharded(model, offloaded=policy.cpu_offload)
        return masters.ShardedWeights(model)

    def model(self, *, offloaded: bool) -> models.PackedLM:
        """Return a frozen model with FSDP2, in the compute type. offloaded: keep it in host memory between uses."""
        model = self._empty()
        models.freeze(model, self.dtype)
        self._prepare_blocks(model, replays=False)
        self._load_sharded(model, offloaded=offloaded)
        return model

    def _adapter(self, lora: LoRAConfig) -> masters.Weights:
        """Load the base with adapters. Raises ConfigError before it allocates device memory if adapters do not fit."""
        # Imported here: PEFT takes seconds to import, and only adapters need it.
        from colocated_grpo.policy.lora.files import read_factors
        from colocated_grpo.policy.lora.weights import AdapterWeights, insert_adapters, read_4_bits

        device, model = self._world.device, self._empty()
        models.freeze(model, self.dtype)
        insert_adapters(model.lm, lora)
        factors = read_factors(lora, model)
        self._prepare_blocks(model, replays=self._policy.routing_replay)
        if self._without_fsdp:
            masters.allocate(model, device)
            reader, prefix = CheckpointReader(self._folder), model.lm.base_model_prefix
            masters.read_parameters(reader, model.hf_parameters(), prefix)
        else:
            self._load_sharded(model, offloaded=False)
        read_4_bits(model, self._folder, device)
        return AdapterWeights(model, factors, device, self._config.seed, base_on_host=lora.base_on_host)

    def _empty(self) -> models.PackedLM:
        """Build the model with its buffers. The parameters have no storage.

        Raises ConfigError, before device memory is allocated, if the checkpoint lacks tensors or has other shapes.
        """
        policy, device = self._policy, self._world.device
        longest, ranks = self._config.max_sequence_tokens, policy.context_parallel
        model = models.build_empty(
            self._hf_config,
            policy.logprob_chunk_tokens,
            trust_remote_code=self._config.model.trust_remote_code,
            attention=implementation_for(self._hf_config, self.dtype, device, longest=longest, context_parallel=ranks),
        )
        if device.type == "cuda" and not model.shares_prefixes:
            linear_attention.kernel()  # raises before device memory is allocated
        reader, prefix = CheckpointReader(self._folder), model.lm.base_model_prefix
        masters.stored_names(reader, model.hf_parameters(), prefix)
        masters.read_parameters(reader, model.hf_buffers(), prefix)
        return model

    def _prepare_blocks(self, model: models.PackedLM, *, replays: bool) -> None:
        """Prepare the blocks for checkpointing and compilation as configured. replays: also for routing replay."""
        policy, device = self._policy, self._world.device
        compiled = device.type == "cuda" if policy.compile == "auto" else policy.compile
        if self._config.numerics == "exact":
            # Imported here: other runs do not need it.
            from colocated_grpo.policy.exact import use_exact_operators

            use_exact_operators(model)
            compiled = False  # the compiler would fuse operators, and skip the rounding between them
        models.prepare_blocks(model, checkpointed=policy.gradient_checkpointing is True, compiled=compiled)
        if replays:
            model.replay = RoutingReplay(blocks_of(model), model.lm.config, device)
        if compiled and policy.lora is not None and (policy.lora.layers is None or 0 in policy.lora.layers):
            models.require_input_gradients(model)

    def _load_sharded(self, model: models.PackedLM, *, offloaded: bool) -> None:
        models.shard(model, self._world.mesh, self.dtype, offloaded=offloaded)
        masters.load_shards(model, self._folder, self._world.device, offloaded=offloaded)
