"""Which weights the engine samples with: those of the policy, and for some turns those of a frozen opponent."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from colocated_grpo.config.schema import Config
from colocated_grpo.config.turns import OpponentConfig
from colocated_grpo.phases import WeightSync
from colocated_grpo.policy.checkpoint_files import fetch_model
from colocated_grpo.policy.masters import UnshardedWeights
from colocated_grpo.policy.model import host_copy
from colocated_grpo.policy.policy import Policy, build_model, compute_dtype
from colocated_grpo.rollout.vllm.engine import VLLMEngine
from colocated_grpo.runtime.distributed import World
from colocated_grpo.weights.colocated import ColocatedSync
from colocated_grpo.weights.opponent import Opponent
from colocated_grpo.weights.shared import share


def read_opponent(config: Config, hf_config: PretrainedConfig, world: World) -> dict[str, DTensor]:
    """The frozen opponent's shards in host memory; nothing where there is none. Collective."""
    if config.opponent_model is None:
        return {}
    on_gpu = world.device.type == "cuda"
    folder = fetch_model(config.opponent_model, world)
    return host_copy(
        build_model(config, hf_config, folder, world, offloaded=on_gpu),
        compute_dtype(config, world.device),
        pinned=on_gpu,
    )


def belongs_into_checkpoints(config: OpponentConfig | None, frozen: Mapping[str, DTensor]) -> dict[str, DTensor]:
    """Of an opponent that changes in the course of the run, its shards under names of their own."""
    if config is None or not config.refresh_every:
        return {}
    return {f"opponent.{name}": weight for name, weight in frozen.items()}


def build_opponent(
    config: OpponentConfig | None,
    frozen: Mapping[str, DTensor],
    policy: Policy,
    engine: VLLMEngine,
    sync: WeightSync,
    world: World,
) -> Opponent | None:
    """frozen: as `read_opponent` gave them, before a checkpoint was restored into them."""
    if config is None:
        return None

    def put_policy_back() -> None:
        policy.weights.publish()  # where policy and engine share their weights
        sync.sync()  # everywhere else
        engine.weights_changed(policy.version)

    into_engine = copy_into(engine, frozen, world)
    return Opponent(
        frozen, policy.parameters(), into_engine, engine.weights_changed, put_policy_back, config.refresh_every
    )


def build_sync(policy: Policy, engine: VLLMEngine, world: World) -> WeightSync:
    """How the policy's weights reach the engine. Where both are to be one, they are from here on."""
    copies = copy_into(engine, policy.parameters(), world)
    return share(copies, policy.weights.adopt) if isinstance(policy.weights, UnshardedWeights) else copies


def copy_into(
    engine: VLLMEngine, parameters: Mapping[str, Tensor], world: World, *, planned: bool = True
) -> ColocatedSync:
    """planned: False stays with the engine's own loader, as quantised engines need."""
    return ColocatedSync(
        parameters,
        engine.model,
        engine.tensor_parallel_rank,
        engine.load_weights,
        lambda ok: all(world.gather_objects(ok)),
        transformed=engine.transforms_weights or not planned,
        device=world.device,
    )
