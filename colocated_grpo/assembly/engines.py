"""The engines of a run, in its own or in other processes, and their build parameters."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import torch

from colocated_grpo.phases import WeightSync
from colocated_grpo.policy.model_loader import engine_dtype
from colocated_grpo.rollout.engine import LocalEngine, RolloutEngine
from colocated_grpo.rollout.vllm.spec import SERVER_NUM_SEQS, EngineSpec, num_seqs_for
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.supervision import StopRequest
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.sources import AgentSourceConfig


@dataclass(frozen=True, kw_only=True)
class Site:
    """What every part of a run may need while it is built."""

    world: World
    stop: StopRequest
    note: Callable[[str], None]
    """Shows one line to the user."""
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
        needs_text=bool(config.rollout.stop) or has_senders or has_agents,
        structured=config.structured,
        records_routes=config.policy.routing_replay,
        numerics=config.numerics,
        args={"tokenizer": config.model.tokenizer, **engine.args} if config.model.tokenizer else engine.args,
    )
