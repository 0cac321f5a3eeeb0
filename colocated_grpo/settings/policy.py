"""Settings of the trained model and its optimizer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from colocated_grpo.settings.base import Fraction, NonNegative, Number, Positive, Section
from colocated_grpo.settings.layers import Layers
from colocated_grpo.settings.lora import LEARNING_RATE, LoRAConfig

_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _parse_boolean(value: Any) -> Any:
    """Convert YAML 1.1 booleans (yes, no, on, off), as pydantic does for plain bool fields only."""
    return _BOOLEANS.get(value.lower(), value) if isinstance(value, str) else value


AutoOrBool = Annotated[Literal["auto", True, False], BeforeValidator(_parse_boolean)]


class OptimizerConfig(Section):
    type: Literal["adamw", "adamw_8bit", "adafactor"] = "adamw"
    """adamw: torch's fused AdamW, 8 bytes of state per parameter. adamw_8bit: bitsandbytes, 2 bytes; resumes only
    on the same number of shards. adafactor: factored second moment, almost no state; ignores beta1, beta2 and eps."""
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
    """Peak learning rate. The default suits pretrained models; models of a few million parameters need 1e-4 and
    more. With `lora` the default is 1e-5: adapters need about ten times the learning rate of full training."""
    min_lr: Number = Field(0.0, ge=0)
    """Final learning rate of a cosine or linear schedule. At most lr."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Course of the learning rate after warmup, over the run's optimizer steps. A step in which all groups are pending
    (games with delayed returns) makes no optimizer step, so such a run ends before the schedule reaches min_lr."""
    warmup_steps: NonNegative = 0
    """Optimizer steps of linear warmup: step i (from 0) of n uses lr * (i + 1) / n."""
    grad_clip: Number = Field(1.0, gt=0)
    """Maximum global gradient norm. Larger gradients are scaled down to it."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and its constants."""
    compute_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of activations and of the weights in the forward pass. Master weights and gradient reduction are always
    float32. auto: bfloat16 on CUDA, float32 on CPU."""
    gradient_checkpointing: AutoOrBool = "auto"
    """Recompute the activations of transformer blocks in the backward pass: less memory, up to a third more compute.
    auto: on CUDA as few blocks as the measured free memory requires, none on CPU. true: all blocks. false: none."""
    compile: AutoOrBool = "auto"
    """Compile each transformer block with torch.compile. auto: on CUDA. Set false for very
    small models, where compiling takes longer than it saves."""
    cpu_offload: bool = False
    """Keep master weights, gradients and optimizer state in host memory (FSDP2 CPU offload), about 16 bytes per
    parameter over all ranks with AdamW. Slower; for models that do not fit on the device beside their engine."""
    offload_optimizer: bool = False
    """Move optimizer state to host memory while a GPU's engine generates, and back. Leaves more room for the KV cache;
    costs two copies of the state per step."""
    replicate: Literal["nodes"] | None = None
    """null: shard weights and optimizer state over all ranks. nodes: shard them over the ranks of each node, with a
    replica on every node (HSDP), so that only gradients cross the network. A checkpoint of one resumes in the other."""
    context_parallel: Positive = 1
    """Number of ranks that each micro-batch is split over, for sequences that do not fit on one (docs/running.md). A
    rank holds a slice of the tokens; inside attention, all tokens of a slice of the heads (DeepSpeed Ulysses)."""
    logprob_chunk_tokens: Positive = 2048
    """Tokens per chunk when log-probabilities are computed. Only one chunk's float32 logits exist at a time: 1.2 GB for
    2,048 tokens and a vocabulary of 152,000."""
    routing_replay: bool = False
    """For mixtures of experts: train each token with the experts that the engine chose while sampling it, instead of
    the policy's own choice, which differs where rounding does (docs/models.md)."""
    load_balancing: Number = Field(0.0, ge=0)
    """For mixtures of experts: coefficient of the load-balancing loss, which falls as each router uses its experts more
    equally (docs/models.md), for example 0.001. 0: off. Costs a forward pass per optimizer step. Must be 0 with `lora`,
    which does not train routers."""
    lora: LoRAConfig | None = None
    """Train an adapter (LoRA) on frozen weights instead of all weights. null: off. {}: on, with the defaults below."""
    train_layers: Layers | None = None
    """Train only these transformer blocks, without adapters: 20-31, 0-3,28-31 or a list of numbers. All other weights
    are frozen: 2 bytes per parameter in bfloat16, and no backward pass before the first trained block. null: train all
    weights."""

    @model_validator(mode="before")
    @classmethod
    def _default_lr_of_adapters(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("lora") is not None and "lr" not in values:
            return {**values, "lr": LEARNING_RATE}
        return values
