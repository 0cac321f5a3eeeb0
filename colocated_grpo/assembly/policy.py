"""The policy side of a run: the models on this rank, the engine beside them, and the sync between both."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from colocated_grpo.assembly.engines import Engines
from colocated_grpo.freshness import Judge, default_limit, make_judge
from colocated_grpo.phases import WeightSync
from colocated_grpo.policy.activations import StepSettings, choose_micro_batch_size
from colocated_grpo.policy.checkpoint_files import fetch_model
from colocated_grpo.policy.export import AdapterExport, Export, ModelExport
from colocated_grpo.policy.lora.weights import AdapterWeights
from colocated_grpo.policy.masters import ShardedWeights, adopt
from colocated_grpo.policy.model import host_copy
from colocated_grpo.policy.model_files import ModelFiles
from colocated_grpo.policy.model_loader import ModelLoader, dtype_of
from colocated_grpo.policy.policy import Policy
from colocated_grpo.policy.reference import InitialAdapter, Reference, ReferenceModel
from colocated_grpo.rollout.engine import LocalEngine
from colocated_grpo.rollout.vllm.spec import EngineSpec
from colocated_grpo.rollout.vllm.vllm_engine import VLLMEngine
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.losses import KLConfig
from colocated_grpo.settings.schema import CheckpointConfig, Config, FreshnessConfig, ModelConfig, OpponentConfig
from colocated_grpo.settings.training import LoRAConfig
from colocated_grpo.weights.colocated import ColocatedSync, FrozenOpponent, share


def build_reference(kl: KLConfig, policy: Policy, loader: ModelLoader, *, offloaded: bool) -> Reference | None:
    """Return the frozen reference of the KL penalty; None without such a penalty. Call before a checkpoint is restored.

    An adapter needs no second model: the policy's own weights are merged with the initial adapter for each scoring.
    loader: loads the run's model. offloaded: keep the reference in host memory between uses.
    """
    if kl.coef == 0 or kl.target != "reference":
        return None
    if isinstance(policy.weights, AdapterWeights):
        return InitialAdapter(policy.weights)
    return ReferenceModel(ShardedWeights(loader.model(offloaded=offloaded)))


def fetch_opponent(opponent: ModelConfig | None, world: World) -> Path | None:
    """Return the folder of the opponent's weights; None without an opponent. Collective, downloads a Hub model."""
    return None if opponent is None else fetch_model(opponent, world, "environments: opponent.name")


def read_opponent(loader: ModelLoader | None, device: torch.device) -> dict[str, DTensor]:
    """Return a frozen opponent's shards in host memory, by checkpoint name; empty without a loader. Collective."""
    if loader is None:
        return {}
    on_gpu = device.type == "cuda"
    return host_copy(loader.model(offloaded=on_gpu), loader.dtype, pinned=on_gpu)


def opponent_state(opponent: OpponentConfig | None, shards: Mapping[str, DTensor]) -> dict[str, DTensor]:
    """Return the opponent's shards for checkpoints, under separate names; empty if the shards never change."""
    if opponent is None or not opponent.refresh_every:
        return {}
    return {f"opponent.{name}": weight for name, weight in shards.items()}


def build_colocated(
    spec: EngineSpec, policy: Policy, world: World, resources: ExitStack, *, shared: bool, check_every: int
) -> Engines:
    """Build the engines in the processes of the ranks. Collective.

    resources: closes this rank's engine. shared, check_every: as in `build_sync`.
    """
    engine = resources.enter_context(closing(build_engine(spec, policy, world)))
    sync = build_sync(policy, engine, world, shared=shared, check_every=check_every)
    return Engines(local=engine, engine=engine, sync=sync, dtype=spec.dtype, is_quantized=engine.is_quantized)


def build_engine(spec: EngineSpec, policy: Policy, world: World) -> VLLMEngine:
    """Build an engine beside the trainer's resident state, and put it to sleep. Collective."""
    if world.device.type == "cuda":
        # The cache is sized from free memory, so everything that stays must be allocated first.
        policy.init_optimizer_state()
        if policy.offload is not None:
            policy.offload.to_host()
    engine = VLLMEngine(spec, world)
    engine.sleep()
    if policy.offload is not None:
        policy.offload.to_device()
    return engine


def rehearse(
    config: Config, policy: Policy, engine: LocalEngine | None, world: World, note: Callable[[str], None]
) -> Config:
    """Return the config with the micro-batch size decided by trial steps. Collective. engine: asleep.

    If the memory suffices for engine and training at once, the engine never sleeps again, and training keeps CUDA
    graphs: small models spend most of a step on sleeping, waking and launching kernels.
    """
    fit = choose_micro_batch_size(policy, StepSettings.of(config), world)
    if fit.leaves_room(0 if engine is None else engine.asleep_bytes()):
        if engine is not None:
            engine.stay_awake()
            note("engine and training fit into device memory at once: the engine stays awake")
        # A shape's first step has no graph, also after a resume, and the two may round differently.
        if not config.deterministic and policy.use_graphs():
            note("small training steps run as CUDA graphs")
    return config.with_micro_batches(fit.tokens)


def build_sync(policy: Policy, engine: LocalEngine, world: World, *, shared: bool, check_every: int) -> WeightSync:
    """Return the sync from the policy into the engine.

    shared: for `weights: shared`; policy and engine then use one copy of the weights. check_every: verify every n-th
    sync; 0: never.
    """
    model, weights = policy.model, policy.weights
    copies = ColocatedSync(
        weights.published(), engine, model.conversion, world, check_every=check_every, constants=model.hf_buffers()
    )
    if not shared:
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
    """Return the frozen opponent; None without a config.

    shards: result of `read_opponent`; a checkpoint may be restored into these tensors later. check_every: as in
    ColocatedSync.
    """
    if config is None:
        return None
    engine, sync = engines.local, engines.sync
    assert engine is not None  # the config requires an engine in this process

    def restore_policy() -> None:
        policy.weights.publish()  # writes the engine's parameters under `weights: shared`
        sync.sync()  # writes them otherwise
        engine.weights_changed(policy.version)

    into_engine = ColocatedSync(shards, engine, policy.model.conversion, world, check_every=check_every)
    return FrozenOpponent(
        shards, policy.weights.published(), into_engine, engine.weights_changed, restore_policy, config.refresh_every
    )


def build_judge(
    freshness: FreshnessConfig, temperature: float, compute: torch.dtype, engines: Engines, world: World
) -> Judge:
    """temperature: temperature of training samples. compute: type of the policy's activations."""
    limit = default_limit([compute, engines.dtype], quantized=engines.is_quantized)
    return make_judge(freshness, limit, temperature, (world.sum_, world.max_))


def build_exports(
    checkpoint: CheckpointConfig, lora: LoRAConfig | None, base: str, policy: Policy, model: ModelFiles, world: World
) -> list[Export]:
    """Return the run's exports: its model, or the adapter and, with export_merged, the merged model.

    base: name of the model that an adapter belongs to.
    """
    whole_model = model_export(policy, model, dtype_of(checkpoint.export_dtype, auto=policy.dtype), world)
    if lora is None:
        return [whole_model]
    adapter = AdapterExport(policy=policy, lora=lora, base=base, tokenizer=model.tokenizer, world=world)
    return [adapter, whole_model] if checkpoint.export_merged else [adapter]


def model_export(policy: Policy, model: ModelFiles, dtype: torch.dtype, world: World) -> ModelExport:
    config, tokenizer = model.hf_config, model.tokenizer
    return ModelExport(
        policy=policy, hf_config=config, tokenizer=tokenizer, source=model.folder, dtype=dtype, world=world
    )
