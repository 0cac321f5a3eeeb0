"""Every setting of a run, with its bound and its meaning; those of losses and environments are in files beside it.

A default lives in these files and nowhere else; they import neither torch nor vllm. Choices between kinds are unions
told apart by `type`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from colocated_grpo.config.atropos import AtroposSourceConfig
from colocated_grpo.config.base import FileName, Fraction, NonNegative, Positive, Section
from colocated_grpo.config.losses import AdvantageConfig, DAPOConfig, LossConfig
from colocated_grpo.config.sources import EnvironmentConfig
from colocated_grpo.config.turns import INITIAL, OpponentConfig, TurnsSourceConfig

MIN_TEMPERATURE = 0.01
"""vLLM samples at this temperature where a lower one is asked for, and 0 is greedy."""
_ANSWERS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _answer(value: Any) -> Any:
    """A yes or no as people write it, where a word is allowed beside them."""
    return _ANSWERS.get(value.lower(), value) if isinstance(value, str) else value


class ModelConfig(Section):
    name: FileName
    """Local folder or Hugging Face name of a causal language model."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    trust_remote_code: bool = False
    """Run model code shipped with the checkpoint."""
    chat_template: FileName | None = None
    """Jinja text or path of a file that replaces the tokenizer's own chat template."""


class OptimizerConfig(Section):
    type: Literal["adamw", "adamw_8bit", "adafactor"] = "adamw"
    """adamw: fused torch AdamW on fp32 masters. adamw_8bit: bitsandbytes. adafactor: factored second moment."""
    beta1: Fraction = 0.9
    """Decay of the first moment."""
    beta2: Fraction = 0.999
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator of the update."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""


class PolicyConfig(Section):
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end of a cosine or linear schedule."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Shape after warmup, over the run's optimizer steps. A step whose groups are all held back (games that pay late)
    makes none: the schedule does not move then, and ends so many steps short of min_lr."""
    warmup_steps: NonNegative = 0
    """Optimizer steps of linear warmup; step i of n uses lr * (i + 1) / n."""
    grad_clip: float = Field(1.0, gt=0)
    """Global gradient norm above which gradients are scaled down."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Which optimizer and its constants."""
    compute_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of activations and gathered weights; masters and gradient reduction stay fp32. auto: bfloat16 on CUDA,
    float32 on CPU."""
    gradient_checkpointing: Annotated[Literal["auto", True, False], BeforeValidator(_answer)] = "auto"
    """Recompute blocks' activations in the backward pass: less memory, up to a third more compute. auto: as few blocks
    as the measured free memory demands on CUDA, none on CPU. true and false: all and none."""
    compile: Annotated[Literal["auto", True, False], BeforeValidator(_answer)] = "auto"
    """torch.compile of each transformer block. auto: on where the device is CUDA."""
    cpu_offload: bool = False
    """Keep master weights, gradients and optimizer state in host memory (FSDP2 CPU offload)."""
    offload_optimizer: bool = False
    """Move optimizer state to host memory while the engine generates."""
    logprob_chunk_tokens: Positive = 2048
    """Tokens whose logits exist at one time in the fused log-probability operator."""


class EngineConfig(Section):
    tensor_parallel_size: Positive = 1
    """Consecutive ranks that share one engine."""
    max_num_seqs: Positive | None = None
    """Sequences that decode together in one engine. Default: its share of a step's, at least 64 and at most 512; 256
    where an atropos environment sends requests."""
    max_model_len: Positive | None = None
    """Longest prompt + completion the engine accepts. Default: what rollout.* needs."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the engine's weights. auto: the policy's compute type."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Share of GPU memory for the engine, as vLLM means it. Default: what the trainer leaves free."""
    kv_cache_memory_bytes: Positive | None = None
    """Exact KV-cache size in bytes; goes before gpu_memory_utilization."""
    enforce_eager: bool = False
    """Decode without CUDA graphs."""
    sleep: bool = True
    """Give the engine's GPU memory back while the policy trains. CUDA only; ignored on CPU."""
    args: dict[str, Any] = {}
    """Any further vLLM engine argument, passed through unchanged."""


class RolloutConfig(Section):
    prompts_per_step: Positive = 32
    """Prompts of one batch, over all ranks."""
    group_size: int = Field(8, ge=2)
    """Completions sampled for each prompt."""
    max_prompt_tokens: Positive = 1024
    """Longer prompts are dropped, never cut; prompts_dropped counts them."""
    max_completion_tokens: Positive = 1024
    """Sampling stops here with finish_reason 'length'. Of an episode: everything after the prompt, observations too."""
    temperature: float = Field(1.0, ge=MIN_TEMPERATURE, le=2)
    """Sampling temperature; the trainer divides its logits by the same number."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling. Below 1 the engine's log-probabilities are renormalised and no longer match the trainer's."""
    top_k: int = Field(0, ge=0)
    """Sample from the k likeliest tokens; 0 keeps all."""
    min_p: Fraction = 0.0
    """Drop tokens below this share of the likeliest one."""
    repetition_penalty: float = Field(1.0, gt=0)
    """vLLM's repetition penalty; 1 is off."""
    stop: list[str] = []
    """Strings that end a completion; the string itself is part of the trained tokens."""
    generation: Literal["sharded", "replicated"] = "sharded"
    """sharded: each prompt is generated by one rank. replicated: every rank generates every prompt, rank 0's counts."""
    reward_workers: Positive = 8
    """Threads per rank that compute rewards while the engine decodes."""
    reward_timeout: float = Field(60.0, gt=0)
    """Seconds that a prompt's rewards may take before they count as failed, counted from the step's last completion at
    the earliest and without the wait for a worker. Workers that hang are replaced."""
    tool_timeout: float = Field(60.0, gt=0)
    """Seconds that an episode may take between two turns (tools, its reward) before it counts as failed."""
    max_reward_errors: Fraction = 0.2
    """Share of a step's completions whose reward may fail before the run stops."""


class BatchConfig(Section):
    max_tokens_per_micro_batch: Literal["auto"] | Positive = "auto"
    """Packed tokens of one forward pass on one rank. auto on CUDA: the largest of 24,576, 16,384 and 8,192 whose
    activations fit into the measured free memory; if none does, at most 8,192 with as few recomputed blocks as needed.
    On CPU at most 16,384."""
    minibatches: Positive = 1
    """Optimizer steps per pass over a batch."""
    epochs: Positive = 1
    """Passes over each batch."""
    drop_constant_groups: bool = True
    """Leave groups without reward variance out of the forward pass; they still count in the denominator."""
    mask_truncated: bool = False
    """Take completions cut at max_completion_tokens out of the loss."""


class EvaluationConfig(Section):
    every: NonNegative = 10
    """Steps between evaluations on held-out prompts; 0 is never. The start and the end of a run are evaluated too."""
    prompts: Positive = 64
    """Held-out prompts."""
    samples_per_prompt: Positive = 1
    """Completions per held-out prompt."""
    temperature: float = Field(1.0, ge=0, le=2)
    """Sampling temperature on held-out prompts; 0 is greedy."""


class CheckpointConfig(Section):
    every: NonNegative = 50
    """Steps between checkpoints; 0 is only at the end and on a signal."""
    keep_last: Positive = 2
    """Older checkpoints are deleted."""
    final: bool = True
    """Save a checkpoint and export final_model/ when all steps are done."""
    export_every: NonNegative = 0
    """Steps between Hugging Face exports (step_N/); 0 is only final_model/."""
    export_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of exported weights. auto: the policy's compute type."""


class TrackingConfig(Section):
    console: Literal["auto", "live", "plain"] = "auto"
    """live: progress bar and table. plain: one line per step. auto: live on a terminal."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Weights & Biases."""
    wandb_project: str = "colocated_grpo"
    """W&B project."""
    wandb_group: str | None = None
    """W&B group."""
    tensorboard: bool = False
    """Write TensorBoard events into the run folder."""
    profile_step: NonNegative | None = None
    """Step whose training phase is profiled into profile/ of the run folder (rank 0)."""
    rollouts_per_step: NonNegative = 4
    """Rollouts of each step written to rollouts.jsonl."""


class FreshnessConfig(Section):
    every: NonNegative = 1
    """Check every n-th weight sync; 0 is never."""
    probe_tokens: int = Field(32, ge=2)
    """Tokens scored by engine and policy after a sync."""
    max_mean_diff: float | None = Field(None, gt=0)
    """Largest freshness/mean_diff (|engine - policy| log-probability). Default: 0.15 in 16-bit, 0.001 in float32."""


class Config(Section):
    model: ModelConfig
    """The model that is trained; plain text is its name."""
    environments: list[EnvironmentConfig] = Field(min_length=1)
    """Where prompts and rewards come from; several are mixed by weight."""
    training_steps: Positive = 100
    """Batches (rollout phases) of the whole run."""
    sync_frequency: Positive = 1
    """Steps between weight syncs into the engine. Above 1 rollouts are stale; staleness is measured and corrected."""
    weights: Literal["copied", "shared"] = "copied"
    """copied: FSDP2 shards, copied into the engine at each sync. shared: a single rank computes with the engine's own
    weights, which each optimizer step writes: a sync moves nothing and FSDP's work on the host is gone, but the weights
    stay on the device while the policy trains (2 bytes a parameter)."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Root of every random number of the run."""
    deterministic: bool = False
    """Fix which rank serves which prompt, so that a resumed run repeats the uninterrupted one exactly."""
    output_dir: FileName = "runs"
    """Folder that holds run folders."""
    run_name: str | None = None
    """Name of the run folder. Default: config file's name and the start time."""
    policy: PolicyConfig = PolicyConfig()
    """Optimizer, precision and memory of the trained model."""
    engine: EngineConfig = EngineConfig()
    """The vLLM engine inside each rank."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling and rewards."""
    advantage: AdvantageConfig = AdvantageConfig()
    """From rewards to advantages."""
    loss: LossConfig = DAPOConfig()
    """The objective."""
    batch: BatchConfig = BatchConfig()
    """Packing, minibatches, epochs."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out prompts."""
    freshness: FreshnessConfig = FreshnessConfig()
    """Proof that the engine samples from the weights just written."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and exporting."""
    tracking: TrackingConfig = TrackingConfig()
    """What a person sees."""

    @property
    def atropos(self) -> AtroposSourceConfig | None:
        """The Atropos entry; there is at most one."""
        return next((entry for entry in self.environments if isinstance(entry, AtroposSourceConfig)), None)

    @property
    def atropos_share(self) -> float:
        """Of a step's prompts, those that the Atropos entry's batch stands for; a whole number in a sound config."""
        total = sum(entry.weight for entry in self.environments)
        return 0.0 if self.atropos is None else self.rollout.prompts_per_step * self.atropos.weight / total

    @property
    def opponent(self) -> OpponentConfig | None:
        """Of the turn games that have one; all of them have the same."""
        turns = [source for source in self.environments if isinstance(source, TurnsSourceConfig)]
        return next((source.opponent for source in turns if source.opponent is not None), None)

    @property
    def opponent_model(self) -> ModelConfig | None:
        """Where the opponent's weights are read from."""
        opponent = self.opponent
        if opponent is None:
            return None
        if opponent.name == INITIAL:
            return self.model
        return self.model.model_copy(update={"name": opponent.name, "revision": opponent.revision})

    @property
    def optimizer_steps(self) -> int:
        """Of the whole run."""
        return self.training_steps * self.batch.minibatches * self.batch.epochs

    @property
    def structured(self) -> bool:
        """Whether some completions are sampled within a grammar."""
        return any(isinstance(source, TurnsSourceConfig) and source.structured for source in self.environments)

    @property
    def max_sequence_tokens(self) -> int:
        return self.rollout.max_prompt_tokens + self.rollout.max_completion_tokens
