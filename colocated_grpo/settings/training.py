"""Settings of the trained model: its optimizer, its adapter (LoRA), the blocks that are trained, and its batches.

Adapter settings are the settings of PEFT's LoraConfig for linear layers, under plain names.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, WrapValidator, model_validator

from colocated_grpo.settings.base import DEFAULT_INIT, Fraction, InputFile, NonNegative, Number, Positive, Section
from colocated_grpo.types import JsonObject

_RANGE = re.compile(r"(\d+)(?:\s*-\s*(\d+))?")


def parse_layers(value: object) -> object:
    """Parse text (0-3,28-31) or a number into ascending indices. Other values are unchanged, for pydantic to check."""
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    if isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return sorted(set(value))
    if not isinstance(value, str):
        return value
    indices: set[int] = set()
    for part in value.split(","):
        if (match := _RANGE.fullmatch(part.strip())) is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{part.strip()!r} is no range of blocks; write 20-31 or 0-3,28-31")
        indices |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(indices)


def layers_text(indices: Sequence[int]) -> str:
    """Return ascending indices as text that `parse_layers` reads: 0-3,28-31."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


Layers = Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(parse_layers), Field(min_length=1)]
"""Indices of transformer blocks, from 0."""


ALL_LINEAR = "all-linear"
LEARNING_RATE = 1e-5
"""Default of policy.lr with adapters: ten times that of full training, the ratio that "LoRA Without Regret" (Schulman
et al., 2025) found for reinforcement learning, nearly independent of the rank."""
SMALL_MODELS = ((50e6, 1e-4), (500e6, 1e-5))
"""Parameters, and the rate of models with fewer. 1e-5: docs/results/init_rates_smollm2_2cores.json. 1e-4: a guess,
between that rate and the quickstart's 4e-4 for a million parameters."""


def rate_of_small_model(parameters: int) -> tuple[float, str] | None:
    """Return a learning rate for full training, and its reason; None for models that learn at the default."""
    for limit, rate in SMALL_MODELS:
        if parameters < limit:
            return rate, f"models of less than {limit / 1e6:g} million parameters need this or more"
    return None


def no_dropout(value: float) -> float:
    """Return `value`; raise ValueError if it is not 0."""
    if value != 0:
        raise ValueError("must be 0: the engine samples without dropout, so training with it would not be on-policy")
    return value


def _valid_pattern(value: list[str] | str | None) -> list[str] | str | None:
    if isinstance(value, str):
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"is no regular expression ({error})") from None
    return value


Modules = Annotated[list[str] | str, AfterValidator(_valid_pattern)]
"""Names of modules, or a regular expression that matches whole names."""


class LoRAConfig(Section):
    rank: Positive = 32
    """Rank of the adapter: columns of B, rows of A (PEFT's r). Reinforcement learning needs little: 8 to 32 suffice."""
    alpha: Number = Field(32.0, gt=0)
    """The product B @ A is multiplied by alpha / rank, so the best learning rate hardly depends on the rank."""
    rslora: bool = False
    """true: B @ A is multiplied by alpha / sqrt(rank) instead of alpha / rank (PEFT's use_rslora)."""
    target_modules: Modules = ALL_LINEAR
    """Layers with adapters, as in PEFT: all-linear (all linear layers but the output layer), a list of names
    ([q_proj, v_proj]), or a regular expression that must match the whole name of a module."""
    exclude_modules: Modules | None = None
    """Layers without adapters: names or a regular expression, as in target_modules."""
    layers: Layers | None = None
    """Transformer blocks with adapters: 20-31, 0-3,28-31 or a list of numbers. Default: all."""
    dropout: Annotated[float, AfterValidator(no_dropout)] = 0.0
    """Must be 0."""
    init: InputFile = DEFAULT_INIT
    """default: A is drawn uniformly, B is zero, as in PEFT. Otherwise the folder of a PEFT adapter to continue from.
    That adapter also sets rank, alpha, rslora, target_modules, exclude_modules and layers."""
    base_dtype: Literal["auto", "nf4"] = "auto"
    """Type of the frozen weights. auto: policy.compute_dtype. nf4: linear layers in 4 bits (QLoRA), 9/16 bytes per
    parameter; policy and engine then compute with the rounded weights (docs/guides/lora.md)."""
    base_on_host: bool = False
    """Keep the base weights in host memory; only the merge after each optimizer step reads them. Frees 2 bytes per
    adapted parameter on the GPU, and costs one copy to the GPU per optimizer step."""

    @property
    def scale(self) -> float:
        """Factor of the product B @ A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def _steps_or_fraction(value: object, validate: Callable[[object], float]) -> float:
    """Validate warmup_steps. One rule replaces those of the two types, of which each is misleading alone."""
    try:
        return validate(value)
    except ValidationError:
        raise ValueError("must be a whole number of steps, or a fraction of the run from 0 to 1") from None


class OptimizerConfig(Section):
    type: Literal["adamw", "adamw_8bit", "adafactor"] = "adamw"
    """adamw: torch's fused AdamW, 8 bytes of state per parameter. adamw_8bit: AdamW of bitsandbytes, 2 bytes of state
    per parameter; a run resumes only on the same number of shards. adafactor: factored second moment, almost no state;
    ignores beta1, beta2 and eps."""
    beta1: Fraction = 0.9
    """Decay rate of AdamW's first moment."""
    beta2: Fraction = 0.999
    """Decay rate of AdamW's second moment."""
    eps: Number = Field(1e-8, gt=0)
    """Added to the denominator of AdamW's update."""
    weight_decay: Number = Field(0.0, ge=0)
    """Decoupled weight decay of all parameters: each step multiplies them by 1 - lr * weight_decay."""


class PolicyConfig(Section):
    lr: Number = Field(1e-6, gt=0)
    """Peak learning rate. The default suits models of a billion parameters; models of 100 to 300 million need 1e-5, of
    a few million 1e-4. With `lora` the default is 1e-5: adapters need about ten times the rate of full training."""
    min_lr: Number = Field(0.0, ge=0)
    """Final learning rate of a cosine or linear schedule. At most lr."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Course of the learning rate after warmup, over the run's optimizer steps. A step in which all groups are pending
    (games with delayed returns) makes no optimizer step. A run with such steps ends before the schedule reaches
    min_lr."""
    warmup_steps: Annotated[NonNegative | Fraction, WrapValidator(_steps_or_fraction)] = 0
    """Optimizer steps of linear warmup: step i (from 0) of n uses lr * (i + 1) / n. Below 1: a fraction of the run's
    optimizer steps, rounded up."""
    grad_clip: Number = Field(1.0, ge=0)
    """Maximum global gradient norm. Larger gradients are scaled down to this norm. 0: no limit."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and its constants."""
    compute_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of activations and of the weights in the forward pass. Master weights and gradient reduction are always
    float32. auto: bfloat16 on CUDA, float32 on CPU."""
    gradient_checkpointing: Literal["auto"] | bool = "auto"
    """Recompute the activations of transformer blocks in the backward pass: less memory, up to a third more compute.
    auto: on CUDA as few blocks as the measured free memory requires, none on CPU. true: all blocks. false: none."""
    compile: Literal["auto"] | bool = "auto"
    """Compile each transformer block with torch.compile. auto: on CUDA. Set false for very small models, where
    compiling costs more time than it saves."""
    cpu_offload: bool = False
    """Keep master weights, gradients and optimizer state in host memory (FSDP2 CPU offload), with AdamW about 16 bytes
    per parameter over all ranks. Slower; for models that do not fit on the device beside their engine."""
    offload_optimizer: bool = False
    """Move optimizer state from the GPU to host memory while the engine generates, and back. Leaves more room for the
    KV cache; costs two copies of the state per step."""
    replicate: Literal["nodes"] | None = None
    """null: shard weights and optimizer state over all ranks. nodes: shard them over the ranks of each node, with a
    replica on every node (HSDP), so that only gradients cross the network. A run can resume a checkpoint of the other
    mode."""
    context_parallel: Positive = 1
    """Number of ranks over which each micro-batch is split, for sequences that do not fit on one rank
    (docs/running.md). Outside attention, a rank computes a slice of the tokens. Inside attention, a rank computes a
    slice of the heads for all tokens (DeepSpeed Ulysses)."""
    logprob_chunk_tokens: Positive = 2048
    """Tokens per chunk when log-probabilities are computed. Only one chunk's float32 logits exist at a time: 1.2 GB for
    2,048 tokens and a vocabulary of 152,000."""
    routing_replay: bool = False
    """For mixtures of experts: train each token with the experts chosen by the engine when it sampled the token. The
    policy's own choice can differ because of rounding (docs/guides/mixtures.md)."""
    load_balancing: Number = Field(0.0, ge=0)
    """For mixtures of experts: coefficient of the load-balancing loss, for example 0.001. The loss is lowest if each
    router uses its experts evenly (docs/guides/mixtures.md). 0: off. Costs a forward pass per optimizer step. Must
    be 0 with `lora`, which does not train routers."""
    lora: LoRAConfig | None = None
    """Train an adapter (LoRA) on frozen weights instead of all weights. null: off. {}: on, with the defaults below."""
    train_layers: Layers | None = None
    """Train only these transformer blocks, without adapters: 20-31, 0-3,28-31 or a list of numbers. All other weights
    are frozen: they take 2 bytes per parameter in bfloat16, and the backward pass ends at the first trained block.
    null: train all weights."""

    @model_validator(mode="before")
    @classmethod
    def _default_lr_of_adapters(cls, values: object) -> object:
        if isinstance(values, dict) and values.get("lora") is not None and "lr" not in values:
            return {**values, "lr": LEARNING_RATE}
        return values

    @property
    def has_4_bit_base(self) -> bool:
        return self.lora is not None and self.lora.base_dtype == "nf4"

    def problems(self) -> Iterator[str]:
        if self.min_lr > self.lr:
            yield f"policy.min_lr={self.min_lr:g}: must be at most policy.lr={self.lr:g}, the peak of the schedule"
        if self.context_parallel > 1 and self.load_balancing:
            why = "whose loss is not computed for parts of sequences; set one of them to its default"
            yield f"policy.context_parallel={self.context_parallel}: not supported with policy.load_balancing, {why}"
        if self.lora is None:
            return
        if self.train_layers is not None:
            why = "which freezes all weights of the model; set policy.lora.layers for the blocks that get an adapter"
            yield f"policy.train_layers={layers_text(self.train_layers)}: must be null with policy.lora, {why}"
        if self.cpu_offload:
            rule = "must be false with policy.lora, whose forward pass reads the merged weights on the device"
            yield f"policy.cpu_offload=true: {rule}; see policy.lora.base_on_host"
        if self.lora.base_on_host and self.has_4_bit_base:
            yield "policy.lora.base_on_host=true: must be false with base_dtype: nf4, as each pass reads the base"
        if self.load_balancing:
            yield f"policy.load_balancing={self.load_balancing:g}: must be 0 with policy.lora, which freezes routers"


def trained_shape(policy: PolicyConfig) -> JsonObject:
    """Return the settings that determine which weights are trained. A resumed run must have the same values."""
    layers = {"policy.train_layers": "null" if policy.train_layers is None else layers_text(policy.train_layers)}
    if (lora := policy.lora) is None:
        return {**layers, "policy.lora": "null"}
    return {
        **layers,
        "policy.lora": "an adapter",
        **{f"policy.lora.{name}": getattr(lora, name) for name in ("rank", "alpha", "rslora", "base_dtype")},
        "policy.lora.layers": "null" if lora.layers is None else layers_text(lora.layers),
    }


class BatchConfig(Section):
    max_tokens_per_micro_batch: Literal["auto"] | Positive = "auto"
    """Maximum packed tokens in one forward pass on one rank. Changes speed and memory, not the gradient. Must be at
    least the longest sequence, divided by policy.context_parallel. auto on CUDA: the largest of 24,576, 16,384 and
    8,192 that fits into the measured free memory without recomputing blocks. If none of them fits, auto is at most
    8,192 with as few recomputed blocks as needed. auto on CPU: 16,384, or more if the longest sequence needs it."""
    minibatches: Positive = 1
    """Optimizer steps per pass over a batch. Groups are not split, so this number must divide rollout.prompts_per_step.
    Every update after the first is off-policy, and the loss clips the ratio."""
    epochs: Positive = 1
    """Passes over each batch. Every update after the first is off-policy."""
    drop_constant_groups: bool = True
    """Skip groups of equal rewards in the forward pass, because their policy gradient is zero. Skipped groups still
    count in the loss's denominator, so the gradient is the same. No effect if loss.kl.coef or policy.load_balancing is
    above 0, because groups of equal rewards then have a gradient."""
    mask_truncated: bool = False
    """Exclude the tokens of completions cut at rollout.max_completion_tokens, or for a repetition, from the loss. Cut
    completions still count in the denominator of grpo, dr_grpo and gspo."""

    @property
    def updates(self) -> int:
        return self.minibatches * self.epochs
