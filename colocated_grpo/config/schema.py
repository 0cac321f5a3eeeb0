"""All settings of a run, with bounds and documentation. Those of losses and environments are in files of their own.

Defaults are defined in these models and nowhere else. Nothing here imports torch or vllm. Losses and environments are
unions of models, selected by `type`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from colocated_grpo.config.atropos import AtroposSourceConfig
from colocated_grpo.config.base import FileName, Fraction, NonNegative, Positive, Section
from colocated_grpo.config.engine import EngineConfig
from colocated_grpo.config.evaluation import EvaluationConfig
from colocated_grpo.config.hub import HubConfig
from colocated_grpo.config.layers import Layers
from colocated_grpo.config.lora import LEARNING_RATE, LoRAConfig
from colocated_grpo.config.losses import AdvantageConfig, DAPOConfig, LossConfig
from colocated_grpo.config.selection import ResampleConfig, SkipSolvedConfig
from colocated_grpo.config.sources import EnvironmentConfig
from colocated_grpo.config.templates import TemplateVariables
from colocated_grpo.config.turns import INITIAL, OpponentConfig, TurnsSourceConfig

MIN_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this value; at 0 it samples greedily."""
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _parse_boolean(value: Any) -> Any:
    """Convert YAML 1.1 booleans (yes, no, on, off), as pydantic does for plain bool fields only."""
    return _BOOLEANS.get(value.lower(), value) if isinstance(value, str) else value


AutoOrBool = Annotated[Literal["auto", True, False], BeforeValidator(_parse_boolean)]


class ModelConfig(Section):
    name: FileName
    """Local folder or Hugging Face name of a causal language model."""
    revision: str | None = None
    """Branch, tag or commit on the Hub. Default: the main branch."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint. Only for repositories you trust."""
    chat_template: FileName | None = None
    """Chat template: Jinja text, or the path of a file with it. Default: the tokenizer's own."""
    chat_template_kwargs: TemplateVariables = {}
    """Variables of the chat template, such as {enable_thinking: false}, in prompts of every environment and evaluation
    set, and in chat requests to the engine's server that do not set them."""


class OptimizerConfig(Section):
    type: Literal["adamw", "adamw_8bit", "adafactor"] = "adamw"
    """adamw: torch's fused AdamW, 8 bytes of state per parameter. adamw_8bit: bitsandbytes, 2 bytes; resumes only
    on the same number of shards. adafactor: factored second moment, almost no state; ignores beta1, beta2 and eps."""
    beta1: Fraction = 0.9
    """Decay rate of AdamW's first moment."""
    beta2: Fraction = 0.999
    """Decay rate of AdamW's second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator of AdamW's update."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of all parameters: each step multiplies them by 1 - lr * weight_decay."""


class PolicyConfig(Section):
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate. The default suits pretrained models; models of a few million parameters need 1e-4 and
    more. With `lora` the default is 1e-5: adapters need about ten times the learning rate of full training."""
    min_lr: float = Field(0.0, ge=0)
    """Final learning rate of a cosine or linear schedule. At most lr."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Course of the learning rate after warmup, over the run's optimizer steps. A step in which all groups are pending
    (games with delayed returns) makes no optimizer step, so such a run ends before the schedule reaches min_lr."""
    warmup_steps: NonNegative = 0
    """Optimizer steps of linear warmup: step i (from 0) of n uses lr * (i + 1) / n."""
    grad_clip: float = Field(1.0, gt=0)
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
    """Compile each transformer block with torch.compile. auto: on CUDA only. Set false for very small models, where
    compiling takes longer than it saves."""
    cpu_offload: bool = False
    """Keep master weights, gradients and optimizer state in host memory (FSDP2 CPU offload), about 16 bytes per
    parameter over all ranks with AdamW. Slower; for models that do not fit on the device beside their engine."""
    offload_optimizer: bool = False
    """Move optimizer state to host memory while the engine generates, and back. Leaves more room for the KV cache;
    costs two copies of the state per step."""
    replicate: Literal["nodes"] | None = None
    """null: shard weights and optimizer state over all ranks. nodes: shard them over the ranks of each node, with a
    replica on every node (HSDP), so that only gradients cross the network. A checkpoint of one resumes in the other."""
    logprob_chunk_tokens: Positive = 2048
    """Tokens per chunk when log-probabilities are computed. Only one chunk's float32 logits exist at a time: 1.2 GB for
    2,048 tokens and a vocabulary of 152,000."""
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


class RolloutConfig(Section):
    prompts_per_step: Positive = 32
    """Prompts of one step, over all ranks. A step trains prompts_per_step * group_size completions."""
    group_size: int = Field(8, ge=2)
    """Completions sampled for each prompt. At least 2, as their rewards are compared with each other."""
    max_prompt_tokens: Positive = 1024
    """Maximum prompt length in tokens. Longer prompts are dropped, never truncated (metric prompts_dropped)."""
    max_completion_tokens: Positive = 1024
    """Maximum completion length in tokens; sampling stops there with finish_reason 'length'. In an episode: all tokens
    after the prompt, observations included."""
    temperature: float = Field(1.0, ge=MIN_TEMPERATURE, le=2)
    """Sampling temperature. The trainer divides its logits by the same value, so both use the same distribution."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the likeliest tokens that reach this total probability; 1 keeps all. Below 1 the engine's
    log-probabilities are renormalised over the kept tokens and no longer match the trainer's."""
    top_k: int = Field(0, ge=0)
    """Sample from the k likeliest tokens; 0 keeps all. Changes log-probabilities like top_p."""
    min_p: Fraction = 0.0
    """Drop tokens less likely than this fraction of the likeliest one; 0 keeps all. Changes log-probabilities like
    top_p."""
    repetition_penalty: float = Field(1.0, gt=0)
    """vLLM's repetition penalty; 1 is none. Changes log-probabilities like top_p."""
    stop: list[str] = []
    """Strings that end a completion. The tokens of the string are part of the completion and are trained."""
    max_staleness: Literal[0, 1] = 0
    """With engine servers only. 0: generate, then train. 1: generate the next step's completions while this step
    trains; they are sampled with weights one step older, which `staleness` reports and loss.correction corrects."""
    resample: ResampleConfig | None = None
    """Replace groups without reward variance by groups of fresh prompts in the same step (dynamic sampling). null: off.
    {}: on, with the defaults below."""
    skip_solved: SkipSolvedConfig | None = None
    """Skip prompts that the policy has solved in all completions of their last visits. null: off. {}: on, with the
    defaults below."""
    generation: Literal["sharded", "replicated"] = "sharded"
    """sharded: each prompt is generated by one engine. replicated: every engine generates every prompt, and those of
    rank 0's engine are used."""
    reward_workers: Positive = 8
    """Threads and worker processes per rank that compute rewards while the engine decodes. 1: rewards of one prompt at
    a time."""
    reward_timeout: float = Field(60.0, gt=0)
    """Time limit in seconds for the rewards of one prompt. It starts with the call, but not before the rank has sampled
    its last completion of the step. On timeout the completions count as failed, and hanging threads and processes are
    replaced. A reward or an episode that blocks all threads of its rank for this long (at least 5 s) ends the run."""
    tool_timeout: float = Field(60.0, gt=0)
    """Time limit in seconds between two turns of an episode (tools, reward). On timeout the episode has failed."""
    max_reward_errors: Fraction = 0.2
    """Largest fraction of a step's completions whose reward may fail. Above it the run stops and shows the first
    error. A completion whose answer a working scorer could not read has reward 0 and does not count (metric
    `unscorable`)."""


class BatchConfig(Section):
    max_tokens_per_micro_batch: Literal["auto"] | Positive = "auto"
    """Packed tokens of one forward pass on one rank; changes speed and memory, not the gradient. At least the longest
    sequence. auto on CUDA: the largest of 24,576, 16,384 and 8,192 that fits into the measured free memory without
    recomputing blocks; if none does, at most 8,192 with as few recomputed blocks as needed. auto on CPU: 16,384, or
    more if the longest sequence needs it."""
    minibatches: Positive = 1
    """Optimizer steps per pass over a batch. Groups stay together, so it must divide rollout.prompts_per_step. Every
    update after the first is off-policy; the loss clips its ratio."""
    epochs: Positive = 1
    """Passes over each batch. Every update after the first is off-policy."""
    drop_constant_groups: bool = True
    """Skip groups of equal rewards in the forward pass: their policy gradient is zero. They still count in the loss's
    denominator, so the gradient is the same. No effect with loss.kl.coef above 0, where they have a gradient."""
    mask_truncated: bool = False
    """Exclude the tokens of completions cut at rollout.max_completion_tokens from the loss. The completions still count
    in the denominator of grpo, dr_grpo and gspo."""


class CheckpointConfig(Section):
    every: NonNegative = 50
    """Steps between checkpoints. 0: only at the end and when a signal stops the run."""
    keep_last: Positive = 2
    """Number of checkpoints to keep. Older ones are deleted."""
    final: bool = True
    """Save a checkpoint and export final_model/ after the last step."""
    export_every: NonNegative = 0
    """Steps between exports in Hugging Face format (step_N/ in the run folder). 0: only final_model/."""
    export_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of exported weights. auto: policy.compute_dtype."""
    export_merged: bool = False
    """With policy.lora: besides each exported adapter (final_adapter/, adapter_step_N/) also write the merged weights
    as a model (final_model/, step_N/)."""


TrackerName = Literal["aim", "clearml", "comet_ml", "mlflow", "swanlab", "trackio"]


class TrackingConfig(Section):
    console: Literal["auto", "live", "plain"] = "auto"
    """live: progress bar and table. plain: one line per step. auto: live on a terminal, else plain."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Log to Weights & Biases."""
    wandb_project: str = "colocated_grpo"
    """W&B project."""
    wandb_group: str | None = None
    """W&B group."""
    tensorboard: bool = False
    """Write TensorBoard events into the run folder."""
    trackers: list[TrackerName] = []
    """Further trackers, whose packages you install and log in to. In names of metrics they get _ for characters other
    than letters, digits, `_`, `-`, `/` and spaces."""
    project: str = Field("colocated_grpo", min_length=1)
    """Project of `trackers`; the experiment in MLflow."""
    completions_every: NonNegative = 0
    """Steps between tables of completions, with prompts and rewards, that are sent to W&B, trackio, SwanLab, MLflow,
    ClearML and Comet. 0: none. rollouts.jsonl has completions of every step (rollouts_per_step)."""
    completions_rows: int = Field(16, ge=1, le=1000)
    """Completions in such a table, evenly spaced from the worst to the best reward."""
    profile_step: NonNegative | None = None
    """Step (from 0) whose training phase is profiled on rank 0, into profile/ in the run folder. null: none."""
    rollouts_per_step: NonNegative = 4
    """Rollouts of each step that are written to rollouts.jsonl."""
    show_completion: bool = False
    """Show one completion of each step on the console, the one with the median reward."""


class FreshnessConfig(Section):
    every: NonNegative = 1
    """Check every n-th weight sync. 0: never."""
    probe_tokens: int = Field(32, ge=2)
    """Length in tokens of the prompt that engine and policy both score after a sync."""
    max_mean_diff: float | None = Field(None, gt=0)
    """Largest accepted mean of |engine - policy| log-probability (freshness/mean_diff); above it the run stops.
    Default: 0.15 where engine or policy is 16-bit, 0.001 in float32."""


class Config(Section):
    model: ModelConfig
    """Model to train. `model: NAME` is short for `model: {name: NAME}`."""
    environments: list[EnvironmentConfig] = Field(min_length=1)
    """Sources of prompts and rewards, mixed by weight. A file without this key trains on the built-in task
    arithmetic."""
    training_steps: Positive = 100
    """Steps of the whole run. A step samples one batch and makes batch.minibatches * batch.epochs optimizer steps."""
    sync_frequency: Positive = 1
    """Steps between weight syncs into the engine. Above 1 rollouts are sampled with older weights: `staleness` reports
    by how many optimizer steps, and loss.correction corrects for it."""
    weights: Literal["copied", "shared"] = "copied"
    """copied: the policy is sharded by FSDP2, and each sync copies its weights into the engine. shared: policy and
    engine use the same tensors, so there is no sync and no FSDP overhead; needs a single rank. The tensors stay on the
    device while the policy trains: 2 bytes more per parameter in bfloat16. A checkpoint of one mode resumes in the
    other."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Determines all random numbers of the run."""
    deterministic: bool = False
    """Assign prompts to engines in a fixed order and use deterministic kernels, so that a resumed run repeats the
    uninterrupted one bit for bit. Slower."""
    output_dir: FileName = "runs"
    """Folder in which run folders are created."""
    run_name: str | None = None
    """Name of the run folder, new or resumed by --resume auto. Default: the config file's name and the start time."""
    policy: PolicyConfig = PolicyConfig()
    """Optimizer, precision and memory of the trained model."""
    engine: EngineConfig = EngineConfig()
    """vLLM engines: inside each rank, or servers."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling and rewards."""
    advantage: AdvantageConfig = AdvantageConfig()
    """Computation of advantages from rewards."""
    loss: LossConfig = DAPOConfig()
    """Objective, selected by `type`: grpo, dr_grpo, dapo, bnpo, cispo or gspo."""
    batch: BatchConfig = BatchConfig()
    """Packing, minibatches and epochs."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation on held-out prompts and on sets of their own, and what is kept of the best step."""
    freshness: FreshnessConfig = FreshnessConfig()
    """Check after weight syncs that the engine computes with the policy's weights."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints and exports."""
    hub: HubConfig | None = None
    """Push the model or adapter to the Hugging Face Hub: docs/guides/sharing.md. null: off."""
    tracking: TrackingConfig = TrackingConfig()
    """Console, W&B, TensorBoard, other trackers and logged rollouts."""

    @property
    def atropos(self) -> AtroposSourceConfig | None:
        """The Atropos entry; there is at most one."""
        return next((entry for entry in self.environments if isinstance(entry, AtroposSourceConfig)), None)

    @property
    def atropos_share(self) -> float:
        """Number of a step's prompts that the Atropos batch supplies. `rules` requires a whole number."""
        total = sum(entry.weight for entry in self.environments)
        return 0.0 if self.atropos is None else self.rollout.prompts_per_step * self.atropos.weight / total

    @property
    def opponent(self) -> OpponentConfig | None:
        """The opponent of the turn games. `rules` requires all games that set one to set the same."""
        turns = [source for source in self.environments if isinstance(source, TurnsSourceConfig)]
        return next((source.opponent for source in turns if source.opponent is not None), None)

    @property
    def opponent_model(self) -> ModelConfig | None:
        """The model whose weights the opponent starts with."""
        return None if self.opponent is None else self.model_of(self.opponent)

    def model_of(self, opponent: OpponentConfig) -> ModelConfig:
        if opponent.name == INITIAL:
            return self.model
        return self.model.model_copy(update={"name": opponent.name, "revision": opponent.revision})

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.training_steps * self.batch.minibatches * self.batch.epochs

    @property
    def is_mixed(self) -> bool:
        """Several environments, whose metrics are also recorded one by one."""
        return len(self.environments) > 1

    @property
    def ranks_per_engine(self) -> int:
        """Ranks of the run that form one engine; 1 with engine servers, whose ranks are not the run's."""
        return self.engine.tensor_parallel_size if self.engine.placement == "colocated" else 1

    @property
    def shares_weights(self) -> str | None:
        """The setting because of which policy and engine compute with the same tensors; None if they do not."""
        if self.engine.placement == "server":
            return "engine.bridge" if self.engine.bridge == "shared" else None
        return "weights" if self.weights == "shared" else None

    @property
    def structured(self) -> bool:
        """True if a grammar constrains some of the completions."""
        return any(isinstance(source, TurnsSourceConfig) and source.structured for source in self.environments)

    @property
    def max_sequence_tokens(self) -> int:
        return self.rollout.max_prompt_tokens + self.rollout.max_completion_tokens
