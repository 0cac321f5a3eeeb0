"""The policy side of a run: the models on this rank, the engine beside them, and the sync between both."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from colocated_grpo.assembly.engines import Engines, engine_spec
from colocated_grpo.freshness import Judge, default_limit, make_judge
from colocated_grpo.phases import WeightSync
from colocated_grpo.policy.checkpoint_files import fetch_model
from colocated_grpo.policy.export import AdapterExport, Export, ModelExport
from colocated_grpo.policy.lora.weights import AdapterWeights
from colocated_grpo.policy.masters import ShardedWeights, adopt
from colocated_grpo.policy.model import host_copy
from colocated_grpo.policy.model_files import ModelFiles
from colocated_grpo.policy.model_loader import ModelLoader, dtype_of, engine_dtype
from colocated_grpo.policy.policy import Policy
from colocated_grpo.policy.reference import InitialAdapter, Reference, ReferenceModel
from colocated_grpo.rollout.engine import LocalEngine
from colocated_grpo.rollout.vllm.vllm_engine import VLLMEngine, prepare
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.turns import OpponentConfig
from colocated_grpo.weights.colocated import ColocatedSync
from colocated_grpo.weights.opponent import FrozenOpponent
from colocated_grpo.weights.shared import share


def build_reference(config: Config, model: ModelFiles, policy: Policy, world: World) -> Reference | None:
    """The frozen reference of the KL penalty; None without a penalty against it. Call before a checkpoint is restored.

    An adapter needs no second model: the policy's own weights are merged with the initial adapter for each scoring.
    """
    if config.loss.kl.coef == 0 or config.loss.kl.target != "reference":
        return None
    if isinstance(policy.weights, AdapterWeights):
        return InitialAdapter(policy.weights)
    loader = ModelLoader(config, model.hf_config, model.folder, world)
    return ReferenceModel(ShardedWeights(loader.model(offloaded=config.policy.cpu_offload)))


def fetch_opponent(config: Config, world: World) -> Path | None:
    """Return the folder of the opponent's weights; None without an opponent. Collective, downloads a Hub model."""
    if config.opponent_model is None:
        return None
    return fetch_model(config.opponent_model, world, "environments: opponent.name")


def read_opponent(config: Config, folder: Path | None, hf_config: PretrainedConfig, world: World) -> dict[str, DTensor]:
    """The frozen opponent's shards in host memory, by checkpoint name; empty without an opponent. Collective.

    folder: of `fetch_opponent`.
    """
    if folder is None:
        return {}
    on_gpu = world.device.type == "cuda"
    loader = ModelLoader(config, hf_config, folder, world)
    return host_copy(loader.model(offloaded=on_gpu), loader.dtype, pinned=on_gpu)


def opponent_state(config: Config, shards: Mapping[str, DTensor]) -> dict[str, DTensor]:
    """The opponent's shards for checkpoints, under names of their own; empty if they never change."""
    if config.opponent is None or not config.opponent.refresh_every:
        return {}
    return {f"opponent.{name}": weight for name, weight in shards.items()}


def build_colocated(config: Config, policy: Policy, model_folder: Path, world: World, resources: ExitStack) -> Engines:
    """Engines in the processes of the ranks. Collective. resources: close this rank's."""
    engine = resources.enter_context(closing(build_engine(config, policy, model_folder, world)))
    sync = build_sync(config, policy, engine, world)
    dtype = engine_dtype(config.engine, config.policy, world.device)
    return Engines(local=engine, engine=engine, sync=sync, dtype=dtype, is_quantized=engine.is_quantized)


def build_engine(config: Config, policy: Policy, model_folder: Path, world: World) -> VLLMEngine:
    """An engine beside the trainer's resident state, asleep. Collective."""
    if world.device.type == "cuda":
        # The cache is sized from free memory, so everything that stays must be allocated first.
        policy.init_optimizer_state()
        if policy.offload is not None:
            policy.offload.to_host()
    engine = VLLMEngine(engine_spec(config, model_folder, world), world)
    engine.sleep()
    if policy.offload is not None:
        policy.offload.to_device()
    return engine


def check_engine(config: Config, model: ModelFiles, world: World) -> None:
    """Raise ConfigError or RunError where this vLLM cannot be the engine in this process. Call before weights are read.

    Engine servers have checked their own.
    """
    if config.engine.placement == "colocated":
        prepare(engine_spec(config, model.folder, world), world.device)


def build_sync(config: Config, policy: Policy, engine: LocalEngine, world: World) -> WeightSync:
    """Return the sync from the policy into the engine. With `weights: shared` both use one copy from here on."""
    model = policy.model
    weights, check_every = policy.weights, config.freshness.every
    copies = ColocatedSync(
        weights.published(), engine, model.conversion, world, check_every=check_every, constants=model.hf_buffers()
    )
    if config.weights != "shared":
        return copies
    return share(copies, weights.published, partial(adopt, model), world, check_every)


def build_opponent(
    config: OpponentConfig | None,
    shards: Mapping[str, DTensor],
    policy: Policy,
    engines: Engines,
    world: World,
    check_every: int,
) -> FrozenOpponent | None:
    """shards: from `read_opponent`; a checkpoint may be restored into them later. check_every: as in ColocatedSync."""
    if config is None:
        return None
    engine, sync = engines.local, engines.sync
    assert engine is not None  # a rule of the config

    def restore_policy() -> None:
        policy.weights.publish()  # writes the engine's parameters under `weights: shared`
        sync.sync()  # writes them otherwise
        engine.weights_changed(policy.version)

    into_engine = ColocatedSync(shards, engine, policy.model.conversion, world, check_every=check_every)
    return FrozenOpponent(
        shards, policy.weights.published(), into_engine, engine.weights_changed, restore_policy, config.refresh_every
    )


def build_judge(config: Config, compute: torch.dtype, engines: Engines, world: World) -> Judge:
    """compute: type of the policy's activations."""
    limit = default_limit([compute, engines.dtype], quantized=engines.is_quantized)
    return make_judge(config.freshness, limit, config.rollout.temperature, (world.sum_, world.max_))


def build_exports(config: Config, policy: Policy, model: ModelFiles, world: World) -> list[Export]:
    """Exports of the run: its model; with an adapter, the adapter and, with export_merged, the merged model."""
    lora = config.policy.lora
    whole_model = ModelExport(
        policy=policy,
        hf_config=model.hf_config,
        tokenizer=model.tokenizer,
        source=model.folder,
        dtype=dtype_of(config.checkpoint.export_dtype, auto=policy.dtype),
        world=world,
    )
    if lora is None:
        return [whole_model]
    adapter = AdapterExport(policy=policy, lora=lora, base=config.model.name, tokenizer=model.tokenizer, world=world)
    return [adapter, whole_model] if config.checkpoint.export_merged else [adapter]
