"""Memory and disk space of a run by arithmetic, in bytes, from the sizes of its model and its settings.

With AdamW and bfloat16, per parameter over all ranks: full training 16 (master, gradient, two moments in float32), an
adapter 4 (base and merged weights), and on each engine 2 while it generates. Activations are those of the smallest
possible micro-batch with every block recomputed: what does not fit by this arithmetic does not fit at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from colocated_grpo.settings.lora import LoRAConfig
from colocated_grpo.settings.model_sizes import DTYPE_BYTES, ENGINE_RESERVE, Sizes
from colocated_grpo.settings.schema import Config

MASTER = GRADIENT = 4
OPTIMIZER_STATE = {"adamw": 8, "adamw_8bit": 2, "adafactor": 0}
"""Optimizer -> bytes of state per trained parameter."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a run's ranks are."""

    ranks: int
    on_gpu: bool
    device_bytes: int
    """Memory of one GPU; of the whole machine on the CPU."""
    nodes: int = 1

    def shards(self, config: Config) -> int:
        """Return the number of ranks that together hold the model."""
        return self.ranks // self.nodes if config.policy.replicate == "nodes" else self.ranks


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of one rank."""

    training: int
    """On its device, while the policy trains."""
    generating: int
    """On its device, while the engine generates."""
    host: int
    """In host memory, beside what is on the device."""

    @property
    def device(self) -> int:
        return max(self.training, self.generating)


def footprint(config: Config, sizes: Sizes, place: Placement) -> Footprint:
    trained, adapter = trained_parameters(config, sizes), adapter_parameters(config.policy.lora, sizes)
    compute, ranks = compute_bytes(config, place), place.shards(config)
    state = OPTIMIZER_STATE[config.policy.optimizer.type]
    frozen = compute * (sizes.total - trained)
    base = compute * adapted_parameters(config.policy.lora, sizes)
    reference = MASTER * sizes.total if _has_reference(config) else 0
    # Sharded, and what every rank has of an adapter.
    weights = (MASTER * trained + frozen + reference) // ranks + MASTER * adapter
    gradients = GRADIENT * (trained // ranks + adapter)
    moments = state * (trained // ranks + adapter)
    host = 0
    resident = weights + moments
    if config.policy.cpu_offload:
        host, resident, gradients = resident + gradients, 0, 0
    if config.policy.lora is not None and config.policy.lora.base_on_host:
        host += base // ranks
    else:
        resident += base // ranks
    if config.opponent is not None:
        host += compute * sizes.total // ranks
    away = moments if config.policy.offload_optimizer and not config.policy.cpu_offload else 0
    engine = _engine_weights(config, sizes, place)
    training = resident + gradients + _gathered(config, sizes, place, compute) + _activations(config, sizes, compute)
    if _engine_stays(config, place):
        training += engine
    generating = resident - away + _generation(config, sizes, place, engine)
    return Footprint(training=training, generating=generating, host=host + away)


def compute_bytes(config: Config, place: Placement) -> int:
    dtype = config.policy.compute_dtype
    return (2 if place.on_gpu else 4) if dtype == "auto" else DTYPE_BYTES[dtype]


def engine_bytes(config: Config, place: Placement) -> int:
    return compute_bytes(config, place) if config.engine.dtype == "auto" else DTYPE_BYTES[config.engine.dtype]


def trained_parameters(config: Config, sizes: Sizes) -> int:
    """Return the number of trained parameters of the model itself."""
    if config.policy.lora is not None:
        return 0
    layers = config.policy.train_layers
    return sizes.total if layers is None else sum(block.total for block in sizes.chosen(layers))


def adapter_parameters(lora: LoRAConfig | None, sizes: Sizes) -> int:
    """Return the number of parameters of an adapter's factors."""
    return 0 if lora is None else sum(lora.rank * sum(shape) for shape in _adapted(lora, sizes))


def adapted_parameters(lora: LoRAConfig | None, sizes: Sizes) -> int:
    """Return the number of parameters of the layers that have an adapter."""
    return 0 if lora is None else sum(inputs * outputs for inputs, outputs in _adapted(lora, sizes))


def _adapted(lora: LoRAConfig, sizes: Sizes) -> Iterator[tuple[int, int]]:
    """Yield inputs and outputs of the layers that have an adapter: all linear ones, unless known names are given."""
    targets, known = lora.target_modules, {name for block in sizes.blocks for name in block.linear}
    everything = isinstance(targets, str) or not set(targets) <= known
    for block in sizes.chosen(lora.layers):
        yield from (shape for name, shape in block.linear.items() if everything or name in targets)


def _has_reference(config: Config) -> bool:
    kl = config.loss.kl
    return kl.coef > 0 and kl.target == "reference" and config.policy.lora is None


def _shares_engine(config: Config) -> bool:
    return config.weights == "shared"


def _gathered(config: Config, sizes: Sizes, place: Placement, compute: int) -> int:
    """Return the bytes of gathered weights: all on one rank, else two blocks and what lies outside the blocks."""
    partly_frozen = config.policy.lora is not None or config.policy.train_layers is not None
    if partly_frozen and (place.ranks == 1 or _shares_engine(config)):
        return compute * trained_parameters(config, sizes)  # no FSDP: frozen weights are used where they are
    if place.shards(config) == 1 and not config.policy.cpu_offload:
        return compute * sizes.total
    return compute * (sizes.outside + 2 * sizes.largest.total)


def _activations(config: Config, sizes: Sizes, compute: int) -> int:
    """Return the bytes of one micro-batch: the inputs of all blocks, one block's own, and a chunk's logits twice."""
    size = config.batch.max_tokens_per_micro_batch
    tokens = ceil(config.max_sequence_tokens / config.policy.context_parallel) if size == "auto" else size
    own = max(block.activations(sizes.hidden) for block in sizes.blocks)
    per_token = compute * (len(sizes.blocks) * sizes.hidden + own)
    return tokens * per_token + 2 * 4 * min(tokens, config.policy.logprob_chunk_tokens) * sizes.vocab


def _engine_weights(config: Config, sizes: Sizes, place: Placement) -> int:
    if _shares_engine(config) or config.engine.placement == "server":
        return 0
    return engine_bytes(config, place) * sizes.total // config.engine.tensor_parallel_size


def _engine_stays(config: Config, place: Placement) -> bool:
    """True if the engine's weights stay on the device while the policy trains."""
    return not place.on_gpu or not config.engine.sleep or config.sync_frequency > 1


def _generation(config: Config, sizes: Sizes, place: Placement, weights: int) -> int:
    """Return the bytes of the engine: weights, the KV cache of one sequence or as configured, and its reserve."""
    engine = config.engine
    if engine.placement == "server":
        return 0
    cache = engine.kv_cache_memory_bytes or kv_bytes_per_sequence(config, sizes, place)
    if place.on_gpu and engine.gpu_memory_utilization is not None and engine.kv_cache_memory_bytes is None:
        return max(weights + cache, int(engine.gpu_memory_utilization * place.device_bytes))
    return weights + cache + (ENGINE_RESERVE if place.on_gpu else 0)


def kv_bytes_per_sequence(config: Config, sizes: Sizes, place: Placement) -> int:
    """Return the bytes of a sequence of full length in the KV cache of one rank, with its recurrent states."""
    tokens, itemsize = config.engine.max_model_len or config.max_sequence_tokens, engine_bytes(config, place)
    ranks = config.engine.tensor_parallel_size
    return tokens * sizes.kv_bytes_per_token(itemsize, ranks) + sizes.state_bytes(itemsize, ranks)


def run_folder_bytes(config: Config, sizes: Sizes, place: Placement) -> int:
    """Return the bytes of the checkpoints that exist at the same time, and of all exports."""
    trained, adapter = trained_parameters(config, sizes), adapter_parameters(config.policy.lora, sizes)
    one = (MASTER + OPTIMIZER_STATE[config.policy.optimizer.type]) * (trained + adapter)
    every, settings = config.checkpoint.every, config.checkpoint
    saves = (config.training_steps // every if every else 0) + settings.final
    exports = (config.training_steps // settings.export_every if settings.export_every else 0) + settings.final
    best = config.evaluation.keep_best is not None  # one checkpoint and one export more
    # A new checkpoint is complete before the oldest one is deleted.
    checkpoints = min(saves, settings.keep_last + 1) + best
    return one * checkpoints + (exports + best) * _export_bytes(config, sizes, place, adapter)


def _export_bytes(config: Config, sizes: Sizes, place: Placement, adapter: int) -> int:
    dtype = config.checkpoint.export_dtype
    model = sizes.total * (compute_bytes(config, place) if dtype == "auto" else DTYPE_BYTES[dtype])
    if config.policy.lora is None:
        return model
    return MASTER * adapter + (model if config.checkpoint.export_merged else 0)
