"""Sizes of a run by arithmetic: lengths from the data, the batch from the GPUs, memory settings from the model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from colocated_grpo.errors import ConfigError
from colocated_grpo.settings.model_sizes import Sizes
from colocated_grpo.settings.run_sizes import FULL, Placement, RankMemory, RunSizes, fits, gib, memory_fix
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.training import LEARNING_RATE, PolicyConfig
from colocated_grpo.types import JsonObject

PROMPT_STEP = 32
"""Prompt limits are multiples of this number."""
GPU_COMPLETION, CPU_COMPLETION = 1024, 128
PASSES, MAX_STEPS, MIN_STEPS = 3, 200, 20
SMALL_MODEL, SMALL_MODEL_LR = 50e6, 1e-4
"""Models with fewer parameters get this learning rate: the default rate hardly changes such models."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    prompt: int
    completion: int
    prompt_why: str
    completion_why: str


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    prompts: int
    group: int
    steps: int
    why: str
    steps_why: str


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Settings that make the run fit."""

    changes: JsonObject
    """Sections of the config: {"policy": {"offload_optimizer": True}}."""
    why: str
    need: RankMemory
    sequences: int
    """Sequences of full length in the KV cache at a time."""


def lengths_of(prompts: Sequence[int], answers: Sequence[int], positions: int | None, on_gpu: bool) -> Lengths:
    """prompts, answers: numbers of tokens. positions: longest sequence of the model; None if unknown."""
    limit = (positions or max(prompts) * 4) // 2
    prompt = min(_round_up(max(prompts), PROMPT_STEP), limit)
    dropped = sum(length > prompt for length in prompts)
    prompt_why = f"the longest of {len(prompts):,} prompts has {max(prompts)} tokens"
    if dropped:
        prompt_why += f"; {dropped} are longer than half of the model's {positions} positions and are dropped"
    wanted = GPU_COMPLETION if on_gpu else CPU_COMPLETION
    answer = _round_up(2 * max(answers, default=0), PROMPT_STEP)
    completion = max(wanted, answer)
    completion_why = "room to reason; raise it if the metric `truncated` stays above 0.1"
    if answer > wanted:
        completion_why = f"twice the longest answer ({max(answers)} tokens)"
    if positions is not None and completion > positions - prompt:
        completion = positions - prompt
        completion_why = f"what the model's {positions} positions leave"
    return Lengths(prompt=prompt, completion=completion, prompt_why=prompt_why, completion_why=completion_why)


def batch_of(rows: int, gpus: int) -> BatchSizes:
    """rows: rows of the data. A tenth of the rows, at most 64, is held out."""
    held_out = min(rows // 10, 64)
    train = rows - held_out
    wanted, group = (max(32, 16 * gpus), 16) if gpus else (8, 8)
    prompts = max(1, gpus, min(wanted, train))
    why = f"{prompts * group} completions a step"
    why += f", {prompts * group // gpus} on each GPU" if gpus > 1 else ""
    steps = max(MIN_STEPS, min(MAX_STEPS, ceil(PASSES * train / prompts)))
    passes = steps * prompts / train
    steps_why = f"{passes:.3g} passes over {train:,} rows; {held_out or 'none'} held out for evaluation"
    return BatchSizes(prompts=prompts, group=group, steps=steps, why=why, steps_why=steps_why)


def learning_rate(sizes: Sizes | None, memory: Memory | None) -> tuple[float, str]:
    if memory is not None and memory.changes.get("policy", {}).get("lora") is not None:
        return LEARNING_RATE, "adapters need about ten times the rate of full training"
    if sizes is not None and sizes.total < SMALL_MODEL:
        return SMALL_MODEL_LR, "a model of a few million parameters needs 1e-4 and more"
    return PolicyConfig().lr, "suits pretrained models; watch `kl` and `entropy` before you raise it"


def fit_memory(config: Config, sizes: Sizes, heads: int, place: Placement, host_bytes: int) -> Memory:
    """Return the first settings of `_candidates` with which the run fits. Raises ConfigError if it never fits.

    heads: attention heads of the model. host_bytes: free memory of the machine, for all its ranks together.
    """
    host = host_bytes // place.ranks
    device = place.device_bytes if place.on_gpu else host
    parallel = (1, 2, 4, 8) if place.on_gpu else (1,)
    possible = [size for size in parallel if place.ranks % size == 0 and heads % size == 0]
    for changes, why in _candidates(place.ranks, place.on_gpu, possible):
        tree = config.model_dump()
        for section, values in changes.items():
            tree[section] = tree[section] | values if isinstance(values, dict) else values
        run = RunSizes(Config.model_validate(tree), sizes, place)
        if fits(run, host, FULL):
            need = run.footprint()
            sequences = 1 + max(0, device - need.generating) // run.kv_bytes_per_sequence()
            return Memory(changes=changes, why=why, need=need, sequences=sequences)
    what = f"{place.ranks} GPUs of {gib(device)}" if place.on_gpu else f"{gib(device)} of memory"
    raise ConfigError(
        f"model.name={config.model.name!r}: does not fit on {what} with any setting; it would with "
        f"{memory_fix(RunSizes(config, sizes, place), host)}"
    )


def _candidates(ranks: int, on_gpu: bool, tensor_parallel_sizes: Sequence[int]) -> Iterator[tuple[JsonObject, str]]:
    """Yield settings with their explanations, in order of increasing cost."""
    kinds: list[tuple[JsonObject, str]] = [({}, "all weights are trained on the device")]
    if on_gpu:
        adapter: JsonObject = {"policy": {"lora": {}}} | ({"weights": "shared"} if ranks == 1 else {})
        kinds += [
            ({"policy": {"offload_optimizer": True}}, "optimizer state leaves the GPU while the engine generates"),
            (adapter, "all weights with their optimizer state do not fit, an adapter (LoRA) does"),
            ({"policy": {"cpu_offload": True}}, "weights and optimizer state are in host memory; slower"),
        ]
    for changes, why in kinds:
        for size in tensor_parallel_sizes:
            if size == 1:
                yield changes, why
            else:
                parallel = {"engine": {"tensor_parallel_size": size}}
                yield changes | parallel, f"{why}; an engine of {size} GPUs, as one cannot hold its weights"


def _round_up(number: int, step: int) -> int:
    return ceil(number / step) * step
