"""The policy, its reference and the engines of a run, with the sync between them."""

from collections.abc import Mapping
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from colocated_grpo.errors import ConfigError
from colocated_grpo.freshness import Judge, default_limit, make_judge
from colocated_grpo.phases import WeightSync
from colocated_grpo.policy import activations, checkpoint_files
from colocated_grpo.policy.lora.weights import AdapterWeights
from colocated_grpo.policy.masters import Reference, ShardedWeights
from colocated_grpo.policy.model import host_copy
from colocated_grpo.policy.model_files import ModelFiles, read_model_files
from colocated_grpo.policy.model_loader import ModelLoader, engine_dtype
from colocated_grpo.policy.policy import Policy
from colocated_grpo.rollout.engine import LocalEngine, RolloutEngine
from colocated_grpo.rollout.vllm.spec import SERVER_NUM_SEQS, EngineSpec, num_seqs_for
from colocated_grpo.rollout.vllm.vllm_engine import VLLMEngine
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.supervision import StopRequest
from colocated_grpo.settings.losses import KLConfig
from colocated_grpo.settings.schema import Config, FreshnessConfig, ModelConfig, OpponentConfig
from colocated_grpo.settings.sources import AgentSourceConfig
from colocated_grpo.tracking.text import Note
from colocated_grpo.weights.colocated import ColocatedSync, FrozenOpponent, share


@dataclass(frozen=True, kw_only=True)
class Site:
    """What every part of a run may need while it is built."""

    world: World
    stop: StopRequest
    note: Note
    resources: ExitStack
    """Receives everything to close, also after a failure."""


@dataclass(frozen=True, kw_only=True)
class Engines:
    """One set of engines with the same weights."""

    engine: RolloutEngine
    """All engines that this rank uses, behind one interface."""
    local: LocalEngine | None
    """The engine in this process; None with engine servers."""
    sync: WeightSync
    dtype: torch.dtype
    """Type of the engines' weights."""
    is_quantized: bool
    """True if the weights or the KV cache of any engine have 8 bits or fewer."""


def engine_spec(
    config: Config, folder: Path, ranks: int, device: torch.device, sequences: int | None = None
) -> EngineSpec:
    """Return the build parameters of the engine on one of `ranks` ranks, for the model in `folder`.

    device: only its type counts. sequences: number that the engine receives at a time, used if engine.max_num_seqs is
    not set. None: the engine's part of a step's completions.
    """
    engine, has_senders = config.engine, config.atropos is not None
    has_agents = any(isinstance(source, AgentSourceConfig) for source in config.sources)
    if sequences is None:
        engines = 1 if config.rollout.generation == "replicated" else ranks // engine.tensor_parallel_size
        oversample = 1.0 if config.rollout.partial is None else config.rollout.partial.oversample
        groups = ceil(ceil(config.rollout.prompts_per_step / engines) * oversample)
        per_engine = groups * config.rollout.group_size  # groups are not split
        sequences = SERVER_NUM_SEQS if has_senders else per_engine
    return EngineSpec(
        folder=folder,
        dtype=engine_dtype(engine, config.policy, device),
        max_model_len=engine.max_model_len or config.max_sequence_tokens,
        max_num_seqs=engine.max_num_seqs or num_seqs_for(sequences),
        trust_remote_code=config.model.trust_remote_code,
        seed=config.seed,
        tensor_parallel_size=engine.tensor_parallel_size,
        kv_cache_memory_bytes=engine.kv_cache_memory_bytes,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        enforce_eager=engine.enforce_eager,
        sleep=engine.sleep,
        # The policy computes with the engine's weights, or some phases begin without a sync.
        keeps_weights=config.weights == "shared" or config.sync_frequency > 1,
        # Requests of agents and of other processes may have stop strings, regardless of rollout.stop.
        needs_tokenizer=bool(config.rollout.stop) or has_senders or has_agents or config.structured,
        records_routes=config.policy.routing_replay,
        numerics=config.numerics,
        args={"tokenizer": config.model.tokenizer, **engine.args} if config.model.tokenizer else engine.args,
    )


def build_reference(kl: KLConfig, policy: Policy, loader: ModelLoader, *, offloaded: bool) -> Reference | None:
    """Return the frozen reference of the KL penalty; None without such a penalty. Call before a checkpoint is restored.

    loader: loads the reference. offloaded: keep it in host memory between uses.
    """
    if not kl.has_reference:
        return None
    # For each scoring, the policy's own weights are merged with the initial adapter.
    if kl.model is None and isinstance(policy.weights, AdapterWeights):
        return partial(policy.weights.with_factors, policy.weights.nonzero_factors())
    model = loader.model(offloaded=offloaded)
    policy.model.shares_prefixes &= model.shares_prefixes  # both compute the same micro-batches
    return partial(nullcontext, ShardedWeights(model))


def read_reference(reference: ModelConfig | None, policy: ModelFiles, world: World) -> ModelFiles:
    """Return the files of the KL penalty's reference; without a model of its own, those of the policy. Collective."""
    if reference is None:
        return policy
    files = read_model_files(reference, world, key="loss.kl.model")
    check_same_vocabulary(reference.name, files.tokenizer, policy.tokenizer)
    return files


def check_same_vocabulary(name: str, reference: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError if two tokenizers differ in a token: the reference scores the policy's tokens."""
    if differing := reference.get_vocab().items() ^ policy.get_vocab().items():
        rule = f"its vocabulary differs from the policy's in {len(differing)} entries, such as {min(differing)}"
        raise ConfigError(f"loss.kl.model={name!r}: {rule}; choose a model with the same tokenizer")


def fetch_opponent(opponent: ModelConfig | None, world: World) -> Path | None:
    """Return the folder of the opponent's weights; None without an opponent. Collective, downloads a Hub model."""
    return None if opponent is None else checkpoint_files.fetch_model(opponent, world, "environments: opponent.name")


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
    """Build the engines in the ranks. Collective. resources: closes this rank's engine. Others: as in `build_sync`."""
    engine = resources.enter_context(closing(build_engine(spec, policy, world)))
    sync = build_sync(policy, engine, world, shared=shared, check_every=check_every)
    return Engines(local=engine, engine=engine, sync=sync, dtype=spec.dtype, is_quantized=engine.is_quantized)


def build_engine(spec: EngineSpec, policy: Policy, world: World) -> VLLMEngine:
    """Build an engine beside the trainer's resident state, and put it to sleep. Collective."""
    if world.device.type == "cuda":
        # The cache is sized from free memory, so everything that stays must be allocated first.
        policy.update.init_state()
        if policy.offload is not None:
            policy.offload.to_host()
    engine = VLLMEngine(spec, world)
    engine.sleep()
    if policy.offload is not None:
        policy.offload.to_device()
    return engine


def rehearse(config: Config, policy: Policy, engine: LocalEngine | None, world: World, note: Note) -> Config:
    """Return the config with the micro-batch size decided by trial steps. Collective. engine: asleep.

    If the memory suffices for engine and training at once, the engine never sleeps again, and training keeps CUDA
    graphs: small models spend most of a step on sleeping, waking and launching kernels.
    """
    fit = activations.choose_micro_batch_size(policy, activations.StepSettings.of(config), world)
    if fit.leaves_room(0 if engine is None else engine.asleep_bytes()):
        if engine is not None:
            engine.stay_awake()
            note("engine and training fit into device memory at once: the engine stays awake")
        # A shape's first step has no graph, also after a resume, and the two may round differently.
        if not config.deterministic and policy.use_graphs():
            note("small training steps run as CUDA graphs")
    return config.with_values("batch", max_tokens_per_micro_batch=fit.tokens)


def build_sync(policy: Policy, engine: LocalEngine, world: World, *, shared: bool, check_every: int) -> WeightSync:
    """Return the sync from the policy into the engine. shared: they use one copy of the weights.

    check_every: verify every n-th sync; 0: never.
    """
    model, weights = policy.model, policy.weights
    copies = ColocatedSync(
        weights.published(), engine, model.conversion, world, check_every=check_every, constants=model.hf_buffers()
    )
    return share(copies, weights) if shared else copies


def build_opponent(
    config: OpponentConfig | None,
    shards: Mapping[str, DTensor],
    policy: Policy,
    engines: Engines,
    world: World,
    check_every: int,
) -> FrozenOpponent | None:
    """Return the frozen opponent; None without a config.

    shards: of `read_opponent`; a checkpoint may be restored into these tensors later. check_every: of ColocatedSync.
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
    return FrozenOpponent(policy.weights.published(), into_engine, restore_policy, config.refresh_every)


def build_judge(config: FreshnessConfig, temperature: float, policy: Policy, engines: Engines, world: World) -> Judge:
    """temperature: temperature of training samples."""
    limit = default_limit([policy.dtype, engines.dtype], quantized=engines.is_quantized, exact=policy.is_exact)
    return make_judge(config, limit, temperature, (world.sum_, world.max_))
