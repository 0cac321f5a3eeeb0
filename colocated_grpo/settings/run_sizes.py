"""Memory and disk space of a run by arithmetic, in bytes, from the sizes of the model and the settings.

Bytes per parameter with AdamW and bfloat16, over all ranks: 16 for full training (master, gradient, two moments in
float32), 4 for an adapter (base and merged weights; 9/16 with a 4-bit base), and 2 on each engine while it
generates. Activations are counted for the smallest possible micro-batch, with every block recomputed: a run that does
not fit by this arithmetic does not fit at all.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from pathlib import Path

from colocated_grpo.errors import ConfigError
from colocated_grpo.settings.config_json import read_config_json
from colocated_grpo.settings.model_sizes import DTYPE_BYTES, ENGINE_RESERVE, Sizes, cache_itemsize, sizes_of
from colocated_grpo.settings.schema import Config, ModelConfig
from colocated_grpo.settings.training import LoRAConfig
from colocated_grpo.types import JsonObject

GIB = 1 << 30
FULL = 0.9
"""Fraction of the memory above which a run that fits by arithmetic is likely to fail."""
MOST_RANKS = 1024
MASTER = GRADIENT = 4
NF4_BYTES = 9 / 16
"""Bytes per parameter of a 4-bit base, with one float32 scale for 64 parameters."""
OPTIMIZER_STATE = {"adamw": 8, "adamw_8bit": 2, "adafactor": 0}
"""Optimizer -> bytes of state per trained parameter."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The ranks of a run, and the memory of their devices."""

    ranks: int
    on_gpu: bool
    device_bytes: int
    """Memory of one GPU; on the CPU, memory of the whole machine."""
    nodes: int = 1


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank."""

    training: int
    """On its device, while the policy trains."""
    generating: int
    """On its device, while the engine generates."""
    host: int
    """In host memory, in addition to the bytes on the device."""

    @property
    def device(self) -> int:
        return max(self.training, self.generating)


@dataclass(frozen=True)
class RunSizes:
    """A run whose memory and disk space are counted."""

    config: Config
    sizes: Sizes
    place: Placement

    def footprint(self) -> RankMemory:
        policy, sizes, compute, shards = self.config.policy, self.sizes, self.compute_bytes, self._shards
        state = OPTIMIZER_STATE[policy.optimizer.type]
        in_4_bits = 0
        adapted = () if policy.lora is None else _adapted(policy.lora, sizes)
        base = compute * sum(inputs * outputs for inputs, outputs in adapted)
        if policy.has_4_bit_base:  # all linear layers, whose merged weights exist only while a layer computes
            in_4_bits, base = sum(i * o for block in sizes.blocks for i, o in block.linear.values()), 0
        frozen = compute * (sizes.total - self.trained - in_4_bits) + int(NF4_BYTES * in_4_bits)
        # Sharded state, and the adapter's state on every rank.
        weights = (MASTER * self.trained + frozen + self._reference()) // shards + MASTER * self.adapter
        gradients = GRADIENT * (self.trained // shards + self.adapter)
        moments = state * (self.trained // shards + self.adapter)
        host = 0
        resident = weights + moments
        if policy.cpu_offload:
            host, resident, gradients = resident + gradients, 0, 0
        if policy.lora is not None and policy.lora.base_on_host:
            host += base // shards
        else:
            resident += base // shards
        resident += self._reward_models()
        if self.config.opponent is not None:
            host += compute * sizes.total // shards
        away = moments if policy.offload_optimizer and not policy.cpu_offload else 0
        engine = self._engine_weights()
        training = resident + gradients + self._gathered() + self._activations()
        if not self.place.on_gpu or not self.config.engine.sleep or self.config.sync_frequency > 1:
            training += engine  # stays on the device while the policy trains
        return RankMemory(training=training, generating=resident - away + self._generation(engine), host=host + away)

    @cached_property
    def compute_bytes(self) -> int:
        dtype = self.config.policy.compute_dtype
        return (2 if self.place.on_gpu else 4) if dtype == "auto" else DTYPE_BYTES[dtype]

    @cached_property
    def engine_bytes(self) -> int:
        dtype = self.config.engine.dtype
        return self.compute_bytes if dtype == "auto" else DTYPE_BYTES[dtype]

    @cached_property
    def trained(self) -> int:
        """Trained parameters of the model, adapter excluded."""
        policy = self.config.policy
        if policy.lora is not None:
            return 0
        chosen = self.sizes.chosen(policy.train_layers)
        return self.sizes.total if policy.train_layers is None else sum(block.total for block in chosen)

    @cached_property
    def adapter(self) -> int:
        return adapter_parameters(self.config.policy.lora, self.sizes)

    @property
    def _shards(self) -> int:
        """Ranks that together hold the model."""
        return self.place.ranks // (self.place.nodes if self.config.policy.replicate == "nodes" else 1)

    def _reference(self) -> int:
        """Return the bytes of the reference of a KL penalty. An adapter's base needs none of its own."""
        kl, other = self.config.loss.kl, self.config.reference_model
        if not kl.has_reference or (other is None and self.config.policy.lora is not None):
            return 0
        return self.compute_bytes * (self.sizes.total if other is None else _parameters(other))

    def _reward_models(self) -> int:
        """Return the bytes of the reward models. Each rank holds every model whole."""
        rewards = [reward for source in self.config.sources for reward in getattr(source, "rewards", ())]
        models = {str(reward.model): reward.model for reward in rewards}.values()
        return (2 if self.place.on_gpu else 4) * sum(_parameters(model) for model in models if model is not None)

    def _gathered(self) -> int:
        """Return the bytes of weights in the compute type beside the masters."""
        if self.place.ranks == 1 and not self.config.policy.cpu_offload:
            return self.compute_bytes * self.trained
        # FSDP2 gathers two blocks, and the layers outside blocks.
        return self.compute_bytes * (self.sizes.outside + 2 * max(block.total for block in self.sizes.blocks))

    def _activations(self) -> int:
        """Return the bytes of a micro-batch: inputs of all blocks, one block's activations, twice a chunk's logits."""
        config, sizes = self.config, self.sizes
        size = config.batch.max_tokens_per_micro_batch
        tokens = ceil(config.max_sequence_tokens / config.policy.context_parallel) if size == "auto" else size
        own = max(block.activations(sizes.hidden) for block in sizes.blocks)
        per_token = self.compute_bytes * (len(sizes.blocks) * sizes.hidden + own)
        return tokens * per_token + 2 * 4 * min(tokens, config.policy.logprob_chunk_tokens) * sizes.vocab

    def _engine_weights(self) -> int:
        engine = self.config.engine
        if self.config.weights == "shared" or engine.placement == "server":
            return 0
        return self.engine_bytes * self.sizes.total // engine.tensor_parallel_size

    def _generation(self, weights: int) -> int:
        """Return the bytes of the engine: weights, the KV cache of one sequence or as configured, and its reserve."""
        engine = self.config.engine
        if engine.placement == "server":
            return 0
        cache = engine.kv_cache_memory_bytes or self.kv_bytes_per_sequence()
        if self.place.on_gpu and engine.gpu_memory_utilization is not None and engine.kv_cache_memory_bytes is None:
            return max(weights + cache, int(engine.gpu_memory_utilization * self.place.device_bytes))
        return weights + cache + (ENGINE_RESERVE if self.place.on_gpu else 0)

    def kv_bytes_per_sequence(self) -> int:
        """Return the bytes of a sequence of full length in the KV cache of one rank, with its recurrent states."""
        engine, itemsize = self.config.engine, self.engine_bytes
        tokens, ranks = engine.max_model_len or self.config.max_sequence_tokens, engine.tensor_parallel_size
        cache = self.sizes.kv_bytes_per_token(cache_itemsize(engine.args, itemsize), ranks)
        return tokens * cache + self.sizes.state_bytes(itemsize, ranks)

    def run_folder_bytes(self) -> int:
        """Return the bytes of the checkpoints that exist at the same time, and of all exports."""
        settings, steps = self.config.checkpoint, self.config.training_steps
        one = (MASTER + OPTIMIZER_STATE[self.config.policy.optimizer.type]) * (self.trained + self.adapter)
        saves = (steps // settings.every if settings.every else 0) + settings.final
        exports = (steps // settings.export_every if settings.export_every else 0) + settings.final
        best = self.config.evaluation.keep_best is not None  # one checkpoint and one export more
        # A new checkpoint is complete before the oldest checkpoint is deleted.
        return one * (min(saves, settings.keep_last + 1) + best) + (exports + best) * self._export_bytes()

    def _export_bytes(self) -> int:
        settings = self.config.checkpoint
        dtype = settings.export_dtype
        model = self.sizes.total * (self.compute_bytes if dtype == "auto" else DTYPE_BYTES[dtype])
        if self.config.policy.lora is None:
            return model
        return MASTER * self.adapter + (model if settings.export_merged else 0)

    def smaller(self) -> "dict[str, RunSizes]":
        """Return settings that save memory, each with the resulting run. Settings already in use are left out."""
        if (lora := self.config.policy.lora) is None:
            changes: dict[str, JsonObject] = {
                "--policy.offload_optimizer true": {"offload_optimizer": True},
                "--policy.lora {}": {"lora": LoRAConfig(), "cpu_offload": False},
                "--policy.cpu_offload true": {"cpu_offload": True},
            }
        else:
            on_host = lora.model_copy(update={"base_on_host": True})
            nf4 = lora.model_copy(update={"base_dtype": "nf4"})
            changes = {"--policy.lora.base_on_host true": {"lora": on_host}} if lora.base_dtype == "auto" else {}
            needs_16_bits = lora.base_on_host or self.config.shares_weights or self.config.engine.bridge == "adapter"
            if not (needs_16_bits or any(block.mlp.experts for block in self.sizes.blocks)):
                changes["--policy.lora.base_dtype nf4"] = {"lora": nf4}
        changes |= {
            "--policy.replicate null": {"replicate": None},
            "--engine.gpu_memory_utilization null": {"gpu_memory_utilization": None},
            "--engine.kv_cache_memory_bytes null": {"kv_cache_memory_bytes": None},
            "--engine.sleep true": {"sleep": True},
        }
        configs = {key: self.config.with_values(key.split(".")[0][2:], **change) for key, change in changes.items()}
        return {key: replace(self, config=one) for key, one in configs.items() if one != self.config}


def _parameters(model: ModelConfig) -> int:
    """Return the parameters of another model than the policy's; 0 if they are unknown."""
    try:
        sizes = sizes_of(read_config_json(model))
    except ConfigError:  # reported by `check_inputs`
        sizes = None
    return 0 if sizes is None else sizes.total


def adapter_parameters(lora: LoRAConfig | None, sizes: Sizes) -> int:
    return 0 if lora is None else sum(lora.rank * sum(shape) for shape in _adapted(lora, sizes))


def _adapted(lora: LoRAConfig, sizes: Sizes) -> Iterator[tuple[int, int]]:
    """Yield inputs and outputs of the layers that have an adapter: all linear layers, unless known names are given."""
    targets, known = lora.target_modules, {name for block in sizes.blocks for name in block.linear}
    everything = isinstance(targets, str) or not set(targets) <= known
    for block in sizes.chosen(lora.layers):
        yield from (shape for name, shape in block.linear.items() if everything or name in targets)


def fits(run: RunSizes, host: int, fraction: float) -> bool:
    """host: bytes of host memory for one rank, which on the CPU is also the memory of its device."""
    need, device = run.footprint(), run.place.device_bytes if run.place.on_gpu else host
    return need.device <= fraction * device and need.host <= fraction * host


def memory_fix(run: RunSizes, host: int) -> str:
    """Return settings that would each, on its own, make the run fit by the same arithmetic. host: as in `fits`."""
    smaller = run.smaller().items()
    fitting = [f"{setting} ({gib(one.footprint().device)})" for setting, one in smaller if fits(one, host, FULL)]
    ranks = run.place.ranks
    while run.place.on_gpu and (ranks := 2 * ranks) <= MOST_RANKS:
        if fits(replace(run, place=replace(run.place, ranks=ranks)), host, FULL):
            fitting.append(f"{ranks} such GPUs")
            break
    return " or ".join(fitting) if fitting else "a smaller model, shorter sequences or a GPU with more memory"


def disk_notes(run: RunSizes) -> Iterator[str]:
    """Yield a line if the run's output cannot be written on this machine, or needs more space than is free."""
    space, output_dir = run.run_folder_bytes(), run.config.output_dir
    parents = (Path(output_dir).absolute(), *Path(output_dir).absolute().parents)
    folder = next(parent for parent in parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK | os.X_OK):
        yield f"output_dir={output_dir!r}: {folder} is not a writable folder here"
    if free < space:
        yield f"output_dir={output_dir!r}: checkpoints and exports take {gib(space)}; {gib(free)} are free in {folder}"


def gib(size: float) -> str:
    return f"{size / GIB:.3g} GiB"
