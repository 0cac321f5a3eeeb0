"""The policy side of a run: the models on this rank, the engine beside them, and the sync between both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from colocated_grpo.build.data import ModelFiles
from colocated_grpo.config.schema import Config
from colocated_grpo.config.turns import OpponentConfig
from colocated_grpo.freshness import FreshnessCheck
from colocated_grpo.phases import WeightSync
from colocated_grpo.policy.checkpoint_files import fetch_model
from colocated_grpo.policy.masters import ShardedWeights, UnshardedWeights
from colocated_grpo.policy.model import host_copy
from colocated_grpo.policy.policy import Policy, build_model, compute_dtype, dtype_of
from colocated_grpo.rollout.engine import RolloutEngine
from colocated_grpo.rollout.vllm.engine import VLLMEngine
from colocated_grpo.runtime.distributed import World
from colocated_grpo.weights.colocated import ColocatedSync
from colocated_grpo.weights.opponent import FrozenOpponent
from colocated_grpo.weights.shared import share


def build_reference(config: Config, model: ModelFiles, world: World) -> ShardedWeights | None:
    """The frozen reference model of the KL penalty; None without a penalty against it."""
    if config.loss.kl.coef == 0 or config.loss.kl.target != "reference":
        return None
    offloaded = config.policy.cpu_offload
    return ShardedWeights(build_model(config, model.hf_config, model.folder, world, offloaded=offloaded))


def read_opponent(config: Config, hf_config: PretrainedConfig, world: World) -> dict[str, DTensor]:
    """The frozen opponent's shards in host memory, by checkpoint name; empty without an opponent. Collective."""
    if config.opponent_model is None:
        return {}
    on_gpu = world.device.type == "cuda"
    folder = fetch_model(config.opponent_model, world)
    return host_copy(
        build_model(config, hf_config, folder, world, offloaded=on_gpu),
        compute_dtype(config, world.device),
        pinned=on_gpu,
    )


def opponent_state(config: OpponentConfig | None, shards: Mapping[str, DTensor]) -> dict[str, DTensor]:
    """The opponent's shards for checkpoints, under names of their own; empty if they never change."""
    if config is None or not config.refresh_every:
        return {}
    return {f"opponent.{name}": weight for name, weight in shards.items()}


def build_engine(config: Config, policy: Policy, model_folder: Path, world: World) -> VLLMEngine:
    """An engine beside the trainer's resident state, asleep. Collective."""
    if world.device.type == "cuda":
        # The cache is sized from free memory, so everything that stays must be allocated first.
        policy.init_optimizer_state()
        if policy.offload is not None:
            policy.offload.to_host()
    engine = VLLMEngine(config, model_folder, engine_dtype(config, policy), world)
    engine.sleep()
    if policy.offload is not None:
        policy.offload.to_device()
    return engine


def engine_dtype(config: Config, policy: Policy) -> torch.dtype:
    return dtype_of(config.engine.dtype, auto=policy.dtype)


def build_sync(policy: Policy, engine: RolloutEngine, world: World) -> WeightSync:
    """Return the sync from the policy into the engine. With `weights: shared` both use one copy from here on."""
    copies = copy_into(engine, policy.parameters(), world)
    return share(copies, policy.weights.adopt) if isinstance(policy.weights, UnshardedWeights) else copies


def copy_into(
    engine: RolloutEngine, parameters: Mapping[str, Tensor], world: World, *, planned: bool = True
) -> ColocatedSync:
    """Return a sync of these sharded parameters into the engine. planned: False always uses the engine's own loader."""
    return ColocatedSync(
        parameters, engine, lambda ok: all(world.gather_objects(ok)), device=world.device, planned=planned
    )


def build_opponent(
    config: OpponentConfig | None,
    shards: Mapping[str, DTensor],
    policy: Policy,
    engine: RolloutEngine,
    sync: WeightSync,
    world: World,
) -> FrozenOpponent | None:
    """shards: from `read_opponent`; a checkpoint may be restored into them later."""
    if config is None:
        return None

    def restore_policy() -> None:
        policy.weights.publish()  # writes the engine's parameters under `weights: shared`
        sync.sync()  # writes them otherwise
        engine.weights_changed(policy.version)

    into_engine = copy_into(engine, shards, world)
    return FrozenOpponent(
        shards, policy.parameters(), into_engine, engine.weights_changed, restore_policy, config.refresh_every
    )


def build_freshness(config: Config, policy: Policy, engine: RolloutEngine) -> FreshnessCheck:
    dtype, temperature = engine_dtype(config, policy), config.rollout.temperature
    return FreshnessCheck(policy, engine, dtype, config.freshness, temperature=temperature)
